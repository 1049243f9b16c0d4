"""The drafter that is trained: its tensors, how they begin, and their way to and from `AdapterWeights`."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.model.adapter import AdapterWeights, BaseIdentity, Projection
from tidar_core.model.weights import LayerAdapter, LowRank

PROJECTIONS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")


def check_rank(base: BaseIdentity, rank: int, projections: Sequence[Projection]) -> None:
    """Raises ConfigError where the rank does not fit a projection."""
    widest = min(min(base.projection_shape(projection)) for projection in projections)
    if not 1 <= rank <= widest:
        raise ConfigError(f"rank {rank} does not fit {base.name}: choose 1 to {widest} for {', '.join(projections)}")


def new_drafter(
    base: BaseIdentity,
    embedding: Tensor,
    rank: int,
    projections: Sequence[Projection],
    block_length: int,
    seed: int,
) -> AdapterWeights:
    """A drafter that changes nothing yet: B is zero, A random, slots as large as the base's embeddings; fp32.

    Raises ConfigError where the rank does not fit.
    """
    check_rank(base, rank, projections)
    generator = torch.Generator().manual_seed(seed)

    def pair(projection: Projection) -> LowRank | None:
        if projection not in projections:
            return None
        columns, rows = base.projection_shape(projection)
        a = torch.randn(rank, columns, generator=generator) * columns**-0.5
        return LowRank(a.to(embedding.device), torch.zeros(rows, rank, device=embedding.device))

    slots = torch.randn(block_length, base.hidden_size, generator=generator) * embedding.float().std().item()
    layers = tuple(
        LayerAdapter(pair("qkv"), pair("o"), pair("gate_up"), pair("down")) for _ in range(base.layers)
    )  # fmt: skip
    return AdapterWeights(slots.to(embedding.device), layers)


def named_tensors(weights: AdapterWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names that they have on disk."""
    yield "mask_embedding", weights.slot_embeddings
    for index, layer in enumerate(weights.layers):
        for projection in PROJECTIONS:
            pair: LowRank | None = getattr(layer, projection)
            if pair is not None:
                yield f"layers.{index}.{projection}.A", pair.a
                yield f"layers.{index}.{projection}.B", pair.b


def map_tensors(weights: AdapterWeights, change: Callable[[Tensor], Tensor]) -> AdapterWeights:
    """The same drafter with every tensor changed."""

    def changed(pair: LowRank | None) -> LowRank | None:
        return None if pair is None else LowRank(change(pair.a), change(pair.b))

    layers = tuple(
        LayerAdapter(changed(layer.qkv), changed(layer.o), changed(layer.gate_up), changed(layer.down))
        for layer in weights.layers
    )
    return AdapterWeights(change(weights.slot_embeddings), layers)


def trainable(weights: AdapterWeights) -> AdapterWeights:
    """Leaves of their own, in fp32, that gather gradients."""
    return map_tensors(weights, lambda tensor: tensor.detach().float().clone().requires_grad_(True))
