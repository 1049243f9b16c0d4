"""Layers that are packed as they are read: one of them is in memory as it was, and nothing else changes."""

import hashlib
import weakref
from dataclasses import fields
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_checkpoint, tiny_gguf
from tidar_core.config import ConfigError, EngineConfig, ServedDType
from tidar_core.engine import load_engine, start
from tidar_core.kernels.cpu_pack import of_each, pack_int8
from tidar_core.kernels.reference import as_it_is
from tidar_core.model import fingerprint as fingerprints
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights, numbers_to_load
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


@pytest.mark.skipif(start.psutil.MACOS, reason="macOS lends memory without end")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_model_that_memory_does_not_hold_is_refused_in_a_line_before_it_is_read(
    dtype: ServedDType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen3", tied=False)
    source = find_model(str(path))
    needed = numbers_to_load(source, load_config(source)) * (4 if dtype == "float32" else 2)
    monkeypatch.setattr(start, "swap_memory", lambda: SimpleNamespace(free=1000))
    config = EngineConfig(str(path), "none", dtype, "cpu", threads=1, cache_tokens=64)
    monkeypatch.setattr(start, "virtual_memory", lambda: SimpleNamespace(available=needed - 1000))
    load_engine(config)
    monkeypatch.setattr(start, "virtual_memory", lambda: SimpleNamespace(available=needed - 1001))
    monkeypatch.setattr(start, "load_weights", None)
    with pytest.raises(ConfigError, match=r"takes .* GiB of memory, .* GiB are free: free some, or take a") as error:
        load_engine(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("gguf", [False, True])
def test_the_numbers_of_a_model_are_counted_without_reading_it(gguf: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen2")
    source = find_model(str(tiny_gguf(tmp_path / "tiny.gguf", path) if gguf else path))
    told: list[int] = []
    config = load_config(source)
    load_weights(source, config, torch.float32, "cpu", told=lambda name, tensor: told.append(prod(tensor.shape)))
    assert numbers_to_load(source, config) == sum(told)
