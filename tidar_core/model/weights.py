"""Weights as the decoder reads them: projections fused, one tensor a matrix product."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tidar_core.config import ModelConfig

ROUTER_ROWS = 32  # whose multiples every device's products take


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. Matrices are [out, in] as in `torch.nn.Linear`.

    qkv is q ([heads * head_dim]), then k, then v ([kv_heads * head_dim] each); gate_up is gate, then up.
    input_norm and post_norm stand before attention and MLP, attention_norm and mlp_norm behind them, None where there
    is none. q_norm and k_norm ([head_dim]) are of each head, as Qwen3 has them, all_q_norm and all_k_norm of all heads
    together; q and k rows are in transformers' rotary layout (halves).

    In a layer with experts (`config.Experts`) there is a router, [experts, hidden] and perhaps the row of the shared
    MLP's share, filled up with zeros to a multiple of ROUTER_ROWS; gate_up and down are one an expert, [experts, out,
    in]; expert_bias, fp32 [experts], where choices are biased; shared_gate_up and shared_down of the MLP for all rows.
    """

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    all_q_norm: Tensor | None = None
    all_k_norm: Tensor | None = None
    router: Tensor | None = None
    expert_bias: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None


def layer_tensors(index: int, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors that layer `index` has, under the names that fingerprints give them."""
    for field in fields(layer):
        tensor = getattr(layer, field.name)
        if tensor is not None:
            yield f"layers.{index}.{field.name}", tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model. `head` is the same tensor as `embedding` ([vocab, hidden]) where the head is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def all_tensors(weights: ModelWeights) -> Iterator[Tensor]:
    """All tensors of a model, each once."""
    yield from (weights.embedding, weights.final_norm)
    if weights.head is not weights.embedding:
        yield weights.head
    for index, layer in enumerate(weights.layers):
        yield from (tensor for _, tensor in layer_tensors(index, layer))


def numbers_a_row(config: ModelConfig, layer: LayerWeights) -> float:
    """How many weights of a layer one row is multiplied by; of the experts, those that it goes through alone."""
    whole = (layer.qkv, layer.o, layer.router, layer.shared_gate_up, layer.shared_down)
    count = sum(matrix.numel() for matrix in whole if matrix is not None)
    inner = layer.gate_up.numel() + layer.down.numel()
    if layer.router is None or config.experts is None:
        return count + inner
    return count + inner * config.experts.chosen / config.experts.count


def norms_before(weights: ModelWeights) -> list[tuple[Tensor, Tensor]] | None:
    """Each layer's norms before attention and before the MLP; None where these are not all the norms over a row."""
    found = []
    for layer in weights.layers:
        others = (layer.attention_norm, layer.mlp_norm, layer.all_q_norm, layer.all_k_norm)
        if layer.input_norm is None or layer.post_norm is None or any(norm is not None for norm in others):
            return None
        found.append((layer.input_norm, layer.post_norm))
    return found


@dataclass(frozen=True, slots=True)
class LowRank:
    """y = x aᵀ bᵀ beside a base projection: a is [rank, in], b is [out, rank]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What the drafter adds to one layer on mask rows; None where it adds nothing to a projection.

    expert: an MLP of the drafter's own beside a layer's experts, or its MLP where it has none: a is gate and up
    ([2 * rank, hidden]), b is down ([hidden, rank]).
    """

    qkv: LowRank | None = None
    o: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    expert: LowRank | None = None


@dataclass(frozen=True, slots=True)
class SlotHead:
    """What a slot says once the token before it is known: a small recurrent net over the slots of one proposal.

        state_s = silu(hidden h_s + token e(t_{s-1}) + state state_{s-1}),   h'_s = h_s + out state_s

    h_s is the final hidden state of slot s, e(t_{s-1}) the embedding of the token before it (the anchor before slot 1),
    state_0 is zero. hidden, token: [width, hidden]; state: [width, width]; out: [hidden, width].
    """

    hidden: Tensor
    token: Tensor
    state: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """What mask rows have in place of a layer's attention projections and norms; each as in `LayerWeights`."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A drafter's tensors. `slot_embeddings` ([block_length, hidden]) are the inputs of the mask rows, by slot.
    attention: where mask rows have projections of their own, those of each layer."""

    slot_embeddings: Tensor
    layers: tuple[LayerAdapter, ...]
    slot_head: SlotHead | None = None
    attention: tuple[OwnAttention, ...] | None = None


def named_tensors(adapter: AdapterWeights) -> Iterator[tuple[str, Tensor]]:
    """An adapter's tensors under the names that they have on disk. Adapters with attention of their own are not stored
    so."""
    yield "mask_embedding", adapter.slot_embeddings
    for index, layer in enumerate(adapter.layers):
        for field in fields(layer):
            pair: LowRank | None = getattr(layer, field.name)
            if pair is not None:
                yield f"layers.{index}.{field.name}.A", pair.a
                yield f"layers.{index}.{field.name}.B", pair.b
    if adapter.slot_head is not None:
        for field in fields(adapter.slot_head):
            yield f"slot_head.{field.name}", getattr(adapter.slot_head, field.name)


def map_tensors(adapter: AdapterWeights, change: Callable[[Tensor], Tensor]) -> AdapterWeights:
    """The same adapter, one that adds to the base's projections, with every tensor changed."""
    assert adapter.attention is None
    head = adapter.slot_head
    return AdapterWeights(
        change(adapter.slot_embeddings),
        _map_layers(adapter, change),
        head and SlotHead(change(head.hidden), change(head.token), change(head.state), change(head.out)),
    )


def _map_layers(adapter: AdapterWeights, change: Callable[[Tensor], Tensor]) -> tuple[LayerAdapter, ...]:
    def changed(pair: LowRank | None) -> LowRank | None:
        return None if pair is None else LowRank(change(pair.a), change(pair.b))

    return tuple(
        LayerAdapter(*(changed(getattr(layer, field.name)) for field in fields(layer))) for layer in adapter.layers
    )


def has_experts(weights: ModelWeights, extras: Iterable[LayerAdapter]) -> bool:
    """Whether a layer has experts, or the drafter one of its own, which a mixture's may where no layer has any."""
    return any(layer.router is not None for layer in weights.layers) or any(extra.expert for extra in extras)


def widened(weights: ModelWeights, dtype: torch.dtype = torch.float32, consumed: bool = False) -> ModelWeights:
    """The same model in a dtype that holds each of its numbers. consumed: the given tensors are emptied one by one, so
    that the weights are never in memory twice."""

    def wide(tensor: Tensor) -> Tensor:
        return _taken(tensor, lambda held: held.to(dtype)) if consumed else tensor.to(dtype)

    def wide_layer(layer: LayerWeights) -> LayerWeights:
        held = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: wide(tensor) for name, tensor in held.items() if tensor is not None})

    layers = tuple(wide_layer(layer) for layer in weights.layers)
    tied = weights.head is weights.embedding
    embedding = wide(weights.embedding)
    return ModelWeights(embedding, layers, wide(weights.final_norm), embedding if tied else wide(weights.head))


