"""Attention of mask rows on a CPU, in fp32: products with clean keys and values by torch, the rest by our kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.attention import Attention, CleanKV, chunks_of, led, led_places, norm_heads, seen_keys
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.kernels.cpu_training import MaskChunk, MaskHeads, MaskOps
from tidar_core.kernels.ops import Rotary, layer_windows
from tidar_core.layout import WithinBlock
from tidar_core.model.decoder import layer_qk_norm
from tidar_core.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the mask rows of a step see. chunks: with the place of each one's first key among the led ones. begins:
    int32 [rows], of the clean rows the first one in reach, None where all are; ends: int32 [blocks]."""

    chunks: tuple[tuple[MaskChunk, int], ...]
    begins: Tensor | None
    ends: Tensor
    causal: bool
    heads: MaskHeads


def cpu_mask_attention(
    ops: MaskOps,
    config: ModelConfig,
    weights: ModelWeights,
    rotary: Rotary,
    pack: Pack,
    clean: CleanKV,
    blocks: Blocks,
    within_block: WithinBlock,
) -> Attention:
    """As `attention.mask_attention`."""
    heads = MaskHeads(len(blocks.positions), config.heads, config.kv_heads, config.head_dim, blocks.block)
    chunks = tuple((MaskChunk(c.first, c.last - c.first, c.longest), c.start) for c in chunks_of(pack, blocks))
    ends, places = torch.from_numpy(blocks.context).int(), led_places(pack)
    near = (blocks.positions + 1 - (config.window or 0)).clamp_(min=0).int()
    windows, here = layer_windows(config), rotary.at(blocks.positions)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        norms = layer_qk_norm(weights.layers[layer], config.norm_eps)
        if norms is not None:
            qkv = norm_heads(qkv, config, norms)
        keys, values = led(clean.keys[layer], places), led(clean.values[layer], places)
        seen = _Seen(chunks, near if windows and windows[layer] else None, ends, within_block == "causal", heads)
        return _CpuMaskAttention.apply(qkv, here.of(layer), keys, values, seen, ops)

    return attention


class _CpuMaskAttention(torch.autograd.Function):
    """Rotation and attention of mask rows [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim]."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, turning: Rotary, clean_k: Tensor, clean_v: Tensor, seen: _Seen, ops: MaskOps
    ) -> Tensor:
        heads = seen.heads
        q, k, v = ops.lay(qkv, turning, heads)
        out = qkv.new_empty(heads.rows, heads.heads * heads.head_dim)
        shares = []
        for chunk, start in seen.chunks:
            keys = seen_keys(start, chunk.keys, heads.block)
            share = q[:, _queries(chunk, heads)] @ clean_k[:, keys].transpose(1, 2)
            ops.shares(share, q, k, seen.begins, seen.ends, seen.causal, heads, chunk)
            ops.add_own(share @ clean_v[:, keys], share, v, out, heads, chunk)
            shares.append(share)
        ctx.save_for_backward(clean_k, clean_v, q, k, v, *shares)
        ctx.turning, ctx.seen, ctx.ops = turning, seen, ops
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        clean_k, clean_v, q, k, v, *shares = ctx.saved_tensors
        heads: MaskHeads = ctx.seen.heads
        kv_heads, size, groups = heads.kv_heads, heads.head_dim, heads.heads // heads.kv_heads
        d_qkv = d_out.new_empty(heads.rows, (heads.heads + 2 * kv_heads) * size)
        d_laid = d_out.reshape(heads.rows, kv_heads, groups, size).transpose(0, 1).contiguous()
        d_laid = d_laid.view(kv_heads, -1, size)
        for (chunk, start), share in zip(ctx.seen.chunks, shares, strict=True):
            keys = seen_keys(start, chunk.keys, heads.block)
            slopes = d_laid[:, _queries(chunk, heads)] @ clean_v[:, keys].transpose(1, 2)
            ctx.ops.score_slopes(slopes, share, d_laid, v, heads, chunk)
            d_queries = slopes @ clean_k[:, keys]
            ctx.ops.head_slopes(d_queries, slopes, share, d_laid, q, k, ctx.turning, d_qkv, heads, chunk)
        return (d_qkv, *[None] * 5)


def _queries(chunk: MaskChunk, heads: MaskHeads) -> slice:
    """The chunk's rows of q."""
    each = heads.block * (heads.heads // heads.kv_heads)
    return slice(chunk.first * each, (chunk.first + chunk.count) * each)
