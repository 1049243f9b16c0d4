"""One decoder for all architectures, written over an `Ops` record: the engine and the trainer both run it."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.kernels.ops import KVCache, Layers, Ops, QKNorm, Rotary, StepRows
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LayerWeights, LowRank, ModelWeights, OwnAttention

BASE_ALONE = LayerAdapter(None, None, None, None)


def run_layers(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    adapter: AdapterWeights | None,
    x: Tensor,
    first_mask_row: int,
    attention: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """All layers and the final norm: x [rows, hidden] -> [rows, hidden], ready for the head.

    Rows from first_mask_row on also pass through the adapter. attention(layer, qkv) is given the fused projection
    [rows, (heads + 2 kv_heads) * head_dim], before QK-norm and rotation, and gives [rows, heads * head_dim].
    """
    residual = None
    for index, layer in enumerate(weights.layers):
        extra = BASE_ALONE if adapter is None else adapter.layers[index]
        own = own_attention(adapter, index)
        own_qkv, own_o = (own.qkv, own.o) if own is not None else (None, None)
        x, residual = ops.add_norm(x, residual, layer.input_norm, config.norm_eps)
        qkv = _linear(ops, x, layer.qkv, layer.qkv_bias, extra.qkv, first_mask_row, own_qkv)
        mixed = attention(index, qkv)
        x = _linear(ops, mixed, layer.o, layer.o_bias, extra.o, first_mask_row, own_o)
        x, residual = ops.add_norm(x, residual, layer.post_norm, config.norm_eps)
        gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias, extra.gate_up, first_mask_row)
        x = ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias, extra.down, first_mask_row)
    return ops.add_norm(x, residual, weights.final_norm, config.norm_eps)[0]


def all_layers(
    ops: Ops, config: ModelConfig, weights: ModelWeights, adapter: AdapterWeights | None, rotary: Rotary
) -> Layers:
    """`run_layers` with the engine's attention over weights that are packed: in one call where `ops` has it."""
    bound = None if ops.bind_layers is None else ops.bind_layers(weights, adapter, rotary)
    base_alone = bound
    if bound is None and ops.bind_layers is not None and adapter is not None and adapter.attention is not None:
        base_alone = ops.bind_layers(weights, None, rotary)

    def one_by_one(x: Tensor, rows: StepRows, cache: KVCache) -> Tensor:
        if base_alone is not None and rows.verify == len(x):
            return base_alone(x, rows, cache)
        attention = paged_attention(ops, config, weights, adapter, rows, rotary, cache)
        return run_layers(ops, config, weights, adapter, x, rows.verify, attention)

    return bound or one_by_one


def own_attention(adapter: AdapterWeights | None, layer: int) -> OwnAttention | None:
    """What mask rows have in place of a layer's attention projections, where they have any."""
    return None if adapter is None or adapter.attention is None else adapter.attention[layer]


def _linear(
    ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first: int, own: Tensor | None
) -> Tensor:
    """`ops.linear`, with a matrix of their own for the mask rows where there is one."""
    if own is None or first == len(x):
        return ops.linear(x, weight, bias, low_rank, first)
    drafting = len(x) - first
    return torch.cat(
        (ops.linear(x[:first], weight, bias, None, first), ops.linear(x[first:], own, None, None, drafting))
    )


def layer_qk_norm(layer: LayerWeights | OwnAttention, eps: float) -> QKNorm | None:
    """Qwen3's per-head norms of a layer; None for the other architectures."""
    return None if layer.q_norm is None or layer.k_norm is None else QKNorm(layer.q_norm, layer.k_norm, eps)


def paged_attention(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    adapter: AdapterWeights | None,
    rows: StepRows,
    rotary: Rotary,
    cache: KVCache,
) -> Callable[[int, Tensor], Tensor]:
    """The engine's attention for `run_layers`: rotate, write the verify rows' pages, attend over pages and slots."""
    first = rows.verify
    verifying, drafting = rows.apart()

    def rotated(layer: int, qkv: Tensor) -> Tensor:
        norms, own = layer_qk_norm(weights.layers[layer], config.norm_eps), own_attention(adapter, layer)
        tables = rotary.of(layer)
        if own is None or first == len(qkv):
            return ops.rotate_and_store(qkv, rows, tables, cache, layer, norms)
        own_norms = layer_qk_norm(own, config.norm_eps)
        said = ops.rotate_and_store(qkv[:first], verifying, tables, cache, layer, norms)
        return torch.cat((said, ops.rotate_and_store(qkv[first:], drafting, tables, cache, layer, own_norms)))

    def attention(layer: int, qkv: Tensor) -> Tensor:
        return ops.attend(rotated(layer, qkv), rows, cache, layer)

    return attention
