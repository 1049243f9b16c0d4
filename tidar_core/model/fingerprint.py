"""Which model was loaded, as short hashes: by a sample of its weights, and by all that decides its tokens."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.weights import LayerWeights, ModelWeights

_SAMPLED_ROWS = 16
_SUMMED = 128  # a kilobyte: no more than a row of a model that is of use


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


def identity(base: BaseIdentity, config: ModelConfig, weights: ModelWeights) -> str:
    """A hash of what decides a model's tokens beside the arithmetic: all weights as they were loaded, the configuration
    (but for how many positions there are), the vocabulary and how it cuts text. 16 hex digits.

    Files may be replaced while an engine that read them runs. The fingerprint, which adapters name, sees a sample of
    the weights; here each part of a row counts, at its place.
    """
    digest = hashlib.sha256(f"{base.fingerprint} {base.tokenizer} {base.cuts}".encode())
    digest.update(repr(replace(config, max_positions=0, stretches_to=None)).encode())
    for name, tensor in _named_tensors(weights):
        digest.update(name.encode())
        digest.update(_sums_of_bits(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """Sums of a tensor's numbers, eight bytes taken as one, modulo 2^64: int64, one for each _SUMMED of them."""
    numbers = tensor.detach().contiguous().flatten().view(torch.uint8)
    numbers = numbers.clone() if numbers.storage_offset() % 8 else numbers  # which a view as int64 refuses
    whole = len(numbers) - len(numbers) % (8 * _SUMMED)
    sums = numbers[:whole].view(torch.int64).view(-1, _SUMMED).sum(1)
    return torch.cat([sums, numbers[whole:].to(torch.int64)])


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
