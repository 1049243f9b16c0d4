"""Layers that are packed as they are read: one of them is in memory as it was, and nothing else changes."""

import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_adapter, tiny_checkpoint, tiny_gguf
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import greedy_params
from tidar_core.config import Architecture, ConfigError, EngineConfig, ServedDType
from tidar_core.engine import load_engine, ops_choice, start
from tidar_core.kernels import cpu
from tidar_core.kernels.cpu import packs_matrices
from tidar_core.kernels.cpu_build import CompileError
from tidar_core.kernels.cpu_pack import of_each, pack_int8
from tidar_core.kernels.reference import as_it_is
from tidar_core.model.adapter import identify_base
from tidar_core.model.configuration import load_config
from tidar_core.model.fingerprint import Prints, fingerprint, prints_of
from tidar_core.model.footprint import numbers_a_token, weights_bytes
from tidar_core.model.loading import load_weights, numbers_to_load
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import (
    LayerWeights,
    ModelWeights,
    all_tensors,
    numbers_a_row,
    pack_layer,
    pack_model,
    widened,
)

SHAPES = [("qwen3", {}), ("qwen3", {"tied": False}), ("qwen3_moe", {}), ("gemma3_text", {})]
UNPACKED = [  # their sizes are no multiples of 32
    ("qwen3", {"vocab": 528}),
    ("qwen3", {"vocab": 528, "tied": False}),
    ("gemma3_text", {"vocab": 528}),
]
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
def test_weights_are_never_in_memory_twice_while_they_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: Architecture, options: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture, **options)
    given, kept, alive = read(path), read(path), []
    tensors = list(all_tensors(given))
    total, ours = sum(tensor.numel() for tensor in tensors), Tensor.to

    def widening(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        alive.append(sum(each.numel() for each in tensors))
        return ours(tensor, dtype)

    monkeypatch.setattr(Tensor, "to", widening)
    wide = widened(given, consumed=True)
    monkeypatch.undo()
    assert sum(each.numel() for each in tensors if each.dtype is torch.bfloat16) == 0
    assert alive[0] == total
    assert alive == sorted(alive, reverse=True)
    assert fingerprint(wide) == fingerprint(kept)
    assert (wide.head is wide.embedding) == (kept.head is kept.embedding)
    assert all(tensor.dtype is torch.float32 for tensor in all_tensors(wide))
    assert [tensor.shape for tensor in all_tensors(wide)] == [tensor.shape for tensor in all_tensors(kept)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_what_is_told_has_the_fingerprint_and_the_identity_of_the_whole(
    architecture: Any, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    source = find_model(str(tiny_checkpoint(tmp_path / "model", architecture, **options)))
    config, tokenizer, prints = load_config(source), load_tokenizer(source), Prints()
    load_weights(source, config, dtype, "cpu", told=prints.told, packed=int8_layer)
    weights = load_weights(source, config, dtype, "cpu")
    base = identify_base(source.name, config, weights, tokenizer)
    assert prints.fingerprint() == base.fingerprint == fingerprint(weights)
    assert prints.identity(base, config) == prints_of(weights).identity(base, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_an_engine_that_packs_layer_by_layer_says_what_one_says_that_packs_the_whole(
    architecture: Architecture, dtype: ServedDType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture)
    adapter = tiny_adapter(tmp_path / "adapter", path, rank=16)
    config = EngineConfig(str(path), str(adapter), dtype, "cpu", threads=1, cache_tokens=512)

    def answers() -> tuple[Any, ...]:
        engine = load_engine(config)
        said = [
            answer.tokens
            for mode in ("off", "full")
            for answer in answer_all(
                engine, [tuple(range(5 + i, 30 + i)) for i in range(2)], [greedy_params(24, mode)] * 2
            )
        ]
        return said, engine.info.fingerprint, engine.info.identity

    found = answers()

    def whole(*of: Any, told: Any, packed: Any) -> ModelWeights:
        weights = load_weights(*of, told=told)
        return replace(weights, layers=tuple(packed(layer) for layer in weights.layers))

    monkeypatch.setattr(start, "load_weights", whole)
    assert answers() == found


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
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_model_that_memory_does_not_hold_is_refused_in_a_line_before_it_is_read(
    dtype: ServedDType, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen3", tied=tied)
    source = find_model(str(path))
    config = load_config(source)
    in_layers, _ = numbers_to_load(source, config)
    number = 4 if dtype == "float32" else 2
    needed = int(in_layers * {"int8": 1, "int4": 10 / 16}.get(dtype, number)) + config.hidden_size * number
    # The head is packed where it is tied, too, and the embedding stays.
    needed += config.vocab_size * config.hidden_size * (number + (1 if dtype in ("int8", "int4") else number))
    chosen = EngineConfig(str(path), "none", dtype, "cpu", threads=1, cache_tokens=64)
    monkeypatch.setattr(start, "free_memory", lambda: needed + 1)
    load_engine(chosen)
    monkeypatch.setattr(start, "free_memory", lambda: needed - 1)
    monkeypatch.setattr(start, "load_weights", None)
    with pytest.raises(ConfigError, match=r"takes .* GiB of memory in .*, and .* GiB are free: free some") as error:
        load_engine(chosen)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(start.psutil.MACOS, reason="macOS lends memory without end")
@pytest.mark.parametrize(
    ("architecture", "options", "dtype"),
    [(*each, dtype) for each in SHAPES for dtype in ("float32", "bfloat16", "int8", "int4")]
    + [(*each, dtype) for each in UNPACKED for dtype in ("float32", "bfloat16")],
)
def test_weights_take_what_they_are_said_to_take(
    architecture: Architecture,
    options: dict[str, Any],
    dtype: ServedDType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = find_model(str(tiny_checkpoint(tmp_path / "model", architecture, **options)))
    config, said = load_config(source), list[float]()

    def noted(*given: Any) -> float:
        said.append(weights_bytes(*given))
        return said[-1]

    monkeypatch.setattr(start, "weights_bytes", noted)
    chosen = EngineConfig(str(source.directory), "none", dtype, "cpu", threads=1, cache_tokens=64)

    def held() -> int:
        tensors = all_tensors(load_engine(chosen)._runner.weights)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    taken = held()
    # Not counted: scales of outputs in 8 bits, and the rows that a router is filled up with.
    assert said[-1] <= taken <= 1.08 * said[-1]
    assert said == [weights_bytes(source, config, dtype, packs_matrices(config, chosen.page_size))]
    if dtype in ("int8", "int4"):  # which plain torch has not
        return

    def not_compiled(*given: Any) -> None:
        raise CompileError("no C++ compiler")

    monkeypatch.setattr(ops_choice, "cpu_ops", not_compiled)
    monkeypatch.setattr(cpu, "compiler", not_compiled)
    taken = held()
    assert said[-1] <= taken <= 1.08 * said[-1]
    assert said[-1] == weights_bytes(source, config, dtype, packs_matrices(config, chosen.page_size))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_token_is_computed_with_the_experts_that_are_chosen_for_it_alone(
    architecture: Architecture, tmp_path: Path
) -> None:
    source = find_model(str(tiny_checkpoint(tmp_path / "model", architecture)))
    config = load_config(source)
    weights = load_weights(source, config, torch.float32, "cpu")
    matrices = sum(
        numbers_a_row(config, layer) for layer in weights.layers
    )  # without norms, and with the rows that routers are filled up with
    assert numbers_a_token(source, config) == pytest.approx(matrices, rel=0.03)
    assert (numbers_a_token(source, config) < numbers_to_load(source, config)[0]) == (architecture == "qwen3_moe")


@pytest.mark.parametrize("gguf", [False, True])
def test_the_numbers_of_a_model_are_counted_without_reading_it(gguf: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen2")
    source = find_model(str(tiny_gguf(tmp_path / "tiny.gguf", path) if gguf else path))
    sizes: dict[str, int] = {}
    config = load_config(source)
    load_weights(source, config, torch.float32, "cpu", told=lambda name, tensor: sizes.update({name: tensor.numel()}))
    in_layers = sum(size for name, size in sizes.items() if name.startswith("layers."))
    assert numbers_to_load(source, config) == (in_layers, sum(sizes.values()) - in_layers)
