"""Matrix products for few rows in Triton: y = x weightᵀ + bias, the adapter on mask rows in the same launch.

Every weight has one tile shape, one K order and one number of K splits, whatever the number of rows: that is what
makes a row's bits its own. A step of 1 to 300 rows is bound by reading weights, so tiles are chosen to read from
enough multiprocessors at once; small weights are cut along K for that, the parts are added in their order by
whichever program comes last, and the cut is a property of the weight as well.

The adapter's x aᵀ is computed again by every tile of outputs, beside its own columns (a is small and comes out of
the cache): no launch of its own, no waiting for one, and base rows are kept apart by a select, never touched.
"""

# mypy: allow-untyped-defs

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.kernels.triton_launch import LINE, launch_options, let_next_begin, read_ahead, wait_for_kernel_before
from tidar_core.model.weights import LowRank

PROGRAMS_AIMED_AT = 128  # about one for each multiprocessor of an H100 or H200
MOST_SPLITS = 8
STEPS_A_SPLIT = 4  # fewer K steps than this leave nothing to pipeline
ARRIVALS = 1 << 16  # counters made at first; a step that is captured as a graph must not need more
WIDEST_RANK = 128  # of an adapter that is computed beside the base product
LINES_AHEAD = tl.constexpr(8)  # cache lines of each weight row that are asked for before the kernel in front is through


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """One tile of y is rows x outs; K goes in steps of `ins`, cut into `splits` parts."""

    rows: int
    outs: int
    ins: int
    splits: int
    warps: int
    stages: int


def gemm_tiles(outs: int, ins: int, dtype: torch.dtype) -> GemmTiles:
    """The tiles for a weight [outs, ins] where none were measured.

    Wide tiles read x less often, which counts at 64 rows; narrow ones spread a small weight over more programs.
    """
    if dtype == torch.float32:
        rows, wide, step, stages = 16, 32, 32, 3
    else:
        megabytes = outs * ins * 2 / 2**20
        rows, wide, step, stages = 64, 128 if megabytes >= 8 else 64 if megabytes >= 2 else 32, 64, 4
    fitting = triton.cdiv(ins, step) // STEPS_A_SPLIT
    wanted = round(PROGRAMS_AIMED_AT / triton.cdiv(outs, wide))
    return GemmTiles(rows, wide, step, max(1, min(wanted, fitting, MOST_SPLITS)), 4, stages)


def measured_tiles(device: str, dtype: torch.dtype) -> dict[tuple[int, int], GemmTiles]:
    """The tiles of weights [outs, ins] that were measured on a kind of GPU (its name), for one dtype; none, mostly."""
    table = resources.files("tidar_core").joinpath("data", "gemm_tiles.json")
    if not table.is_file():
        return {}
    entries = json.loads(table.read_text(encoding="utf-8")).get(device, [])
    return {
        (entry["outs"], entry["ins"]): GemmTiles(**entry["tiles"])
        for entry in entries
        if entry["dtype"] == str(dtype).removeprefix("torch.")
    }


