"""Attention of mask blocks in Triton, with its gradient: what the drafter's training spends on its rows.

Many blocks stand behind one clean document, each over a prefix of it and over its own slots. The clean keys and values
are the base's and learn nothing, so that a gradient for them, half of what a general attention computes on its way
back, is never made; those of the own slots lie within the tile that needs them. So both ways are one kernel each,
without a sum across programs, and the bits of a gradient do not depend on who runs first.

A tile is some neighbouring blocks of one document, which see nearly the same keys, and the query heads of one K/V
head: tile row m is row m // group, head m % group, as in the decoder's attention. The scores, their sums and the
gradients of a tile are fp32; products take the inputs' own type.
"""

# mypy: allow-untyped-defs

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.transfer import sent

LOG2E = 1.4426950408889634
TILE_ROWS = 128  # mask rows times group, two of Hopper's matrix instructions
TILE = tl.constexpr(8)  # numbers of a tile, of which these are used:
TILE_MASK_ROW = tl.constexpr(0)  # the first mask row
TILE_MASK_ROWS = tl.constexpr(1)
TILE_CLEAN_ROW = tl.constexpr(2)  # the document's first clean row
TILE_FEWEST = tl.constexpr(3)  # clean rows that one of its blocks sees
TILE_MOST = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class BlockAttentionSizes:
    """What kernels are compiled for. slots: of a block; causal: whether a slot sees no later ones of its block."""

    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    causal: bool

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """Which blocks share a tile. tiles: int32 [tiles, TILE], with the columns TILE_MASK_ROW … TILE_MOST; those that see
    most clean rows come first. context: int32 [blocks], the clean rows that each block sees."""

    tiles: Tensor
    context: Tensor


def supports(sizes: BlockAttentionSizes, dtype: torch.dtype) -> bool:
    """Whether the kernels run with these: 16 bits, and a block's rows of one K/V head fit a tile."""
    known = sizes.head_dim in (16, 32, 64, 128) and dtype in (torch.float16, torch.bfloat16)
    return known and sizes.group * sizes.slots <= TILE_ROWS


def block_tiles(
    document: np.ndarray, context: np.ndarray, starts: np.ndarray, sizes: BlockAttentionSizes, device: torch.device
) -> BlockTiles:
    """Tiles of blocks sorted by document and context. document, context: int64 [blocks]; starts: first clean row of
    each document."""
    each = TILE_ROWS // (sizes.group * sizes.slots)
    count = len(document)
    opens = np.flatnonzero(np.diff(document, prepend=-1))
    place = np.arange(count) - np.repeat(opens, np.diff(opens, append=count))
    first = np.flatnonzero(place % each == 0)
    end = np.append(first[1:], count)
    tiles = np.zeros((len(first), TILE.value), dtype=np.int32)
    tiles[:, TILE_MASK_ROW.value] = first * sizes.slots
    tiles[:, TILE_MASK_ROWS.value] = (end - first) * sizes.slots
    tiles[:, TILE_CLEAN_ROW.value] = starts[document[first]]
    tiles[:, TILE_FEWEST.value], tiles[:, TILE_MOST.value] = context[first], context[end - 1]
    tiles = tiles[np.argsort(-tiles[:, TILE_MOST.value], kind="stable")]
    return BlockTiles(sent(torch.from_numpy(tiles), device), sent(torch.from_numpy(context.astype(np.int32)), device))


