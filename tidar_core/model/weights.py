"""Weights as the decoder reads them: projections fused, one tensor a matrix product."""

from dataclasses import dataclass

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