@triton.jit
def _finish(total, bias, out, m, n, rows, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Adds the bias and writes a tile of y."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["rows", "first_mask_row"])
def _linear(
    x, weight, bias, low_a, low_b, out, partial, arrived, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of y over one part of K; grid (row tiles, output tiles, splits).

    x [rows, K], weight [N, K], low_a [RANK, K], low_b [N, RANK], out [rows, N]. partial: fp32 [SPLITS, rows, N].
    arrived: int32, zero before and after, one for each tile of y.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    i = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * K
    weight_at = weight + n.to(tl.int64)[:, None] * K
    total = tl.full([BLOCK_M, BLOCK_N], 0, tl.float32)
    part: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    if OVERLAP:
        line: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        ahead = split * part + tl.arange(0, LINES_AHEAD) * line
        read_ahead(weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(ahead, K - 1)[None, :])
    wait_for_kernel_before(OVERLAP)
    if HAS_LOW_RANK:
        r = tl.arange(0, BLOCK_RANK)
        drafted = tl.full([BLOCK_M, BLOCK_RANK], 0, tl.float32)
        # A tile without mask rows reads nothing of the adapter.
        ranks = tl.where((tl.program_id(0) + 1) * BLOCK_M > first_mask_row, RANK, 0)

    for start in range(split * part, tl.minimum(K, (split + 1) * part), BLOCK_K):
        k = tl.multiple_of(start, BLOCK_K) + i
        if K % BLOCK_K == 0:
            rows_here = tl.load(x_at + k[None, :], mask=(m < rows)[:, None], other=0.0)
            weight_here = tl.load(weight_at + k[None, :], mask=(n < N)[:, None], other=0.0)
        else:
            within = (k < K)[None, :]
            rows_here = tl.load(x_at + k[None, :], mask=(m < rows)[:, None] & within, other=0.0)
            weight_here = tl.load(weight_at + k[None, :], mask=(n < N)[:, None] & within, other=0.0)
        total = tl.dot(rows_here, tl.trans(weight_here), acc=total, input_precision="ieee")
        if HAS_LOW_RANK:
            low_at = low_a + r[:, None] * K + k[None, :]
            if K % BLOCK_K == 0:
                low_here = tl.load(low_at, mask=(r < ranks)[:, None], other=0.0)
            else:
                low_here = tl.load(low_at, mask=(r < ranks)[:, None] & (k < K)[None, :], other=0.0)
            drafted = tl.dot(rows_here, tl.trans(low_here), acc=drafted, input_precision="ieee")

    let_next_begin(OVERLAP)
    if HAS_LOW_RANK:
        low_at = low_b + n.to(tl.int64)[:, None] * RANK + r[None, :]
        low_here = tl.load(low_at, mask=(n < N)[:, None] & (r < ranks)[None, :], other=0.0)
        extra = tl.dot(drafted.to(low_here.dtype), tl.trans(low_here), input_precision="ieee")
        total = tl.where((m >= first_mask_row)[:, None], total + extra, total)

    if SPLITS == 1:
        _finish(total, bias, out, m, n, rows, N, HAS_BIAS)
    else:
        inside = (m < rows)[:, None] & (n < N)[None, :]
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        size = rows.to(tl.int64) * N
        tl.store(partial + split * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        ticket = tl.atomic_add(arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), 1)
        if ticket == SPLITS - 1:
            total = tl.load(partial + at, mask=inside, other=0.0)
            for other in range(1, SPLITS):
                total += tl.load(partial + other * size + at, mask=inside, other=0.0)
            _finish(total, bias, out, m, n, rows, N, HAS_BIAS)
            tl.store(arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), 0)


def exact_linear(
    measured: Mapping[tuple[int, int], GemmTiles] | None = None, out_dtype: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, Tensor | None, LowRank | None, int], Tensor]:
    """`Ops.linear` with one configuration a weight: `measured` by (outs, ins), else `gemm_tiles`.

    y is in `out_dtype`, or as x is. One stream at a time may run it: launches share the arrival counters.
    """
    measured = measured or {}
    arrivals: dict[torch.device, Tensor] = {}

    def arrived(count: int, device: torch.device) -> Tensor:
        if device not in arrivals or len(arrivals[device]) < count:
            arrivals[device] = torch.zeros(max(count, ARRIVALS), dtype=torch.int32, device=device)
        return arrivals[device]

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
        rows, (outs, ins) = x.shape[0], weight.shape
        out = torch.empty(rows, outs, dtype=out_dtype or x.dtype, device=x.device)
        if rows == 0:
            return out
        if low_rank is None or first_mask_row >= rows:
            beside = None
        elif low_rank.a.shape[0] > WIDEST_RANK:
            out = linear(x, weight, bias, None, rows)
            drafted = linear(x[first_mask_row:], low_rank.a, None, None, rows)
            out[first_mask_row:] += linear(drafted, low_rank.b, None, None, rows)
            return out
        else:
            beside = low_rank
        rank = beside.a.shape[0] if beside else 16
        tiles = measured.get((outs, ins)) or gemm_tiles(outs, ins, x.dtype)
        grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(outs, tiles.outs), tiles.splits)
        counters = arrived(grid[0] * grid[1] if tiles.splits > 1 else 1, x.device)
        parts = (tiles.splits, rows, outs) if tiles.splits > 1 else (1,)
        partial = torch.empty(parts, dtype=torch.float32, device=x.device)
        _linear[grid](
            x, weight, weight if bias is None else bias, beside.a if beside else weight, beside.b if beside else weight,
            out, partial, counters, rows, first_mask_row,
            N=outs, K=ins, RANK=rank, BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
            BLOCK_M=tiles.rows, BLOCK_N=tiles.outs, BLOCK_K=tiles.ins, SPLITS=tiles.splits,
            HAS_BIAS=bias is not None, HAS_LOW_RANK=beside is not None,
            num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, **launch_options(x.device, rows),
        )  # fmt: skip
        return out

    return linear
