"""Which model was loaded, as short hashes: by a sample of its weights, and by all that decides its tokens."""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.weights import ModelWeights, layer_tensors

_SAMPLED_ROWS = 16
_SUMMED = 128  # a kilobyte: no more than a row of a model that is of use


class Prints:
    """Fingerprint and identity of a model that is told tensor by tensor, in the order of `load_weights`: each may be
    packed once it was told, and the model is never in memory as a whole."""

    def __init__(self) -> None:
        self._samples = hashlib.sha256()
        self._sums = hashlib.sha256()

    def told(self, name: str, tensor: Tensor) -> None:
        """Takes the next tensor into account."""
        sample = _some_rows(tensor).to(torch.bfloat16).cpu().contiguous()
        self._samples.update(f"{name}{list(tensor.shape)}".encode())
        self._samples.update(sample.view(torch.int16).numpy().astype("<i2").tobytes())
        self._sums.update(name.encode())
        self._sums.update(_sums_of_bits(tensor).cpu().numpy().tobytes())

    def fingerprint(self) -> str:
        """A short hash of the base weights: 16 hex digits over some rows of every tensor, rounded to bf16.

        The same for a checkpoint loaded as bf16 or fp32, on any device.
        """
        return self._samples.hexdigest()[:16]

    def identity(self, base: BaseIdentity, config: ModelConfig) -> str:
        """A hash of what decides a model's tokens beside the arithmetic: all weights as they were loaded, the
        configuration (but for how many positions there are), the vocabulary and how it cuts text. 16 hex digits.

        Files may be replaced while an engine that read them runs. The fingerprint, which adapters name, sees a sample
        of the weights; here each part of a row counts, at its place.
        """
        digest = hashlib.sha256(f"{base.fingerprint} {base.tokenizer} {base.cuts}".encode())
        digest.update(repr(replace(config, max_positions=0, stretches_to=None)).encode())
        digest.update(self._sums.digest())
        return digest.hexdigest()[:16]


def prints_of(weights: ModelWeights) -> Prints:
    """Those of a model that is in memory, not packed yet."""
    prints = Prints()
    prints.told("embedding", weights.embedding)
    for index, layer in enumerate(weights.layers):
        for name, tensor in layer_tensors(index, layer):
            prints.told(name, tensor)
    prints.told("final_norm", weights.final_norm)
    if weights.head is not weights.embedding:
        prints.told("head", weights.head)
    return prints


def fingerprint(weights: ModelWeights) -> str:
    """`Prints.fingerprint` of a model that is in memory."""
    return prints_of(weights).fingerprint()


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
