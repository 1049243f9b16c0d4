"""All layers of a model in Triton, in six launches a layer: what stands between the products is part of them.

A step of few rows is a chain of kernels, each too short to fill the GPU, so that their number counts. Here the
attention's projection and the down projection add to the residual themselves, the one in front of the activation
applies it, and the first rotates q and k and writes the pages. RMSNorm is cut in two: what adds to the residual also
multiplies it by the norm's weight, and leaves the squares' sum of each of its tiles; the product behind it divides its
results by the root of their mean, since that is one number a row. So a norm costs no launch, and rounds once instead of
twice.

Columns that belong together lie side by side in a tile: gate and up, or the two halves that a rotation mixes. Only the
order in which a program reads the rows of a weight says so; weights lie in memory as ever. Where a head is looked at as
a whole, for Qwen3's norm of it or for pages in 8 bits, the rotation is a launch of its own: heads may be wider than
tiles.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.kernels.ops import KVCache, Layers, Rotary, StepRows
from tidar_core.kernels.triton_gemm import (
    WIDEST_RANK,
    PlanProduct,
    begin_product,
    product,
)
from tidar_core.kernels.triton_launch import prefetch
from tidar_core.kernels.triton_rows import activate, add_norm, rotate_and_store
from tidar_core.model.decoder import BASE_ALONE, layer_qk_norm, own_attention
from tidar_core.model.weights import (
    AdapterWeights,
    LayerAdapter,
    LayerWeights,
    LowRank,
    ModelWeights,
    has_experts,
    norms_before,
)


@triton.jit
def _pairs(total, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The even and the odd columns of a tile, rounded: two of [BLOCK_M, BLOCK_N / 2]."""
    return tl.split(tl.reshape(total.to(dtype), [BLOCK_M, BLOCK_N // 2, 2]))


@triton.jit
def _load_squares(squares, m, rows, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """fp32 [1, BLOCK_M, BLOCK_PARTS]. Three dimensions, because the compiler lays out loads of one shape alike: were
    this of the shape of a piece of a weight, whether that is read would change the order in which the parts are summed.
    """
    p = tl.arange(0, BLOCK_PARTS)
    inside = (m < rows)[:, None] & (p < PARTS)[None, :]
    at = m.to(tl.int64)[:, None] * PARTS + p[None, :]
    return tl.load(squares + at[None, :, :], mask=inside[None, :, :], other=0.0)


@triton.jit
def _biased(total, seen, bias, n, eps, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A tile divided by the root of its rows' mean square, where a norm is not over yet, and the bias; n: its columns'
    rows of the weight."""
    if PARTS > 0:
        total = total * tl.rsqrt(tl.sum(tl.sum(seen, 2), 0) / K + eps)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def store_gated(
    total, out, rows, m, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    """Writes activation(gate) * up of a tile whose even columns are gates; out [rows, N / 2]."""
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = _pairs(total, dtype, BLOCK_M, BLOCK_N)
    activated = activate(gate.to(tl.float32), GELU).to(dtype).to(tl.float32)
    to = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = out + m.to(tl.int64)[:, None] * (N // 2) + to[None, :]
    tl.store(at, (activated * up.to(tl.float32)).to(dtype), mask=(m < rows)[:, None] & (to < N // 2)[None, :])


@triton.jit(do_not_specialize=["rows", "first_mask_row"])
def _gated_linear(
    x, squares, weight, bias, low_a, low_b, next_weight, out, partial, arrived, eps, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of one tile of the fused projection [gate; up]; grid as that of `_linear`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.where(column < N, column // 2 + column % 2 * (N // 2), N)
    begin_product(weight, low_a, low_b, n, N, K, RANK, BLOCK_N, BLOCK_K, SPLITS, HAS_LOW_RANK, OVERLAP)
    seen = _load_squares(squares, m, rows, PARTS, BLOCK_PARTS)
    total, whole = product(
        x, weight, low_a, low_b, next_weight, partial, arrived, m, n, column, rows, first_mask_row,
        N, K, RANK, BLOCK_RANK, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PREFETCH_LINES, HAS_LOW_RANK, OVERLAP,
    )  # fmt: skip
    if whole:
        total = _biased(total, seen, bias, n, eps, N, K, PARTS, HAS_BIAS)
        store_gated(total, out, rows, m, N, BLOCK_M, BLOCK_N, False)


@triton.jit
def _add(
    total, bias, residual, norm, scaled, squares, rows, m, n,
    N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the residual; what the norm behind it needs of it goes to `scaled` and `squares`."""
    dtype: tl.constexpr = residual.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside, at = (m < rows)[:, None] & (n < N)[None, :], m.to(tl.int64)[:, None] * N + n[None, :]
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    now = (before + total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + at, now, mask=inside)
    wide = now.to(tl.float32)
    weight = tl.load(norm + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(scaled + at, (wide * weight).to(dtype), mask=inside)
    tl.store(squares + m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 1), mask=m < rows)


@triton.jit(do_not_specialize=["rows", "first_mask_row"])
def _added_linear(
    x, weight, bias, low_a, low_b, next_weight, residual, norm, scaled, squares, partial, arrived, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """residual += one tile of the product, in place; scaled [rows, N] = residual * norm, squares: fp32 [rows, output
    tiles]; grid as that of `_linear`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        prefetch(norm + tl.minimum(n, N - 1))
    begin_product(weight, low_a, low_b, n, N, K, RANK, BLOCK_N, BLOCK_K, SPLITS, HAS_LOW_RANK, OVERLAP)
    total, whole = product(
        x, weight, low_a, low_b, next_weight, partial, arrived, m, n, n, rows, first_mask_row,
        N, K, RANK, BLOCK_RANK, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PREFETCH_LINES, HAS_LOW_RANK, OVERLAP,
    )  # fmt: skip
    if whole:
        _add(total, bias, residual, norm, scaled, squares, rows, m, n, N, HAS_BIAS)


@triton.jit
def _rotate(
    total, out, positions, cos, sin, keys, values, write_slots, rows, verify, m,
    N: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rotates a tile whose even columns are heads' first halves, and writes it: verify rows' k and v also to pages."""
    dtype: tl.constexpr = out.dtype.element_ty
    raw_first, raw_second = _pairs(total, dtype, BLOCK_M, BLOCK_N)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    pair = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    head, d = pair // HALF, pair % HALF
    inside = (m < rows)[:, None] & (pair < N // 2)[None, :]
    turns = inside & (head < HEADS + KV_HEADS)[None, :]
    angle = tl.load(positions + m, mask=m < rows, other=0)[:, None] * HALF + d[None, :]
    c, s = tl.load(cos + angle, mask=turns, other=1.0), tl.load(sin + angle, mask=turns, other=0.0)
    turned_first = tl.where(turns, (first * c - second * s).to(dtype), raw_first)
    turned_second = tl.where(turns, (second * c + first * s).to(dtype), raw_second)
    at = out + m.to(tl.int64)[:, None] * N + (head * (2 * HALF) + d)[None, :]
    tl.store(at, turned_first, mask=inside)
    tl.store(at + HALF, turned_second, mask=inside)

    slot = tl.load(write_slots + m, mask=m < verify, other=0)
    page, offset = (slot // PAGE).to(tl.int64)[:, None], (slot % PAGE)[:, None]
    stored = inside & (m < verify)[:, None] & (head >= HEADS)[None, :]
    kv = (head - HEADS)[None, :]
    is_key = stored & (kv < KV_HEADS)
    key = keys + (page * KV_HEADS + kv) * (2 * HALF * PAGE) + offset + (d * PAGE)[None, :]
    tl.store(key, turned_first, mask=is_key)
    tl.store(key + HALF * PAGE, turned_second, mask=is_key)
    is_value = stored & (kv >= KV_HEADS)
    value = values + ((page * KV_HEADS + kv - KV_HEADS) * PAGE + offset) * (2 * HALF) + d[None, :]
    tl.store(value, turned_first, mask=is_value)
    tl.store(value + HALF, turned_second, mask=is_value)


@triton.jit(
    do_not_specialize=["rows", "first_mask_row"],
    do_not_specialize_on_alignment=["positions", "write_slots"],
)
def _rotated_linear(
    x, squares, weight, bias, low_a, low_b, next_weight, out, positions, cos, sin, keys, values, write_slots,
    partial, arrived, eps, rows, first_mask_row,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, ROTATES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LOW_RANK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of q, k and v, rotated and written to the pages unless that is left to another; grid as `_linear`'s."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ROTATES:
        within = column % (2 * HALF)
        n = tl.where(column < N, column - within + within // 2 + within % 2 * HALF, N)
    else:
        n = column
    begin_product(weight, low_a, low_b, n, N, K, RANK, BLOCK_N, BLOCK_K, SPLITS, HAS_LOW_RANK, OVERLAP)
    seen = _load_squares(squares, m, rows, PARTS, BLOCK_PARTS)
    total, whole = product(
        x, weight, low_a, low_b, next_weight, partial, arrived, m, n, column, rows, first_mask_row,
        N, K, RANK, BLOCK_RANK, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PREFETCH_LINES, HAS_LOW_RANK, OVERLAP,
    )  # fmt: skip
    if whole:
        total = _biased(total, seen, bias, n, eps, N, K, PARTS, HAS_BIAS)
        if ROTATES:
            _rotate(
                total, out, positions, cos, sin, keys, values, write_slots, rows, first_mask_row, m,
                N, HEADS, KV_HEADS, HALF, PAGE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            at = m.to(tl.int64)[:, None] * N + column[None, :]
            tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (column < N)[None, :])


@dataclass(frozen=True, slots=True)
class Normed:
    """What the product behind a norm reads. x [rows, hidden]: the residual times the norm's weight. squares: fp32
    [rows, parts], partial sums of the residual's squares; with 0 parts x is normed already."""

    x: Tensor
    squares: Tensor

    def some(self, rows: slice) -> "Normed":
        """The same of some rows."""
        return Normed(self.x[rows], self.squares[rows])


def joined(first: Normed, then: Normed) -> Normed:
    """The rows of both one behind the other; both have the same number of parts."""
    return Normed(torch.cat((first.x, then.x)), torch.cat((first.squares, then.squares)))


def _parts(normed: Normed) -> dict[str, int]:
    parts = normed.squares.shape[1]
    return {"PARTS": parts, "BLOCK_PARTS": max(1, triton.next_power_of_2(parts))}


def gated_linear(
    plan: PlanProduct, normed: Normed, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None,
    first_mask_row: int, eps: float, next_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate) * up [rows, out / 2] of the fused projection [gate; up] of what a norm gives."""
    x, squares, rows = normed.x, normed.squares, normed.x.shape[0]
    launch = plan(x, weight, bias, low_rank, first_mask_row, next_weight)
    out = x.new_empty(rows, weight.shape[0] // 2)
    _gated_linear[launch.grid](
        x, squares, *launch.operands, out, *launch.parts, eps, rows, first_mask_row, **_parts(normed), **launch.named
    )
    return out


def added_linear(
    plan: PlanProduct, x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int,
    residual: Tensor, norm: Tensor, next_weight: Tensor | None = None,
) -> Normed:  # fmt: skip
    """Adds a product to the residual, in place, and gives what the product behind the next norm reads."""
    rows, launch = x.shape[0], plan(x, weight, bias, low_rank, first_mask_row, next_weight)
    scaled = torch.empty_like(residual)
    squares = torch.empty(rows, launch.grid[1], dtype=torch.float32, device=x.device)
    _added_linear[launch.grid](
        x, *launch.operands, residual, norm, scaled, squares, *launch.parts, rows, first_mask_row, **launch.named
    )
    return Normed(scaled, squares)


def rotated_linear(
    plan: PlanProduct, normed: Normed, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, eps: float,
    rows: StepRows, rotary: Rotary, cache: KVCache, layer: int, next_weight: Tensor | None = None, *,
    rotates: bool = True,
) -> Tensor:  # fmt: skip
    """q, k and v [rows, (heads + 2 kv_heads) * head_dim] of what a norm gives: rotated, and the verify rows' k and v
    in their pages, or neither where it does not rotate."""
    x, squares, count = normed.x, normed.squares, normed.x.shape[0]
    launch = plan(x, weight, bias, low_rank, rows.verify, next_weight)
    _, _, kv_heads, head_dim, page_size = cache.keys.shape
    out = x.new_empty(count, weight.shape[0])
    _rotated_linear[launch.grid](
        x, squares, *launch.operands, out, rows.positions, rotary.cos, rotary.sin,
        cache.keys[layer], cache.values[layer], rows.write_slots, *launch.parts, eps, count, rows.verify,
        HEADS=weight.shape[0] // head_dim - 2 * kv_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=page_size,
        ROTATES=rotates, **_parts(normed), **launch.named,
    )  # fmt: skip
    return out


def bind_layers(
    config: ModelConfig,
    plan: PlanProduct,
    attend: Callable[[Tensor, StepRows, KVCache, int], Tensor],
    overlap_launches: bool,
    weights: ModelWeights,
    adapter: AdapterWeights | None,
    rotary: Rotary,
) -> Layers | None:
    """`Ops.bind_layers`; None with an adapter that is too wide to be computed beside a product, where there are
    experts, and where norms stand elsewhere than in Llama or the activation is another."""
    extras = (BASE_ALONE,) * len(weights.layers) if adapter is None else adapter.layers
    pairs = [pair for extra in extras for pair in (extra.qkv, extra.o, extra.gate_up, extra.down) if pair is not None]
    norms, wide = norms_before(weights), any(pair.a.shape[0] > WIDEST_RANK for pair in pairs)
    if norms is None or wide or has_experts(weights, extras) or config.activation != "silu":
        return None
    eps = config.norm_eps
    next_norms = (*(before for before, _ in norms[1:]), weights.final_norm)
    next_weights = (*(layer.qkv for layer in weights.layers[1:]), weights.head)

    def rotated(
        normed: Normed, layer: LayerWeights, extra: LayerAdapter, rows: StepRows, cache: KVCache, index: int
    ) -> Tensor:
        qk_norm, tables = layer_qk_norm(layer, eps), rotary.of(index)
        by_heads = qk_norm is not None or cache.key_scales is not None
        qkv = rotated_linear(
            plan, normed, layer.qkv, layer.qkv_bias, extra.qkv, eps, rows, tables, cache, index, layer.o,
            rotates=not by_heads,
        )  # fmt: skip
        if not by_heads:
            return qkv
        return rotate_and_store(qkv, rows, tables, cache, index, qk_norm, overlap_launches=overlap_launches)

    def run_layers(x: Tensor, rows: StepRows, cache: KVCache) -> Tensor:
        if x.shape[0] == 0:
            return x
        residual, verify = x.contiguous(), rows.verify
        first = add_norm(residual, None, norms[0][0], eps, overlap_launches=overlap_launches)[0]
        normed = Normed(first, residual.new_empty(len(residual), 0, dtype=torch.float32))
        for index, layer in enumerate(weights.layers):
            extra, own = extras[index], own_attention(adapter, index) if verify < len(x) else None
            if own is None:
                qkv = rotated(normed, layer, extra, rows, cache, index)
                x = attend(qkv, rows, cache, index)
                normed = added_linear(
                    plan, x, layer.o, layer.o_bias, extra.o, verify, residual, norms[index][1], layer.gate_up
                )
            else:  # rows of each kind by their own projections
                verifying, masks = rows.apart()
                second = replace(layer, qkv=own.qkv, q_norm=own.q_norm, k_norm=own.k_norm)
                verify_qkv = rotated(normed.some(slice(verify)), layer, extra, verifying, cache, index)
                mask_qkv = rotated(normed.some(slice(verify, None)), second, extra, masks, cache, index)
                x = attend(torch.cat((verify_qkv, mask_qkv)), rows, cache, index)
                parts = (
                    added_linear(
                        plan, x[some], weight, None, None, verify, residual[some], norms[index][1], layer.gate_up
                    )
                    for some, weight in ((slice(verify), layer.o), (slice(verify, None), own.o))
                )
                normed = joined(*parts)
            x = gated_linear(plan, normed, layer.gate_up, layer.gate_up_bias, extra.gate_up, verify, eps, layer.down)
            normed = added_linear(
                plan, x, layer.down, layer.down_bias, extra.down, verify, residual, next_norms[index],
                next_weights[index],
            )  # fmt: skip
        return add_norm(residual, None, weights.final_norm, eps, overlap_launches=overlap_launches)[0]

    return run_layers
