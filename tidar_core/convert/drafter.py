"""The drafter that is trained: how its tensors begin."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.model.adapter_config import PROJECTIONS, BaseIdentity, Projection
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LowRank, SlotHead, map_tensors, named_tensors


def check_rank(base: BaseIdentity, rank: int, projections: Sequence[Projection]) -> None:
    """Raises ConfigError where the rank does not fit a projection, or the base has no such projection."""
    if others := [name for name in projections if name not in base.projections]:
        raise ConfigError(f"{base.name} has no {others[0]} to adapt: choose some of {', '.join(base.projections)}")
    widest = min(_widest(base, projection) for projection in projections)
    if not 1 <= rank <= widest:
        raise ConfigError(f"rank {rank} does not fit {base.name}: choose 1 to {widest} for {', '.join(projections)}")


def _widest(base: BaseIdentity, projection: Projection) -> int:
    (_, ins), (outs, _) = base.pair_shapes(projection, 1)
    return min(ins, outs)


def check_layers(base: BaseIdentity, layers: Sequence[int] | None) -> Sequence[int]:
    """The layers to adapt; all where none are named. Raises ConfigError where the base has no such layer."""
    if layers is None:
        return range(base.layers)
    if missing := [layer for layer in layers if layer >= base.layers]:
        raise ConfigError(f"{base.name} has no layer {missing[0]}: choose from 0 to {base.layers - 1}")
    return layers


def new_drafter(
    base: BaseIdentity,
    embedding: Tensor,
    rank: int,
    projections: Sequence[Projection],
    block_length: int,
    seed: int,
    layers: Sequence[int] | None = None,
) -> AdapterWeights:
    """A drafter that changes nothing yet: B is zero, A random, slots as large as the base's embeddings; fp32.

    layers: those that it adapts, None for all. Raises ConfigError where rank or layers do not fit.
    """
    check_rank(base, rank, projections)
    adapted = check_layers(base, layers)
    generator = torch.Generator().manual_seed(seed)

    def pair(projection: Projection) -> LowRank | None:
        if projection not in projections:
            return None
        shape_a, shape_b = base.pair_shapes(projection, rank)
        a = torch.randn(shape_a, generator=generator) * shape_a[1] ** -0.5
        return LowRank(a.to(embedding.device), torch.zeros(shape_b, device=embedding.device))

    slots = torch.randn(block_length, base.hidden_size, generator=generator) * embedding.float().std().item()
    made = tuple(
        LayerAdapter(*map(pair, PROJECTIONS)) if layer in adapted else LayerAdapter() for layer in range(base.layers)
    )
    return AdapterWeights(slots.to(embedding.device), made)


def kept_of(
    weights: AdapterWeights, projections: Sequence[Projection], layers: Sequence[int] | None = None
) -> AdapterWeights:
    """The drafter with what it adapts in these projections and layers (None: all) alone."""

    def kept(index: int, layer: LayerAdapter) -> LayerAdapter:
        if layers is not None and index not in layers:
            return LayerAdapter()
        return LayerAdapter(*(getattr(layer, name) if name in projections else None for name in PROJECTIONS))

    return replace(weights, layers=tuple(kept(index, layer) for index, layer in enumerate(weights.layers)))


def with_slot_head(weights: AdapterWeights, embedding: Tensor, width: int, seed: int) -> AdapterWeights:
    """The drafter with a slot head that changes nothing yet: `out` is zero; fp32. Width 0 leaves it as it is."""
    if not width:
        return weights
    hidden, device = weights.slot_embeddings.shape[1], weights.slot_embeddings.device
    generator = torch.Generator().manual_seed(seed)

    def random(outs: int, ins: int) -> Tensor:
        return (torch.randn(outs, ins, generator=generator) * ins**-0.5).to(device)

    # Embeddings are much smaller than hidden states, and would hardly be heard beside them.
    token = random(width, hidden) / embedding.float().std()
    zeros = torch.zeros(hidden, width, device=device)
    return replace(weights, slot_head=SlotHead(random(width, hidden), token, random(width, width), zeros))


def fingerprint_of(weights: AdapterWeights) -> str:
    """A short hash of all of a drafter's tensors, in the order and under the names of its file: 16 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors(weights):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def rank_of(weights: AdapterWeights) -> int:
    """The rank of an adapter's pairs."""
    return next(tensor.shape[1] for name, tensor in named_tensors(weights) if name.endswith(".B"))


def trainable(weights: AdapterWeights) -> AdapterWeights:
    """Leaves of their own, in fp32, that gather gradients."""
    return map_tensors(weights, lambda tensor: tensor.detach().float().clone().requires_grad_(True))