def pack_model(
    weights: ModelWeights,
    pack: Callable[[Tensor], Tensor],
    pack_head: Callable[[Tensor], Tensor],
    pack_router: Callable[[Tensor], Tensor],
) -> ModelWeights:
    """The same model with its matrices laid out for the products: the layers' as in `pack_layer`, the head by
    `pack_head`; the embedding stays. The given layers are consumed."""
    layers = tuple(pack_layer(layer, pack, pack_router) for layer in weights.layers)
    return replace(weights, layers=layers, head=pack_head(weights.head))


def pack_layer(
    layer: LayerWeights, pack: Callable[[Tensor], Tensor], pack_router: Callable[[Tensor], Tensor]
) -> LayerWeights:
    """The same layer with its matrices laid out for the products, its router by `pack_router`, all others by `pack` (a
    layer's experts all at once). The given layer is consumed: its matrices may be empty afterwards, so that the weights
    are never in memory twice."""
    named = {name: getattr(layer, name) for name in ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down")}
    taken = {name: _taken(matrix, pack) for name, matrix in named.items() if matrix is not None}
    router = None if layer.router is None else _taken(layer.router, pack_router)
    return replace(layer, **taken, router=router)


def pack_adapter(
    adapter: AdapterWeights, pack: Callable[[Tensor], Tensor], pack_base: Callable[[Tensor], Tensor]
) -> AdapterWeights:
    """The same adapter with its layers' matrices laid out for the products: by `pack_base` those that stand for
    matrices of the base, which are consumed as in `pack_layer`; the others by `pack`. Experts of its own stay."""
    attention = adapter.attention and tuple(
        replace(own, qkv=_taken(own.qkv, pack_base), o=_taken(own.o, pack_base)) for own in adapter.attention
    )
    layers = (
        replace(packed, expert=layer.expert)
        for packed, layer in zip(_map_layers(adapter, pack), adapter.layers, strict=True)
    )
    return replace(adapter, layers=tuple(layers), attention=attention)


def _taken(matrix: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    packed = pack(matrix)
    if packed is not matrix:
        for held in (matrix, matrix._base):  # what a view is one of has the memory as well
            if held is not None:
                held.data = held.new_empty(0)
    return packed
