"""A mixture of experts in Triton: which experts a row goes through, and their MLPs, in launches of known shapes.

The host never knows how many rows an expert has, so a step can be captured as a graph. A row and one of its experts are
an entry, numbered row by row. Each expert's entries are listed in order; then programs go through the experts that have
some, each over one tile of outputs, and read its weights once for BLOCK_M of its entries. There are as many places for
experts as there could be experts with entries: a step of one row launches no programs for those it does not choose.
So few entries that one tile holds them all are not listed, which spares a launch and a wait for what it wrote: each has
programs of its own, and the first of an expert's entries takes the others along.
A row's results are added in the order of its experts, best first. Tiles and order of sums are a weight's own, as in
`triton_gemm.py`, so that a row's bits do not depend on who else chose its experts.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.config import Activation, Experts
from tidar_core.kernels.experts import LEAST_SUM, Routed
from tidar_core.kernels.triton_gemm import product_part
from tidar_core.kernels.triton_launch import launch_options, let_next_begin, wait_for_kernel_before
from tidar_core.kernels.triton_layers import store_gated
from tidar_core.kernels.triton_tiles import GemmTiles, gemm_tiles

LISTED_TOGETHER = 1024  # entries that a program looks at together for those of its expert
ADDED_TOGETHER = 1024  # numbers of a row
WIDEST_TILE = 64  # outputs: the few experts of one row must fill the GPU
STAGES = 6  # of 16-bit weights: an H100 prefers that for products of as many bytes, and two programs still fit it
SMALLEST_SUM = tl.constexpr(LEAST_SUM)
LOWEST = tl.constexpr(-3.4e38)  # of a score: what is below is chosen already


@triton.jit
def _choose(
    logits, bias, experts, shares, shared, scale,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALISED: tl.constexpr, SHARED_GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`experts.choose`, one row a program: logits fp32 [rows, WIDTH], experts int64 and shares fp32 [rows, CHOSEN],
    shared fp32 [rows]. What is not a number is the best, as there; whatever the scores are, the chosen are CHOSEN
    different ones."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    logit = tl.load(logits + row * WIDTH + e, mask=e < COUNT, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit, 0))
        score = powers / tl.sum(powers, 0)
    ranked = score
    if HAS_BIAS:
        ranked += tl.load(bias + e, mask=e < COUNT, other=0.0)
    ranked = tl.where(ranked != ranked, float("inf"), tl.maximum(ranked, LOWEST))
    ranked = tl.where(e < COUNT, ranked, float("-inf"))
    place = tl.full([BLOCK], CHOSEN, tl.int32)
    for turn in tl.static_range(CHOSEN):
        best = e == tl.argmax(ranked, 0, tie_break_left=True)
        place = tl.where(best, turn, place)
        ranked = tl.where(best, float("-inf"), ranked)
    taken = place < CHOSEN
    share = score
    if RENORMALISED:
        share = share / tl.maximum(tl.sum(tl.where(taken, score, 0.0), 0), SMALLEST_SUM)
    tl.store(experts + row * CHOSEN + place, e.to(tl.int64), mask=taken)
    tl.store(shares + row * CHOSEN + place, share * scale, mask=taken)
    if SHARED_GATED:
        tl.store(shared + row, 1.0 / (1.0 + tl.exp(-tl.load(logits + row * WIDTH + COUNT))))


def route(
    to_logits: Callable[[Tensor, Tensor], Tensor],
    overlap_launches: bool,
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    experts: Experts,
) -> Routed:
    """`Ops.route`. to_logits(x, weight): x weightᵀ in fp32."""
    rows, logits = len(x), to_logits(x, router)
    chosen = torch.empty(rows, experts.chosen, dtype=torch.int64, device=x.device)
    shares = torch.empty(rows, experts.chosen, dtype=torch.float32, device=x.device)
    shared = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if experts.shared_gated else None
    if rows:
        _choose[(rows,)](
            logits, shares if bias is None else bias, chosen, shares, shares if shared is None else shared,
            float(experts.scale), WIDTH=logits.shape[1], COUNT=experts.count,
            BLOCK=triton.next_power_of_2(experts.count), CHOSEN=experts.chosen, SIGMOID=experts.scores == "sigmoid",
            HAS_BIAS=bias is not None, RENORMALISED=experts.renormalised, SHARED_GATED=experts.shared_gated,
            num_warps=1, enable_fp_fusion=True, **launch_options(x.device, rows, overlap_launches),
        )  # fmt: skip
    return Routed(chosen, shares, shared)


@triton.jit(do_not_specialize=["rows"])
def _list_rows(experts, listed, counts, rows, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The entries of one expert, in order: experts int64 [rows, CHOSEN], listed int32 [experts, rows] (a row is there
    at most once), counts int32 [experts]."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    expert = tl.program_id(0)
    found = 0
    for start in range(0, rows * CHOSEN, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        mine = (tl.load(experts + entry, mask=entry < rows * CHOSEN, other=-1) == expert).to(tl.int32)
        place = found + tl.cumsum(mine, 0) - mine
        tl.store(listed + expert.to(tl.int64) * rows + place, entry, mask=mine > 0)
        found += tl.sum(mine, 0)
    tl.store(counts + expert, found)


@triton.jit
def _expert_here(counts, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    """Of the experts with entries the one that is this program's, by its place among them, and its number of entries;
    none where there are fewer."""
    e = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + e, mask=e < EXPERTS, other=0)
    some = (count > 0).to(tl.int32)
    here = (some > 0) & (tl.cumsum(some, 0) - 1 == tl.program_id(0))
    return tl.sum(tl.where(here, e, 0), 0), tl.sum(tl.where(here, count, 0), 0)


@triton.jit
def _entry_here(experts, BLOCK: tl.constexpr):
    """The expert of this program's entry, one of BLOCK at most; and 1 if it is the first of that expert's, else 0."""
    here, i = tl.program_id(0), tl.arange(0, BLOCK)
    expert = tl.load(experts + here)
    before = tl.load(experts + i, mask=i < here, other=-1) == expert
    return expert, 1 - tl.max(before.to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows"])
def _expert_linear(
    x, weight, experts, listed, counts, out, rows,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the outputs of one expert's product, for all of its entries; grid (experts, output tiles), or where
    these are not LISTED (entries, output tiles), of at most BLOCK_M entries.

    weight [EXPERTS, N, K], out a row an entry. GATED: x is a row a row, and weight [gate; up], of which
    activation(gate) * up is written; else x is a row an entry.
    """
    wait_for_kernel_before(OVERLAP)
    if LISTED:
        expert, count = _expert_here(counts, EXPERTS, BLOCK_EXPERTS)
    else:
        expert, count = _entry_here(experts, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = rows * CHOSEN
    if GATED:
        n, x_rows = tl.where(column < N, column // 2 + column % 2 * (N // 2), N), rows
    else:
        n, x_rows = column, entries
    own = weight + expert.to(tl.int64) * (N * K)
    scales = (weight + EXPERTS * N * K).to(tl.pointer_type(tl.float32)) + expert * N
    for first in range(0, count, BLOCK_M):
        i = first + tl.arange(0, BLOCK_M)
        if LISTED:
            entry = tl.load(listed + expert.to(tl.int64) * rows + i, mask=i < count, other=entries)
        else:
            entry = tl.where(tl.load(experts + i, mask=i < entries, other=-1) == expert, i, entries)
        m = entry // CHOSEN if GATED else entry
        total = product_part(
            x, own, scales, own, own, own, m, n, 0, x_rows, x_rows,
            N, K, 16, 16, BLOCK_M, BLOCK_N, BLOCK_K, 1, 0, False, OVERLAP,
        )  # fmt: skip
        if GATED:
            store_gated(total, out, entries, entry, N, BLOCK_M, BLOCK_N, GELU)
        else:
            at = out + entry.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(at, total.to(out.dtype.element_ty), mask=(entry < entries)[:, None] & (n < N)[None, :])


@triton.jit
def _add_shares(
    results, shares, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [rows, WIDTH]: a row's results, [rows, CHOSEN, WIDTH], times its shares, fp32 [rows, CHOSEN], in order."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0, tl.float32)
    for place in tl.static_range(CHOSEN):
        entry = row * CHOSEN + place
        result = tl.load(results + entry * WIDTH + i, mask=i < WIDTH, other=0.0)
        total += tl.load(shares + entry) * result.to(tl.float32)
    tl.store(out + row * WIDTH + i, total.to(out.dtype.element_ty), mask=i < WIDTH)


def expert_tiles(outs: int, ins: int, dtype: torch.dtype) -> GemmTiles:
    """The tiles for experts [experts, outs, ins], whole along K: it is their number that fills the GPU."""
    tiles = gemm_tiles(outs, ins, dtype)
    stages = STAGES if dtype.itemsize == 2 else tiles.stages
    return replace(tiles, outs=min(tiles.outs, WIDEST_TILE), splits=1, warps=4, stages=stages)


def _tiles_of(weight: Tensor) -> GemmTiles:
    _, outs, ins = weight.shape
    return expert_tiles(outs, ins, weight.dtype)


def mix_experts(
    x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, activation: Activation, *, overlap_launches: bool = True
) -> Tensor:
    """`Ops.mix_experts`; gate_up and down may be in 8 bits, as `float8.packed` has them."""
    (rows, width), chosen, count = x.shape, routed.experts.shape[1], len(gate_up)
    out = torch.empty_like(x)
    if rows == 0:
        return out
    experts, entries, options = (
        routed.experts.contiguous(),
        rows * chosen,
        launch_options(x.device, rows, overlap_launches),
    )
    few = entries <= min(_tiles_of(weight).rows for weight in (gate_up, down))
    listed, counts = (experts, experts) if few else _listed(experts, count, options)

    def product(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
        (_, outs, ins), tiles = weight.shape, _tiles_of(weight)
        out = x.new_empty(entries, outs // 2 if gated else outs)
        _expert_linear[(entries if few else min(count, entries), triton.cdiv(outs, tiles.outs))](
            x, weight, experts, listed, counts, out, rows,
            N=outs, K=ins, EXPERTS=count, BLOCK_EXPERTS=triton.next_power_of_2(count), CHOSEN=chosen,
            BLOCK_M=tiles.rows, BLOCK_N=tiles.outs, BLOCK_K=tiles.ins, GATED=gated, GELU=activation == "gelu_tanh",
            LISTED=not few, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, **options,
        )  # fmt: skip
        return out

    results = product(product(x, gate_up, gated=True), down, gated=False)
    _add_shares[(rows, triton.cdiv(width, ADDED_TOGETHER))](
        results, routed.shares.contiguous(), out, WIDTH=width, CHOSEN=chosen, BLOCK=ADDED_TOGETHER, num_warps=4,
        enable_fp_fusion=True, **options,
    )  # fmt: skip
    return out


def _listed(experts: Tensor, count: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The entries of each of `count` experts, and how many they are, as `_list_rows` has them."""
    rows, chosen = experts.shape
    listed = torch.empty(count, rows, dtype=torch.int32, device=experts.device)
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    _list_rows[(count,)](
        experts, listed, counts, rows, CHOSEN=chosen, BLOCK=LISTED_TOGETHER, num_warps=4, enable_fp_fusion=True,
        **options,
    )  # fmt: skip
    return listed, counts
