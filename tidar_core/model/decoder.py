"""One decoder for all architectures, written over an `Ops` record: the engine and the trainer both run it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Experts, ModelConfig
from tidar_core.kernels.ops import KVCache, Layers, Ops, QKNorm, Rotary, StepRows
from tidar_core.kernels.reference import gate
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LayerWeights, LowRank, ModelWeights, OwnAttention

BASE_ALONE = LayerAdapter()


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
    [rows, (heads + 2 kv_heads) * head_dim], before each head's QK-norm and rotation, and gives
    [rows, heads * head_dim].
    """
    residual, eps = None, config.norm_eps
    for index, layer in enumerate(weights.layers):
        extra = BASE_ALONE if adapter is None else adapter.layers[index]
        own = own_attention(adapter, index)
        own_qkv, own_o = (own.qkv, own.o) if own is not None else (None, None)
        x, residual = _added(ops, x, residual, layer.input_norm, eps)
        qkv = _linear(ops, x, layer.qkv, layer.qkv_bias, extra.qkv, first_mask_row, own_qkv)
        mixed = attention(index, _norm_all_heads(ops, config, layer, qkv))
        x = _linear(ops, mixed, layer.o, layer.o_bias, extra.o, first_mask_row, own_o)
        x, residual = _added(ops, _normed(ops, x, layer.attention_norm, eps), residual, layer.post_norm, eps)
        x = mlp(ops, config, layer, extra, x, first_mask_row)
        x = _normed(ops, x, layer.mlp_norm, eps)
    return ops.add_norm(x, residual, weights.final_norm, eps)[0]


def mlp(
    ops: Ops, config: ModelConfig, layer: LayerWeights, extra: LayerAdapter, x: Tensor, first_mask_row: int
) -> Tensor:
    """A layer's MLP, or its experts, and what the drafter has beside them: x [rows, hidden] -> [rows, hidden]."""
    if layer.router is None or config.experts is None:
        gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias, extra.gate_up, first_mask_row)
        gated = ops.gate(gate_up, config.activation)
        made = ops.linear(gated, layer.down, layer.down_bias, extra.down, first_mask_row)
    else:
        made = _mixture(ops, config, config.experts, layer, layer.router, x)
    if extra.expert is None or first_mask_row == len(x):
        return made
    # Of any rank, which not every device's `gate` takes.
    own = gate(F.linear(x[first_mask_row:], extra.expert.a), config.activation)
    drafted = made[first_mask_row:] + F.linear(own, extra.expert.b)
    return torch.cat((made[:first_mask_row], drafted)) if first_mask_row else drafted


def _mixture(ops: Ops, config: ModelConfig, experts: Experts, layer: LayerWeights, router: Tensor, x: Tensor) -> Tensor:
    routed = ops.route(x, router, layer.expert_bias, experts)
    mixed = ops.mix_experts(x, routed, layer.gate_up, layer.down, config.activation)
    if layer.shared_gate_up is None or layer.shared_down is None:
        return mixed
    gate_up = ops.linear(x, layer.shared_gate_up, None, None, len(x))
    shared = ops.linear(ops.gate(gate_up, config.activation), layer.shared_down, None, None, len(x))
    return mixed + (shared if routed.shared is None else (routed.shared * shared.float()).to(shared.dtype))


def _added(ops: Ops, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(what the next product reads: the sum or its norm, the sum)."""
    if norm is not None:
        return ops.add_norm(x, residual, norm, eps)
    total = x if residual is None else residual + x
    return total, total


def _normed(ops: Ops, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else ops.add_norm(x, None, norm, eps)[0]


def _norm_all_heads(ops: Ops, config: ModelConfig, layer: LayerWeights, qkv: Tensor) -> Tensor:
    """q and k normed over all their heads together, where the model has that."""
    if layer.all_q_norm is None or layer.all_k_norm is None:
        return qkv
    sizes = (config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim)
    q, k, v = qkv.split(sizes, dim=1)
    q, k = (
        _normed(ops, each.contiguous(), norm, config.norm_eps)
        for each, norm in ((q, layer.all_q_norm), (k, layer.all_k_norm))
    )
    return torch.cat((q, k, v), dim=1)


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
    """A layer's per-head norms of queries and keys; None where it has none."""
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
        verify_qkv = ops.rotate_and_store(qkv[:first], verifying, tables, cache, layer, norms)
        mask_qkv = ops.rotate_and_store(qkv[first:], drafting, tables, cache, layer, own_norms)
        return torch.cat((verify_qkv, mask_qkv))

    def attention(layer: int, qkv: Tensor) -> Tensor:
        return ops.attend(rotated(layer, qkv), rows, cache, layer)

    return attention