@triton.jit
def _tile(tiles, context, kv, GROUP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """This program's tile as `BlockTiles` lists it: first mask row, mask rows, first clean row, fewest and most clean
    rows that a block sees; and of each of its rows: which mask row of the tile, which head, whether there is one, how
    many clean rows it sees."""
    tile = tiles + tl.program_id(0) * TILE
    first, rows = tl.load(tile + TILE_MASK_ROW), tl.load(tile + TILE_MASK_ROWS)
    m = tl.arange(0, ROWS)
    row = m // GROUP
    mine = row < rows
    end = tl.load(context + (first + row) // SLOTS, mask=mine, other=0)
    clean, fewest, most = tl.load(tile + TILE_CLEAN_ROW), tl.load(tile + TILE_FEWEST), tl.load(tile + TILE_MOST)
    return first, rows, clean, fewest, most, row, kv * GROUP + m % GROUP, mine, end


@triton.jit
def _own_visible(row, key, rows, SLOTS: tl.constexpr, CAUSAL: tl.constexpr):
    """Which rows of a tile see which: those of their own block, of `rows` that there are."""
    visible = (row[:, None] // SLOTS == key[None, :] // SLOTS) & (key[None, :] < rows)
    if CAUSAL:
        visible = visible & (key[None, :] <= row[:, None])
    return visible


@triton.jit
def _fold(best, total, mixed, scores, values):
    """Adds keys to running results: best, total [rows], mixed [rows, d]; scores [rows, keys], -inf where a key is not
    seen, and values [keys, d], weighted by exp2(score)."""
    higher = tl.maximum(best, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(best - level)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, acc=mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _products(left, right):
    """left rightᵀ in fp32."""
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def _attend_blocks(
    qkv, keys, values, tiles, context, out, levels, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
    CLEAN_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """One tile and K/V head. qkv: rotated mask rows [rows, (heads + 2 kv_heads) * d]; keys, values: rotated clean rows,
    CLEAN_WIDTH numbers from one to the next, heads side by side. out: [rows, heads * d]; levels: fp32 [rows, heads],
    the logarithm (to base 2) of the sum of the weights."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    kv = tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    first, rows, start_row, fewest, most, row, head, mine, end = _tile(tiles, context, kv, GROUP, SLOTS, ROWS)
    of_row = (first + row).to(tl.int64)
    q = tl.load(qkv + (of_row * WIDTH + head * HEAD_DIM)[:, None] + d[None, :], mask=mine[:, None], other=0.0)
    clean = start_row.to(tl.int64) * CLEAN_WIDTH + kv * HEAD_DIM

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0, tl.float32)
    mixed = tl.full([ROWS, HEAD_DIM], 0, tl.float32)
    whole = fewest // KEYS * KEYS
    for start in range(0, whole, KEYS):
        at = clean + (start + n)[:, None] * CLEAN_WIDTH + d[None, :]
        scores = _products(q, tl.load(keys + at)) * scale
        best, total, mixed = _fold(best, total, mixed, scores, tl.load(values + at))
    for start in range(whole, most, KEYS):
        at = clean + (start + n)[:, None] * CLEAN_WIDTH + d[None, :]
        there = (start + n < most)[:, None]
        scores = _products(q, tl.load(keys + at, mask=there, other=0.0)) * scale
        scores = tl.where((start + n)[None, :] < end[:, None], scores, float("-inf"))
        best, total, mixed = _fold(best, total, mixed, scores, tl.load(values + at, mask=there, other=0.0))

    own = tl.arange(0, OWN)
    at = (first + own).to(tl.int64)[:, None] * WIDTH + (HEADS + kv) * HEAD_DIM + d[None, :]
    there = (own < rows)[:, None]
    scores = _products(q, tl.load(qkv + at, mask=there, other=0.0)) * scale
    scores = tl.where(_own_visible(row, own, rows, SLOTS, CAUSAL), scores, float("-inf"))
    v = tl.load(qkv + at + KV_HEADS * HEAD_DIM, mask=there, other=0.0)
    best, total, mixed = _fold(best, total, mixed, scores, v)

    total = tl.where(mine, total, 1.0)
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    to = of_row * (HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(out + to[:, None] + d[None, :], result, mask=mine[:, None])
    tl.store(levels + of_row * HEADS + head, best + tl.log2(total), mask=mine)


@triton.jit
def _slopes(q, d_out, keys, values, level, along, visible, scale):
    """The weights of keys, and the gradient of the scores (before they are scaled), fp32 [rows, keys]."""
    weights = tl.where(visible, tl.exp2(_products(q, keys) * scale - level[:, None]), 0.0)
    return weights, weights * (_products(d_out, values) - along[:, None])


@triton.jit
def _attend_blocks_back(
    qkv, keys, values, tiles, context, out, levels, d_out, d_qkv, scale, plain_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
    CLEAN_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile's queries of a K/V head, and of its own keys and values: d_qkv, laid out as qkv. The
    weights are computed anew from `levels`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    kv = tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    first, rows, start_row, fewest, most, row, head, mine, end = _tile(tiles, context, kv, GROUP, SLOTS, ROWS)
    of_row = (first + row).to(tl.int64)
    of_query = (of_row * WIDTH + head * HEAD_DIM)[:, None] + d[None, :]
    of_out = (of_row * (HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(qkv + of_query, mask=mine[:, None], other=0.0)
    slope_out = tl.load(d_out + of_out, mask=mine[:, None], other=0.0)
    mixed = tl.load(out + of_out, mask=mine[:, None], other=0.0)
    along = tl.sum(mixed.to(tl.float32) * slope_out.to(tl.float32), 1)
    level = tl.load(levels + of_row * HEADS + head, mask=mine, other=0.0)
    clean = start_row.to(tl.int64) * CLEAN_WIDTH + kv * HEAD_DIM

    d_q = tl.full([ROWS, HEAD_DIM], 0, tl.float32)
    whole = fewest // KEYS * KEYS
    for start in range(0, whole, KEYS):
        at = clean + (start + n)[:, None] * CLEAN_WIDTH + d[None, :]
        k = tl.load(keys + at)
        _, slopes = _slopes(q, slope_out, k, tl.load(values + at), level, along, mine[:, None], scale)
        d_q = tl.dot(slopes.to(k.dtype), k, acc=d_q, input_precision="ieee")
    for start in range(whole, most, KEYS):
        at = clean + (start + n)[:, None] * CLEAN_WIDTH + d[None, :]
        there = (start + n < most)[:, None]
        k = tl.load(keys + at, mask=there, other=0.0)
        v = tl.load(values + at, mask=there, other=0.0)
        _, slopes = _slopes(q, slope_out, k, v, level, along, (start + n)[None, :] < end[:, None], scale)
        d_q = tl.dot(slopes.to(k.dtype), k, acc=d_q, input_precision="ieee")

    own = tl.arange(0, OWN)
    at = (first + own).to(tl.int64)[:, None] * WIDTH + (HEADS + kv) * HEAD_DIM + d[None, :]
    there = (own < rows)[:, None]
    k = tl.load(qkv + at, mask=there, other=0.0)
    v = tl.load(qkv + at + KV_HEADS * HEAD_DIM, mask=there, other=0.0)
    visible = _own_visible(row, own, rows, SLOTS, CAUSAL)
    weights, slopes = _slopes(q, slope_out, k, v, level, along, visible, scale)
    d_q = tl.dot(slopes.to(k.dtype), k, acc=d_q, input_precision="ieee")
    d_k = tl.dot(tl.trans(slopes.to(k.dtype)), q, input_precision="ieee")
    d_v = tl.dot(tl.trans(weights.to(k.dtype)), slope_out, input_precision="ieee")
    kind = d_qkv.dtype.element_ty
    tl.store(d_qkv + of_query, (d_q * plain_scale).to(kind), mask=mine[:, None])
    tl.store(d_qkv + at, (d_k * plain_scale).to(kind), mask=there)
    tl.store(d_qkv + at + KV_HEADS * HEAD_DIM, d_v.to(kind), mask=there)


def block_attention(qkv: Tensor, keys: Tensor, values: Tensor, tiles: BlockTiles, sizes: BlockAttentionSizes) -> Tensor:
    """Attention of rotated mask rows [rows, (heads + 2 kv_heads) * d] -> [rows, heads * d], differentiable in them.

    keys, values: the clean rows', [kv_heads, rows, d], parts of one tensor in which the heads of a row lie side by
    side.
    """
    result: Tensor = _BlockAttention.apply(qkv, keys, values, tiles, sizes)
    return result


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, keys: Tensor, values: Tensor, tiles: BlockTiles, sizes: BlockAttentionSizes
    ) -> Tensor:
        qkv = qkv.contiguous()
        out = torch.empty(len(qkv), sizes.heads * sizes.head_dim, dtype=qkv.dtype, device=qkv.device)
        levels = torch.empty(len(qkv), sizes.heads, dtype=torch.float32, device=qkv.device)
        grid, options = _options(qkv, keys, values, tiles, sizes, back=False)
        scale = LOG2E * sizes.head_dim**-0.5
        _attend_blocks[grid](qkv, keys, values, tiles.tiles, tiles.context, out, levels, scale, **options)
        ctx.save_for_backward(qkv, keys, values, out, levels)
        ctx.tiles, ctx.sizes = tiles, sizes
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, keys, values, out, levels = ctx.saved_tensors
        tiles, sizes = ctx.tiles, ctx.sizes
        d_qkv = torch.empty_like(qkv)
        grid, options = _options(qkv, keys, values, tiles, sizes, back=True)
        plain = sizes.head_dim**-0.5
        _attend_blocks_back[grid](
            qkv, keys, values, tiles.tiles, tiles.context, out, levels, d_out.contiguous(), d_qkv, LOG2E * plain,
            plain, **options,
        )  # fmt: skip
        return (d_qkv, *[None] * 4)


def _options(
    qkv: Tensor, keys: Tensor, values: Tensor, tiles: BlockTiles, sizes: BlockAttentionSizes, back: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of either kernel, and its sizes and options."""
    width = keys.stride(1)
    if keys.stride() != (sizes.head_dim, width, 1) or values.stride() != keys.stride():
        raise ValueError("the heads of a clean row do not lie side by side")
    rows = TILE_ROWS // (sizes.group * sizes.slots) * sizes.slots
    own = max(64, triton.next_power_of_2(rows))  # of fewer the matrix unit takes as much time and more registers
    few_warps = sizes.head_dim <= 64 and own == 64 and not back
    return (len(tiles.tiles), sizes.kv_heads), {
        "HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads, "HEAD_DIM": sizes.head_dim, "SLOTS": sizes.slots,
        "CAUSAL": sizes.causal, "CLEAN_WIDTH": width, "ROWS": TILE_ROWS, "KEYS": 64, "OWN": own,
        "num_warps": 4 if few_warps else 8, "num_stages": 3, "enable_fp_fusion": True,
    }  # fmt: skip
