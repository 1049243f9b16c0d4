"""What a model is known by where a stream moves between its engines: all that decides a token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_checkpoint
from tidar_core.config import EngineConfig
from tidar_core.engine import EngineInfo, load_engine
from tidar_core.model.configuration import load_config
from tidar_core.model.fingerprint import _sums_of_bits
from tidar_core.model.sources import find_model


def info_of(model: Path, **options: Any) -> EngineInfo:
    config = EngineConfig(str(model), "none", "bfloat16", "cpu", threads=1, cache_tokens=256, **options)
    return load_engine(config).info


def changed(file: str, **fields: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def one_more_number(model: Path) -> None:
    """In a row that the fingerprint does not sample."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def two_rows_changed_round(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"][[7, 23]] = rows[[23, 7]]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def other_words(model: Path) -> None:
    written = json.loads((model / "tokenizer.json").read_text())
    words = written["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    (model / "tokenizer.json").write_text(json.dumps(written))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "change",
    [
        changed("config.json", rope_parameters=YARN),
        changed("config.json", rms_norm_eps=3e-4),
        changed("generation_config.json", eos_token_id=[7]),
        one_more_number,
        two_rows_changed_round,
        other_words,
    ],
    ids=["rotary frequencies", "norms", "end of an answer", "one weight", "places", "tokens"],
)
def test_whatever_decides_a_token_is_part_of_it(tmp_path: Path, change: Callable[[Path], None]) -> None:
    model, other = tiny_checkpoint(tmp_path / "one", "qwen3"), tmp_path / "other"
    shutil.copytree(model, other)
    before = info_of(model)
    assert info_of(other).identity == before.identity
    change(other)
    assert info_of(other).identity != before.identity


def test_how_many_positions_there_are_is_no_part_of_it(tmp_path: Path) -> None:
    """A stream may move to an engine with more or fewer."""
    model, other = tiny_checkpoint(tmp_path / "one", "qwen3"), tmp_path / "other"
    shutil.copytree(model, other)
    changed("config.json", max_position_embeddings=512)(other)
    one, two = info_of(model), info_of(other)
    assert (one.max_model_len, two.max_model_len) == (256, 256), "what the pages hold"
    assert load_config(find_model(str(other))).max_positions == 512
    assert one.identity == two.identity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 3, 8, 21, 200])
def test_every_number_counts_wherever_a_tensor_lies(dtype: torch.dtype, length: int) -> None:
    whole = torch.randn(length + 3).to(dtype)
    for start in range(3):
        tensor = whole[start : start + length]
        before = _sums_of_bits(tensor)
        assert torch.equal(_sums_of_bits(tensor.clone()), before)
        for place in range(length):
            other = tensor.clone()
            other[place] += 1
            assert not torch.equal(_sums_of_bits(other), before)


@pytest.mark.parametrize("width", [64, 96, 576])
def test_rows_that_have_changed_places_are_other_weights(width: int) -> None:
    rows = torch.randn(40, width).to(torch.bfloat16)
    swapped = rows.clone()
    swapped[[7, 23]] = rows[[23, 7]]
    assert not torch.equal(_sums_of_bits(swapped), _sums_of_bits(rows))
