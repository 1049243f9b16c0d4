"""The trainer's attention: clean rows over their own document, mask rows over a prefix of it and their own block.

It sees what the engine's paged attention sees, laid out for training: the clean rows' keys and values are computed
once a step, without gradient, and serve every block behind them. In layers with a window a row sees of the clean rows
those in the window that ends with its own position, and all slots of its block.

Here it is plain torch: the mask rows of one document are taken in chunks of neighbouring blocks, each as one matrix
product over the clean keys that any of them sees. On a CPU kernels of our own do it in fp32 (`cpu_blocks.py`). On a GPU
all mask rows are one call of a kernel of ours (`fused.py`), or of FlexAttention where that cannot be (`flex.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.kernels.ops import QKNorm, Rotary, layer_windows
from tidar_core.kernels.reference import rms_norm, rotate_qkv, split_heads
from tidar_core.layout import WithinBlock
from tidar_core.model.decoder import layer_qk_norm
from tidar_core.model.weights import ModelWeights

BLOCKS_AT_ONCE, ROWS_AT_ONCE = 16, 64
LEAD = 16  # zero keys before each document's; a block has no more slots

Attention = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class CleanKV:
    """Rotated keys and values of a pack's rows, layer by layer: [kv_heads, rows, head_dim] each."""

    keys: list[Tensor]
    values: list[Tensor]

    def keep(self, qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a layer's rotated rows, [heads, rows, head_dim] each. Keys and values are parts of one copy, in
        which the heads of a row lie side by side: as parts of `qkv` they would hold on to all queries."""
        kv_heads, head_dim = config.kv_heads, config.head_dim
        q, _, _ = split_heads(qkv, kv_heads, head_dim)
        _, k, v = split_heads(qkv[:, -2 * kv_heads * head_dim :].clone(), kv_heads, head_dim)
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        self.keys.append(k)
        self.values.append(v)
        return q, k, v


def clean_attention(
    config: ModelConfig, weights: ModelWeights, rotary: Rotary, pack: Pack, clean: CleanKV
) -> Attention:
    """Causal attention inside each document; every layer's keys and values are added to `clean`."""
    windows = layer_windows(config)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        norms = layer_qk_norm(weights.layers[layer], config.norm_eps)
        qkv = rotate_qkv(qkv, pack.positions, rotary.of(layer), config.kv_heads, norms)
        q, k, v = clean.keep(qkv, config)
        spans = (slice(start, start + length) for start, length in pack.spans)
        window = windows[layer] if windows else 0
        return torch.cat([_causal(q[:, rows], k[:, rows], v[:, rows], window) for rows in spans])

    return attention


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of one document, some rows at a time over the keys that any of them sees: q
    [heads, rows, head_dim] -> [rows, heads * head_dim]. Scores in fp32. On a CPU faster than torch's fused kernel."""
    kv_heads, rows, size = k.shape
    wide_q = q.reshape(kv_heads, -1, rows, size).transpose(1, 2).float().mul_(size**-0.5)
    wide_k, out = k.float(), torch.empty(kv_heads, rows, wide_q.shape[2], size, dtype=q.dtype, device=q.device)
    later = torch.ones(ROWS_AT_ONCE, ROWS_AT_ONCE, dtype=torch.bool, device=q.device).triu_(1)[:, None]
    for first in range(0, rows, ROWS_AT_ONCE):
        last = min(rows, first + ROWS_AT_ONCE)
        begin = max(0, first + 1 - window) if window else 0
        count, seen = last - first, last - begin
        some = wide_q[:, first:last].reshape(kv_heads, -1, size)
        scores = (some @ wide_k[:, begin:last].transpose(1, 2)).view(kv_heads, count, -1, seen)
        scores[..., first - begin :].masked_fill_(later[:count, :, :count], -torch.inf)
        if window:
            row, key = (torch.arange(start, last, device=q.device) for start in (first, begin))
            scores.masked_fill_((key <= row[:, None] - window)[:, None], -torch.inf)
        share = scores.softmax(-1).to(q.dtype).view(kv_heads, -1, seen)
        out[:, first:last] = (share @ v[:, begin:last]).view(kv_heads, count, -1, size)
    return out.transpose(0, 1).reshape(rows, -1)


def mask_attention(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: Rotary,
    pack: Pack,
    clean: CleanKV,
    blocks: Blocks,
    within_block: WithinBlock,
) -> Attention:
    """Attention of mask rows in plain torch with a gradient of its own; any device, made for a CPU."""
    geometry = _Geometry(config.heads, config.kv_heads, config.head_dim, blocks.block, within_block == "causal")
    chunks, places = tuple(_chunks_of(pack, blocks)), _led_places(pack)
    windows = layer_windows(config)
    windowed = tuple(_windowed(chunk, blocks, geometry.groups, config.window or 0) for chunk in chunks if windows)
    here = rotary.at(blocks.positions)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        norms = layer_qk_norm(weights.layers[layer], config.norm_eps)
        if norms is not None:
            qkv = norm_heads(qkv, config, norms)
        keys, values = _led(clean.keys[layer], places), _led(clean.values[layer], places)
        turning = here.of(layer)
        mine = windowed if windows and windows[layer] else chunks
        return _MaskAttention.apply(qkv, turning.cos[:, None], turning.sin[:, None], keys, values, mine, geometry)

    return attention


def norm_heads(qkv: Tensor, config: ModelConfig, norms: QKNorm) -> Tensor:
    """RMSNorm of each query and key head of rows [rows, (heads + 2 kv_heads) * head_dim]; values as they are."""
    q, k, v = split_heads(qkv, config.kv_heads, config.head_dim)
    q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    return torch.cat((q, k, v), dim=1).view(qkv.shape)


@dataclass(frozen=True, slots=True)
class _Geometry:
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    causal: bool

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks first … last - 1 of one document, which see at most its first `longest` rows; `hidden`, bool
    [blocks, 1 or slots * groups, longest], has those that a block, or one of its slots, does not see. start: where its
    keys begin among the led ones."""

    first: int
    last: int
    start: int
    longest: int
    hidden: Tensor


def _chunks_of(pack: Pack, blocks: Blocks) -> Iterator[_Chunk]:
    """Blocks in runs of at most `BLOCKS_AT_ONCE`, each within one document."""
    if blocks.block > LEAD:
        raise ValueError(f"blocks of {blocks.block} slots, where {LEAD} have room")
    device = blocks.positions.device
    first = 0
    while first < len(blocks):
        document = blocks.document[first]
        last = first + 1
        while last < len(blocks) and last - first < BLOCKS_AT_ONCE and blocks.document[last] == document:
            last += 1
        ends = torch.from_numpy(blocks.context[first:last])
        longest = int(ends.max())
        hidden = torch.arange(longest) >= ends[:, None]
        start = pack.spans[document][0] + (int(document) + 1) * LEAD
        yield _Chunk(first, last, start, longest, hidden[:, None].to(device))
        first = last


def _windowed(chunk: _Chunk, blocks: Blocks, groups: int, window: int) -> _Chunk:
    """The same blocks where a slot sees no further back than `window` from its own position."""
    positions = blocks.positions[chunk.first * blocks.block : chunk.last * blocks.block].view(-1, blocks.block, 1)
    outside = torch.arange(chunk.longest, device=positions.device) <= positions - window
    return replace(chunk, hidden=chunk.hidden | outside.repeat_interleave(groups, 1))


def _led_places(pack: Pack) -> Tensor:
    """Where each row goes when every document is led by `LEAD` more."""
    shifts = torch.arange(1, len(pack.spans) + 1).repeat_interleave(torch.tensor([span[1] for span in pack.spans]))
    return (torch.arange(len(shifts)) + shifts * LEAD).to(pack.tokens.device)


def _led(rows: Tensor, places: Tensor) -> Tensor:
    """rows [kv_heads, rows, head_dim] with zeros in the lead of every document, so that a product over some of them
    leaves columns for the slots of the own block beside the document's."""
    return rows.new_zeros(rows.shape[0], int(places[-1]) + 1, rows.shape[2]).index_copy_(1, places, rows)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32 [rows, heads, head_dim], rotated by cos and sin [rows, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    left.copy_((first * cos).sub_(second * sin))
    right.copy_((second * cos).add_(first * sin))
    return out


def _seen_keys(start: int, longest: int, block: int) -> slice:
    """The led keys of a chunk: one empty column for each slot, then the document's."""
    return slice(start - block, start + longest)


class _MaskAttention(torch.autograd.Function):
    """Rotation and attention of mask rows [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim].

    In a chunk the scores lie side by side: first those of the own block's slots, then those of the clean rows. Query
    heads of one group are rows beside each other, so that a chunk is one product for each key/value head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        clean_k: Tensor,
        clean_v: Tensor,
        chunks: tuple[_Chunk, ...],
        geometry: _Geometry,
    ) -> Tensor:
        rows, dtype = qkv.shape[0], qkv.dtype
        kv_heads, groups, size, block = geometry.kv_heads, geometry.groups, geometry.head_dim, geometry.block
        heads = qkv.view(rows, -1, size)
        rotated = _rotate(heads[:, : geometry.heads + kv_heads].float(), cos, sin, dtype)
        q = rotated[:, : geometry.heads].view(rows, kv_heads, groups, size).transpose(0, 1).reshape(kv_heads, -1, size)
        k = rotated[:, geometry.heads :].transpose(0, 1).contiguous()
        v = heads[:, geometry.heads + kv_heads :].transpose(0, 1).contiguous()
        # The scores decide most, so they alone are computed in fp32, as the engine does.
        wide_q, wide_k, wide_clean = q.float() * size**-0.5, k.float(), clean_k.float()
        out = torch.empty_like(q)
        shares = []
        for chunk in chunks:
            count = chunk.last - chunk.first
            mine = slice(chunk.first * block * groups, chunk.last * block * groups)
            slots = slice(chunk.first * block, chunk.last * block)
            seen = _seen_keys(chunk.start, chunk.longest, block)
            blocked, keys = (kv_heads, count, block * groups), (kv_heads, count, block, size)
            scores = (wide_q[:, mine] @ wide_clean[:, seen].transpose(1, 2)).view(*blocked, -1)
            scores[..., block:].masked_fill_(chunk.hidden, -torch.inf)
            own = wide_q[:, mine].view(*blocked, size) @ wide_k[:, slots].view(keys).transpose(2, 3)
            if geometry.causal:
                later = torch.ones(block, block, dtype=torch.bool, device=qkv.device).triu_(1)
                own.masked_fill_(later.repeat_interleave(groups, 0), -torch.inf)
            scores[..., :block] = own
            share = scores.softmax(-1).to(dtype)
            mixed = share.view(kv_heads, count * block * groups, -1) @ clean_v[:, seen]
            mixed.view(*blocked, size).add_(share[..., :block] @ v[:, slots].view(keys))
            out[:, mine] = mixed
            shares.append(share)
        ctx.save_for_backward(cos, sin, clean_k, clean_v, q, k, v, *shares)
        ctx.chunks, ctx.geometry = chunks, geometry
        return out.view(kv_heads, rows, groups, size).transpose(0, 1).reshape(rows, -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin, clean_k, clean_v, q, k, v, *shares = ctx.saved_tensors
        geometry: _Geometry = ctx.geometry
        rows, dtype = d_out.shape[0], d_out.dtype
        kv_heads, groups, size, block = geometry.kv_heads, geometry.groups, geometry.head_dim, geometry.block
        d_out = d_out.view(rows, kv_heads, groups, size).transpose(0, 1).reshape(kv_heads, -1, size)
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for chunk, share in zip(ctx.chunks, shares, strict=True):
            count = chunk.last - chunk.first
            mine = slice(chunk.first * block * groups, chunk.last * block * groups)
            slots = slice(chunk.first * block, chunk.last * block)
            seen = _seen_keys(chunk.start, chunk.longest, block)
            blocked, keys = (kv_heads, count, block * groups, size), (kv_heads, count, block, size)
            d_mixed = d_out[:, mine].view(blocked)
            d_share = (d_out[:, mine] @ clean_v[:, seen].transpose(1, 2)).view(share.shape)
            d_share[..., :block] = d_mixed @ v[:, slots].view(keys).transpose(2, 3)
            d_scores = torch.ops.aten._softmax_backward_data(d_share, share, -1, dtype)
            d_own = d_scores[..., :block]
            d_queries = d_scores.view(kv_heads, count * block * groups, -1) @ clean_k[:, seen]
            d_queries.view(blocked).add_(d_own @ k[:, slots].view(keys))
            d_q[:, mine] = d_queries
            d_k[:, slots] = (d_own.transpose(2, 3) @ q[:, mine].view(blocked)).view(kv_heads, -1, size)
            d_v[:, slots] = (share[..., :block].transpose(2, 3) @ d_mixed).view(kv_heads, -1, size)
        d_heads = torch.empty(rows, geometry.heads + 2 * kv_heads, size, dtype=dtype, device=d_out.device)
        wide = torch.empty(rows, geometry.heads + kv_heads, size, device=d_out.device)
        wide[:, : geometry.heads] = d_q.view(kv_heads, rows, groups, size).transpose(0, 1).reshape(rows, -1, size)
        wide[:, geometry.heads :] = d_k.transpose(0, 1)
        d_heads[:, : geometry.heads + kv_heads] = _rotate(wide.mul_(size**-0.5), cos, -sin, dtype)
        d_heads[:, geometry.heads + kv_heads :] = d_v.transpose(0, 1)
        return (d_heads.view(rows, -1), *[None] * 6)
