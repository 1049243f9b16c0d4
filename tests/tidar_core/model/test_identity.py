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
from tidar_core.model.fingerprint import _sum_of_bits


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
        other_words,
    ],
    ids=["rotary frequencies", "norms", "end of an answer", "one weight", "tokens"],
)
def test_whatever_decides_a_token_is_part_of_it(tmp_path: Path, change: Callable[[Path], None]) -> None:
    model, other = tiny_checkpoint(tmp_path / "one", "qwen3"), tmp_path / "other"
    shutil.copytree(model, other)
    before = info_of(model)
    assert info_of(other).identity == before.identity
    change(other)
    assert info_of(other).identity != before.identity


def test_the_room_that_an_engine_has_is_no_part_of_it(tmp_path: Path) -> None:
    """A stream may move to an engine with more or fewer positions."""
    model = tiny_checkpoint(tmp_path / "one", "qwen3")
    assert info_of(model, max_model_len=64).identity == info_of(model, page_size=32).identity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 3, 8, 21])
def test_every_number_counts_wherever_a_tensor_lies(dtype: torch.dtype, length: int) -> None:
    whole = torch.randn(length + 3).to(dtype)
    for start in range(3):
        tensor = whole[start : start + length]
        before = _sum_of_bits(tensor)
        assert _sum_of_bits(tensor.clone()) == before
        for place in range(length):
            other = tensor.clone()
            other[place] += 1
            assert _sum_of_bits(other) != before
