"""Layers that are packed as they are read: one of them is in memory as it was, and nothing else changes."""

import hashlib
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_checkpoint
from tidar_core.kernels.cpu_pack import of_each, pack_int8
from tidar_core.kernels.reference import as_it_is
from tidar_core.model import fingerprint as fingerprints
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.weights import LayerWeights, ModelWeights, pack_layer, pack_model

MODELS = [("llama", {}), ("qwen3", {"tied": False}), ("qwen2_moe", {"tied": False}), ("gemma3_text", {})]


def read(path: Path, **hooks: Any) -> ModelWeights:
    source = find_model(str(path))
    return load_weights(source, load_config(source), torch.bfloat16, "cpu", **hooks)


def int8_layer(layer: LayerWeights) -> LayerWeights:
    return pack_layer(layer, of_each(pack_int8), as_it_is)


def test_one_layer_is_in_memory_as_it_was_read(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama", layers=4)
    unpacked: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def told(name: str, tensor: Tensor) -> None:
        if name.startswith("layers.") and tensor.dim() > 1:
            unpacked.append(weakref.ref(tensor))
            alive.append(sum(each() is not None and each().numel() > 0 for each in unpacked))  # type: ignore[union-attr]

    read(path, told=told)
    assert max(alive) == 4 * 4
    unpacked.clear()
    alive.clear()
    read(path, told=told, packed=int8_layer)
    assert len(alive) == 4 * 4
    assert max(alive) == 4


@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_what_is_told_has_the_fingerprint_of_the_whole(
    architecture: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture, **options)
    digest = hashlib.sha256()

    def told(name: str, tensor: Tensor) -> None:
        sample = fingerprints._some_rows(tensor).contiguous().view(torch.int16)
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.numpy().astype("<i2").tobytes())

    read(path, told=told, packed=int8_layer)
    assert digest.hexdigest()[:16] == fingerprints.fingerprint(read(path))


@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_layers_that_are_packed_one_by_one_are_those_of_the_whole(
    architecture: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture, **options)
    expected = pack_model(read(path), of_each(pack_int8), as_it_is, as_it_is)
    found = read(path, packed=int8_layer)
    for layer, other in zip((found, *found.layers), (expected, *expected.layers), strict=True):
        for field in fields(layer):
            one, two = getattr(layer, field.name), getattr(other, field.name)
            assert not isinstance(one, Tensor) or torch.equal(one, two)
            assert (one is None) == (two is None)
    assert (found.head is found.embedding) == (expected.head is expected.embedding)
