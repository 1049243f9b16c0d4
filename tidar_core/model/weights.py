"""Weights as the decoder reads them: projections fused, one tensor a matrix product."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. Matrices are [out, in] as in `torch.nn.Linear`.

    qkv is q ([heads * head_dim]), then k, then v ([kv_heads * head_dim] each); gate_up is gate, then up.
    q_norm and k_norm ([head_dim]) are Qwen3's; q and k rows are in transformers' rotary layout (halves).
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model. `head` is the same tensor as `embedding` ([vocab, hidden]) where the head is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """y = x aᵀ bᵀ beside a base projection: a is [rank, in], b is [out, rank]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What the drafter adds to one layer on mask rows; None where it adds nothing to a projection."""

    qkv: LowRank | None
    o: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A drafter's tensors. `slot_embeddings` ([block_length, hidden]) are the inputs of the mask rows, by slot."""

    slot_embeddings: Tensor
    layers: tuple[LayerAdapter, ...]


def pack_model(weights: ModelWeights, pack: Callable[[Tensor], Tensor]) -> ModelWeights:
    """The same model with every matrix that is multiplied by laid out anew by `pack`; the embedding stays."""
    layers = tuple(
        replace(layer, qkv=pack(layer.qkv), o=pack(layer.o), gate_up=pack(layer.gate_up), down=pack(layer.down))
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=pack(weights.head))


def pack_adapter(adapter: AdapterWeights, pack: Callable[[Tensor], Tensor]) -> AdapterWeights:
    """The same adapter with every matrix laid out anew by `pack`."""

    def packed(low_rank: LowRank | None) -> LowRank | None:
        return None if low_rank is None else LowRank(pack(low_rank.a), pack(low_rank.b))

    layers = tuple(
        LayerAdapter(packed(layer.qkv), packed(layer.o), packed(layer.gate_up), packed(layer.down))
        for layer in adapter.layers
    )
    return replace(adapter, layers=layers)
