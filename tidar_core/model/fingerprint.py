"""Which weights a model has, as a short hash."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tidar_core.model.weights import LayerWeights, ModelWeights

_SAMPLED_ROWS = 16


def fingerprint(weights: ModelWeights) -> str:
    """A short hash of the base weights: 16 hex digits over some rows of every tensor, rounded to bf16.

    The same for a checkpoint loaded as bf16 or fp32, on any device.
    """
    digest = hashlib.sha256()
    for name, tensor in _named_tensors(weights):
        sample = _some_rows(tensor).to(torch.bfloat16).cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:16]


def _some_rows(tensor: Tensor) -> Tensor:
    """All of a vector, some rows of a matrix; of experts' matrices at least one row each."""
    if tensor.dim() == 1:
        return tensor
    rows = tensor.flatten(0, -2)
    sampled = _SAMPLED_ROWS if tensor.dim() == 2 else max(_SAMPLED_ROWS, len(tensor))
    return rows[:: max(1, len(rows) // sampled)]


def _named_tensors(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    yield "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for field in LayerWeights.__dataclass_fields__:
            tensor = getattr(layer, field)
            if tensor is not None:
                yield f"layers.{index}.{field}", tensor
    yield "final_norm", weights.final_norm
    if weights.head is not weights.embedding:
        yield "head", weights.head
