"""Attention of clean rows and of mask rows on a CPU, in fp32, by kernels of our own.

Clean rows are blocks as well: a few neighbours, which see all rows of their document before them and, of their block,
themselves and those before.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.attention import Attention, CleanKV, norm_heads
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.kernels.cpu_blocks import MOST_SLOTS, BlockOps, SeenBlocks, seen_blocks
from tidar_core.kernels.ops import Rotary, layer_windows
from tidar_core.layout import WithinBlock
from tidar_core.model.decoder import layer_qk_norm
from tidar_core.model.weights import ModelWeights


def cpu_clean_attention(
    ops: BlockOps, config: ModelConfig, weights: ModelWeights, rotary: Rotary, pack: Pack, clean: CleanKV
) -> Attention:
    """As `attention.clean_attention`."""
    height = min(MOST_SLOTS, config.window or MOST_SLOTS)  # all that a row sees of its block is in its window
    firsts, seen, slots = np.array([
        (start, above, min(height, length - above))
        for start, length in pack.spans for above in range(0, length, height)
    ]).T  # fmt: skip
    whole = seen_blocks(config, firsts + seen, slots, firsts, seen, causal=True)
    layers = _layers(config, weights, rotary, pack.positions, whole)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        qkv, turning, blocks = layers.of(layer, qkv)
        keys, values = ops.lay_keys(config, qkv, turning)
        clean.keys.append(keys)
        clean.values.append(values)
        return ops.attend(config, qkv, turning, keys, values, blocks, False)[0]

    return attention


def cpu_mask_attention(
    ops: BlockOps,
    config: ModelConfig,
    weights: ModelWeights,
    rotary: Rotary,
    pack: Pack,
    clean: CleanKV,
    blocks: Blocks,
    within_block: WithinBlock,
) -> Attention:
    """As `attention.mask_attention`."""
    count = len(blocks)
    firsts = np.array([start for start, _ in pack.spans])[blocks.document]
    rows, slots = np.arange(count) * blocks.block, np.full(count, blocks.block)
    whole = seen_blocks(config, rows, slots, firsts, blocks.context, causal=within_block == "causal")
    layers = _layers(config, weights, rotary, blocks.positions, whole)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        qkv, turning, seen = layers.of(layer, qkv)
        return _CpuMaskAttention.apply(qkv, turning, clean.keys[layer], clean.values[layer], seen, config, ops)

    return attention


@dataclass(frozen=True, slots=True)
class _Layers:
    """A pass through all layers: what rows see in those without a window, and in those with one."""

    config: ModelConfig
    weights: ModelWeights
    turning: Rotary
    windows: tuple[int, ...]
    whole: SeenBlocks
    near: SeenBlocks

    def of(self, layer: int, qkv: Tensor) -> tuple[Tensor, Rotary, SeenBlocks]:
        """A layer's rows with normed heads, the tables that turn them, and what they see."""
        norms = layer_qk_norm(self.weights.layers[layer], self.config.norm_eps)
        if norms is not None:
            qkv = norm_heads(qkv, self.config, norms)
        return qkv, self.turning.of(layer), self.near if self.windows and self.windows[layer] else self.whole


def _layers(
    config: ModelConfig, weights: ModelWeights, rotary: Rotary, positions: Tensor, whole: SeenBlocks
) -> _Layers:
    nearest = (positions + 1 - (config.window or 0)).clamp_(min=0).int()
    near = replace(whole, begins=nearest)
    return _Layers(config, weights, rotary.at(positions), layer_windows(config), whole, near)


class _CpuMaskAttention(torch.autograd.Function):
    """Rotation and attention of mask rows [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        turning: Rotary,
        keys: Tensor,
        values: Tensor,
        seen: SeenBlocks,
        config: ModelConfig,
        ops: BlockOps,
    ) -> Tensor:
        out, shares = ops.attend(config, qkv, turning, keys, values, seen, ctx.needs_input_grad[0])
        ctx.save_for_backward(qkv, keys, values, shares)
        ctx.given = turning, seen, config, ops
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, keys, values, shares = ctx.saved_tensors
        turning, seen, config, ops = ctx.given
        return (ops.slopes(config, d_out, qkv, turning, keys, values, seen, shares), *[None] * 6)
