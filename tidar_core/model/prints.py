"""Fingerprint and identity of weights that are never in memory all at once, each tensor being packed once it was read.

The values are those of `fingerprint.py`, which takes the whole model.
"""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.fingerprint import _some_rows, _sums_of_bits


class Prints:
    """What is told of weights, tensor by tensor in the order of `load_weights`."""

    def __init__(self) -> None:
        self._samples = hashlib.sha256()
        self._sums: list[bytes] = []  # an identity begins with the fingerprint, which is known at the end

    def told(self, name: str, tensor: Tensor) -> None:
        sample = _some_rows(tensor).to(torch.bfloat16).cpu().contiguous()
        self._samples.update(f"{name}{list(tensor.shape)}".encode())
        self._samples.update(sample.view(torch.int16).numpy().astype("<i2").tobytes())
        self._sums += (name.encode(), _sums_of_bits(tensor).cpu().numpy().tobytes())

    def fingerprint(self) -> str:
        return self._samples.hexdigest()[:16]

    def identity(self, base: BaseIdentity, config: ModelConfig) -> str:
        digest = hashlib.sha256(f"{base.fingerprint} {base.tokenizer} {base.cuts}".encode())
        digest.update(repr(replace(config, max_positions=0, stretches_to=None)).encode())
        for part in self._sums:
            digest.update(part)
        return digest.hexdigest()[:16]
