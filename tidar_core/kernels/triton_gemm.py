"""Matrix products for few rows in Triton: y = x weightᵀ + bias, the adapter on mask rows in the same launch.

Every weight has one tile of outputs, one K order and one number of K splits, whatever the number of rows: that is what
makes a row's bits its own. A step of 1 to 300 rows is bound by reading weights, so tiles are chosen to read from
enough multiprocessors at once; small weights are cut along K for that, the parts are added in their order by
whichever program comes last, and the cut is a property of the weight as well. With more than 64 rows what counts is how
often the weight goes from the cache to a multiprocessor, by reckoning from measured steps: on Hopper two tiles of rows
become one there, for which it goes once.

The adapter's x aᵀ is computed again by every tile of outputs, beside its own columns (a is small and comes out of
the cache): no launch of its own, no waiting for one, and base rows are kept apart by a select, never touched.
"""

# mypy: allow-untyped-defs

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.kernels.triton_launch import (
    HOPPER,
    LINE,
    capability,
    launch_options,
    let_next_begin,
    prefetch,
    processors,
    wait_for_kernel_before,
)
from tidar_core.kernels.triton_tiles import GemmTiles, gemm_tiles, tiles_beside, tiles_for
from tidar_core.model.weights import LowRank

ARRIVALS = 1 << 16  # counters made at first; a step that is captured as a graph must not need more
WIDEST_RANK = 64  # of an adapter that is computed beside the base product: more would not fit the shared memory
PREFETCH_BYTES = 8 << 20  # of the next product's weight, fetched into the L2 cache during this one. Not measured yet.
OWN_PREFETCH_LINES = tl.constexpr(8)  # cache lines of each row of its own weight, before the kernel in front is through


