"""What a model's makers state of its sampling: read where it is there and of use, one line where it is of none."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tidar_core.model.test_gguf import write_gguf
from tests.tiny import edit_json, tiny_checkpoint
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.model.sampling_defaults import read_sampling_defaults
from tidar_core.model.sources import ModelSource
from tidar_core.request import Sampling

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def read(source: ModelSource) -> tuple[Sampling, list[str]]:
    told: list[str] = []
    return read_sampling_defaults(source, told.append), told


def stating(directory: Path, content: str) -> ModelSource:
    (directory / "generation_config.json").write_text(content)
    return ModelSource("model", directory)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (QWEN, Sampling(0.7, 20, 0.8, 0.0, 1.05)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "min_p": 0.1}, Sampling(0.6, 0, 0.9, 0.1)),
        ({"temperature": None, "top_k": None, "top_p": 0.9}, Sampling(top_p=0.9)),
        ({"temperature": 0, "top_k": 50}, Sampling(0, 50)),
        ({"top_k": 0}, Sampling()),
        ({"top_k": -1, "top_p": 1}, Sampling()),
        ({"do_sample": True, "eos_token_id": 2}, Sampling()),
        ({"do_sample": False}, Sampling()),
        ({"do_sample": False, "temperature": 0.6}, Sampling(0.6)),
        ({}, Sampling()),
    ],
)
def test_what_is_stated_is_read_and_nothing_else(stated: dict[str, Any], expected: Sampling, tmp_path: Path) -> None:
    assert read(stating(tmp_path, json.dumps(stated))) == (expected, [])


def test_a_model_without_the_file_states_nothing(tmp_path: Path) -> None:
    assert read(ModelSource("model", tmp_path)) == (Sampling(), [])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "-0.5", "states temperature -0.5, which is not used: temperature must lie between 0 and 100"),
        ("temperature", "NaN", "temperature nan, which is not used: temperature must lie"),
        ("temperature", "1" + "0" * 400, "temperature must lie between"),
        ("temperature", '"hot"', "states temperature 'hot', which is not used: temperature must be a number"),
        ("temperature", "true", "temperature True, which is not used: temperature must be a number"),
        ("top_p", "0", "top_p must be above 0"),
        ("top_k", "-2", "top_k must be 0 (off) or more"),
        ("top_k", "20.5", "top_k must be a whole number"),
        ("min_p", "[" + "0, " * 5000 + "0]", "min_p must be a number"),
        ("repetition_penalty", "0", "repetition_penalty must lie between 0.01 and 100"),
    ],
)
def test_what_no_request_could_ask_for_is_one_line_and_the_rest_holds(
    name: str, value: str, said: str, tmp_path: Path
) -> None:
    beside = "top_k" if name == "min_p" else "min_p"
    found, told = read(stating(tmp_path, f'{{"{name}": {value}, "{beside}": 1}}'))
    assert found == Sampling(**{beside: 1})
    (line,) = told
    assert line.startswith("model: generation_config.json states ")
    assert said in line
    assert "\n" not in line
    assert len(line) < 200


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_that_is_no_json_object_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read(stating(tmp_path, content))


def test_a_gguf_header_states_the_same(tmp_path: Path) -> None:
    names = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
    stated = {f"general__sampling__{names.get(name, name)}": value for name, value in QWEN.items()}
    write_gguf(tmp_path / "model.gguf", **stated)
    source = ModelSource("model", tmp_path, "model.gguf")
    assert read(source) == (Sampling(0.7, 20, 0.8, 0.0, 1.05), [])
    write_gguf(tmp_path / "model.gguf", general__sampling__top_p=1.5, general__sampling__temp="hot")
    found, told = read(source)
    assert found == Sampling()
    assert [line.split(", which")[0] for line in told] == [
        "model: its header states temperature 'hot'",
        "model: its header states top_p 1.5",
    ]
    write_gguf(tmp_path / "model.gguf")
    assert read(source) == (Sampling(), [])


def test_an_engine_knows_what_is_to_be_used(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    edit_json(model / "generation_config.json", **QWEN, min_p=7)
    config = {"model": str(model), "adapter": "none", "dtype": "float32", "device": "cpu"}
    told: list[str] = []
    assert load_engine(EngineConfig(**config), told.append).info.sampling_defaults == Sampling(0.7, 20, 0.8, 0.0, 1.05)
    assert [line for line in told if "min_p 7" in line]
    left = load_engine(EngineConfig(**config, generation_config="none")).info
    assert left.sampling_defaults == Sampling()
