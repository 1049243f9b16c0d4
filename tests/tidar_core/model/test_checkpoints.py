"""Checkpoints as others write them, through the whole engine: what transformers says of a text is what it says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tidar_core.model.loaded import said_as_transformers_says
from tests.tiny import edit_json, tiny_checkpoint
from tidar_core.config import Architecture, ConfigError
from tidar_core.kernels.ops import layer_windows
from tidar_core.model.configuration import load_config
from tidar_core.model.sources import find_model

Rewrite = Callable[[dict[str, Tensor]], dict[str, Tensor]]

LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_SCALING = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def under(change: Callable[[str], str]) -> Rewrite:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


CHECKPOINTS: dict[str, tuple[Architecture, bool, dict[str, Any], Rewrite | None]] = {
    "as Meta writes Llama 3": ("llama", True, {"rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5}, None),
    "yarn as it was written": ("llama", True, {"rope_scaling": YARN_SCALING, "rope_theta": 1e4}, None),
    "biases that qwen2 has not": ("qwen2", True, {"attention_bias": True, "mlp_bias": True}, None),
    "biases that qwen3 has not": ("qwen3", True, {"mlp_bias": True}, None),
    "windows that llama has not": (
        "llama", True, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, None,
    ),
    "the other name of silu": ("llama", True, {"hidden_act": "swish"}, None),
    "tied, and yet a head of its own": ("llama", False, {"tie_word_embeddings": True}, None),
    "tied, by the head's name alone": (
        "qwen3", True, {}, under(lambda name: "lm_head.weight" if name == "model.embed_tokens.weight" else name),
    ),
    "the bare model": ("qwen3", True, {}, under(lambda name: name.removeprefix("model."))),
    "in 64 bits": ("qwen2", True, {}, lambda tensors: {name: tensor.double() for name, tensor in tensors.items()}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    architecture, tied, changes, rewrite = CHECKPOINTS[name]
    path = tiny_checkpoint(tmp_path / "model", architecture, tied=tied)
    stated = json.loads((path / "config.json").read_text())
    if "rope_scaling" in changes:
        del stated["rope_parameters"]
    (path / "config.json").write_text(json.dumps(stated | changes))
    if rewrite is not None:
        save_file(rewrite(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    said_as_transformers_says(path, path)


def test_a_vocabulary_that_cannot_be_sampled_from_is_told_at_once(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stated | {"vocab_size": 600_000}))
    with pytest.raises(ConfigError, match="600000 tokens are more than"):
        load_config(find_model(str(path)))


def test_a_window_is_that_of_the_layers_that_have_one(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int, ...]:
        edit_json(path / "config.json", **changes)
        config = load_config(find_model(str(path)))
        assert config.max_positions == 1024
        return layer_windows(config)

    path = tiny_checkpoint(tmp_path, "qwen2")
    assert windows(use_sliding_window=True, sliding_window=64, max_window_layers=1, layer_types=None) == (0, 64)
    assert windows(use_sliding_window=False) == ()
    path = tiny_checkpoint(tmp_path / "mistral", "mistral")
    for stated, window in ((None, ()), (100, (100, 100)), (1024, ()), (4096, ())):
        assert windows(sliding_window=stated) == window
    edit_json(path / "config.json", sliding_window=0)
    with pytest.raises(ConfigError, match="its sliding_window is 0, not a number of positions"):
        load_config(find_model(str(path)))


@pytest.mark.parametrize(("architecture", "window"), [("mistral", 24), ("mistral", 1), ("phi3", 40), ("qwen2", 17)])
def test_beyond_its_window_a_model_says_what_transformers_says(
    tmp_path: Path, architecture: Architecture, window: int
) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture)
    edit_json(
        path / "config.json", sliding_window=window, use_sliding_window=True, max_window_layers=1, layer_types=None
    )
    said_as_transformers_says(path, path, length=90)