@triton.jit
def begin_product(
    weight, low_a, low_b, n,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Prefetches the beginning of a tile's weights and the adapter's, then waits for the kernel before."""
    if OVERLAP:
        part: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
        line: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
        k = tl.program_id(2) * part + tl.arange(0, OWN_PREFETCH_LINES) * line
        prefetch(weight + row * K + tl.minimum(k, K - 1)[None, :])
        if HAS_LOW_RANK:
            lines: tl.constexpr = triton.next_power_of_2((RANK + line - 1) // line)
            prefetch(low_b + row * RANK + tl.minimum(tl.arange(0, lines) * line, RANK - 1)[None, :])
            prefetch_shared(low_a, RANK * K // line, N, BLOCK_N, SPLITS)
    wait_for_kernel_before(OVERLAP)


@triton.jit
def prefetch_shared(matrix, LINES: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Prefetches the first LINES cache lines of a matrix that all programs of a product read, each its share."""
    programs: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * SPLITS
    each: tl.constexpr = (LINES + programs - 1) // programs
    if each > 0 and tl.program_id(0) == 0:
        i = tl.minimum(tl.arange(0, triton.next_power_of_2(each)), each - 1)
        line = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * each + i
        elements: tl.constexpr = LINE * 8 // matrix.dtype.element_ty.primitive_bitwidth
        prefetch(matrix + tl.minimum(line, LINES - 1).to(tl.int64) * elements)


@triton.jit
def product_part(
    x, weight, scales, low_a, low_b, next_weight, m, n, split, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of x weightᵀ over one part of K, fp32 [BLOCK_M, BLOCK_N], with the adapter's share of it.

    x [rows, K], weight [N, K] (in 8 bits: times `scales`, fp32 [N]), low_a [RANK, K], low_b [N, RANK]. m: rows of x, n:
    rows of weight (any order, those from `rows` and N on are none). Lets the next kernel begin, and prefetches the
    first PREFETCH_LINES cache lines of `next_weight`, which the next product reads, so that memory is read between the
    products too.
    """
    i = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * K
    weight_at = weight + n.to(tl.int64)[:, None] * K
    total = tl.full([BLOCK_M, BLOCK_N], 0, tl.float32)
    part: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    rounded: tl.constexpr = weight.dtype.element_ty == tl.float8e4nv
    if rounded:
        scale = tl.load(scales + n, mask=n < N, other=0.0)
    if HAS_LOW_RANK:
        r = tl.arange(0, BLOCK_RANK)
        drafted = tl.full([BLOCK_M, BLOCK_RANK], 0, tl.float32)
        # A tile without mask rows reads nothing of the adapter.
        ranks = tl.where((tl.program_id(0) + 1) * BLOCK_M > first_mask_row, RANK, 0)
        low_out_at = low_b + n.to(tl.int64)[:, None] * RANK + r[None, :]
        low_out = tl.load(low_out_at, mask=(n < N)[:, None] & (r < ranks)[None, :], other=0.0)

    for start in range(split * part, tl.minimum(K, (split + 1) * part), BLOCK_K):
        k = tl.multiple_of(start, BLOCK_K) + i
        if K % BLOCK_K == 0:
            rows_here = tl.load(x_at + k[None, :], mask=(m < rows)[:, None], other=0.0)
            weight_here = tl.load(weight_at + k[None, :], mask=(n < N)[:, None], other=0.0)
        else:
            within = (k < K)[None, :]
            rows_here = tl.load(x_at + k[None, :], mask=(m < rows)[:, None] & within, other=0.0)
            weight_here = tl.load(weight_at + k[None, :], mask=(n < N)[:, None] & within, other=0.0)
        if rounded:
            weight_here = weight_here.to(x.dtype.element_ty)
        total = tl.dot(rows_here, tl.trans(weight_here), acc=total, input_precision="ieee")
        if HAS_LOW_RANK:
            low_at = low_a + r[:, None] * K + k[None, :]
            if K % BLOCK_K == 0:
                low_here = tl.load(low_at, mask=(r < ranks)[:, None], other=0.0)
            else:
                low_here = tl.load(low_at, mask=(r < ranks)[:, None] & (k < K)[None, :], other=0.0)
            drafted = tl.dot(rows_here, tl.trans(low_here), acc=drafted, input_precision="ieee")

    let_next_begin(OVERLAP)
    if OVERLAP:
        prefetch_shared(next_weight, PREFETCH_LINES, N, BLOCK_N, SPLITS)
    if rounded:
        total = total * scale[None, :]
    if HAS_LOW_RANK:
        extra = tl.dot(drafted.to(low_out.dtype), tl.trans(low_out), input_precision="ieee")
        total = tl.where((m >= first_mask_row)[:, None], total + extra, total)
    return total


@triton.jit
def product(
    x, weight, low_a, low_b, next_weight, partial, arrived, m, n, column, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of x weightᵀ, and whether this program has all of it: of the programs that share it the last one does.

    Grid (row tiles, output tiles, splits). partial: fp32 [SPLITS, rows, N]. arrived: int32, zero before and after, one
    for each tile. column: where in `partial` each of the rows n of the weight goes.
    """
    split = tl.program_id(2)
    scales = (weight + N * K).to(tl.pointer_type(tl.float32))  # of weights in 8 bits: as `float8.packed` has them
    total = product_part(
        x, weight, scales, low_a, low_b, next_weight, m, n, split, rows, first_mask_row,
        N, K, RANK, BLOCK_RANK, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PREFETCH_LINES, HAS_LOW_RANK, OVERLAP,
    )  # fmt: skip
    whole = True
    if SPLITS > 1:
        inside = (m < rows)[:, None] & (column < N)[None, :]
        at, size = m.to(tl.int64)[:, None] * N + column[None, :], rows.to(tl.int64) * N
        here = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial + split * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        whole = tl.atomic_add(here, 1) == SPLITS - 1
        if whole:
            total = tl.load(partial + at, mask=inside, other=0.0)
            for other in range(1, SPLITS):
                total += tl.load(partial + other * size + at, mask=inside, other=0.0)
            tl.store(here, 0)
    return total, whole


@triton.jit(do_not_specialize=["rows", "first_mask_row"])
def _linear(
    x, weight, bias, low_a, low_b, next_weight, out, partial, arrived, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = x weightᵀ + bias, one tile of it."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin_product(weight, low_a, low_b, n, N, K, RANK, BLOCK_N, BLOCK_K, SPLITS, HAS_LOW_RANK, OVERLAP)
    total, whole = product(
        x, weight, low_a, low_b, next_weight, partial, arrived, m, n, n, rows, first_mask_row,
        N, K, RANK, BLOCK_RANK, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PREFETCH_LINES, HAS_LOW_RANK, OVERLAP,
    )  # fmt: skip
    if whole:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """How a product is launched. operands: weight, bias, the adapter's two matrices, the next weight; any tensor stands
    in for one that is not there. parts: the buffers in which its splits meet. named: sizes and options of the
    kernel."""

    grid: tuple[int, int, int]
    operands: tuple[Tensor, ...]
    parts: tuple[Tensor, Tensor]
    named: dict[str, Any]


class PlanProduct(Protocol):
    """How to launch a product x weightᵀ with an adapter of a rank up to WIDEST_RANK. next_weight: what the
    next product reads. One stream at a time may run what is planned: launches share the arrival counters."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank: LowRank | None,
        first_mask_row: int,
        next_weight: Tensor | None = None,
        /,
    ) -> ProductLaunch: ...


def product_planner(
    measured: Mapping[tuple[int, int], GemmTiles] | None = None,
    prefetch_bytes: int = PREFETCH_BYTES,
    *,
    overlap_launches: bool = True,
) -> PlanProduct:
    """Launches with one configuration a weight: `measured` by (outs, ins), else `gemm_tiles`. prefetch_bytes: how much
    of the next product's weight each product fetches into the L2 cache, in steps of few rows."""
    measured = measured or {}
    # The last is the longest. Those before stay: graphs that were captured with them count there.
    arrivals: dict[torch.device, list[Tensor]] = {}

    def arrived(count: int, device: torch.device) -> Tensor:
        made = arrivals.setdefault(device, [])
        if not made or len(made[-1]) < count:
            made.append(torch.zeros(max(count, ARRIVALS), dtype=torch.int32, device=device))
        return made[-1]

    def plan(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank: LowRank | None,
        first_mask_row: int,
        next_weight: Tensor | None = None,
        /,
    ) -> ProductLaunch:
        rows, (outs, ins) = x.shape[0], weight.shape
        found = measured.get((outs, ins)) if weight.dtype == x.dtype else None
        beside = low_rank if first_mask_row < rows else None
        low_a, low_b = (weight, weight) if beside is None else (beside.a, beside.b)
        rank = 16 if beside is None else low_a.shape[0]
        block_rank = max(16, triton.next_power_of_2(rank))
        tiles = found or gemm_tiles(outs, ins, weight.dtype)

        def grid_of(tiles: GemmTiles) -> tuple[int, int, int]:
            return triton.cdiv(rows, tiles.rows), triton.cdiv(outs, tiles.outs), tiles.splits

        hopper = x.device.type != "cuda" or capability(x.device)[0] == HOPPER[0]
        if hopper and weight.dtype == x.dtype:  # of weights in 8 bits neither was looked at
            adapted = 0 if beside is None else block_rank
            tiles = tiles_for(tiles, rows, x.dtype, adapted)
            tiles = tiles_beside(tiles, x.dtype, adapted, math.prod(grid_of(tiles)), processors(x.device))
        grid = grid_of(tiles)
        options = launch_options(x.device, rows, overlap_launches)
        fetched = 0 if next_weight is None or not options["OVERLAP"] else min(next_weight.nbytes, prefetch_bytes)
        named = {
            "N": outs, "K": ins, "RANK": rank, "BLOCK_RANK": block_rank,
            "BLOCK_M": tiles.rows, "BLOCK_N": tiles.outs, "BLOCK_K": tiles.ins, "SPLITS": tiles.splits,
            "PREFETCH_LINES": fetched // LINE.value, "HAS_BIAS": bias is not None, "HAS_LOW_RANK": beside is not None,
            "num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True, **options,
        }  # fmt: skip
        size = (tiles.splits, rows, outs) if tiles.splits > 1 else (1,)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = arrived(grid[0] * grid[1] if tiles.splits > 1 else 1, x.device)
        follows = weight if next_weight is None else next_weight
        operands = weight, weight if bias is None else bias, low_a, low_b, follows
        return ProductLaunch(grid, operands, (parts, counters), named)

    return plan


def exact_linear(
    plan: PlanProduct, out_dtype: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, Tensor | None, LowRank | None, int], Tensor]:
    """`Ops.linear` with one configuration a weight. y is in `out_dtype`, or as x is."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
        rows, outs = x.shape[0], weight.shape[0]
        out = torch.empty(rows, outs, dtype=out_dtype or x.dtype, device=x.device)
        if rows == 0:
            return out
        if low_rank is not None and first_mask_row < rows and low_rank.a.shape[0] > WIDEST_RANK:
            out = linear(x, weight, bias, None, rows)
            drafted = linear(x[first_mask_row:], low_rank.a, None, None, rows)
            out[first_mask_row:] += linear(drafted, low_rank.b, None, None, rows)
            return out
        launch = plan(x, weight, bias, low_rank, first_mask_row)
        _linear[launch.grid](x, *launch.operands, out, *launch.parts, rows, first_mask_row, **launch.named)
        return out

    return linear
