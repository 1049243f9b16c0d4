"""Families of models that are Llama but for something: what each token is told to be worth is transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tidar_core.model.loaded import said_as_transformers_says
from tests.tiny import edit_json, tiny_checkpoint
from tidar_core.config import Architecture, ConfigError, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.kernels.ops import rotary_tables
from tidar_core.model.configuration import load_config
from tidar_core.model.rope import paired_as_stored
from tidar_core.model.sources import find_model

ORIGINAL, STRETCHED = 64, 512
LONGROPE = {
    "rope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * each for each in range(8)],
        "long_factor": [2.0 + each for each in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "stated": {"original_max_position_embeddings": ORIGINAL},
    "max_positions": STRETCHED,
}
STRAY: dict[str, Any] = {"stated": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}}
GRANITE = {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 5.0}
CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "granite": ("granite", {"tied": False}),
    "granite, head and embedding one matrix": ("granite", {"bias": True, "stated": GRANITE}),
    "smollm3": ("smollm3", {"layers": 4, "bias": True}),
    "smollm3, every fourth layer": ("smollm3", {"layers": 4, "stated": {"no_rope_layers": None}}),
    "smollm3, yarn": (
        "smollm3",
        {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    "seed_oss": ("seed_oss", {"tied": False, "bias": True, "head_dim": 32}),
    "glm": ("glm", {"tied": False, "bias": True, "head_dim": 32}),
    "glm4": ("glm4", {"tied": False, "bias": True, "head_dim": 32}),
    "olmo2": ("olmo2", {"tied": False, "bias": True}),
    "olmo2, as many keys as queries": ("olmo2", {"heads": 4, "kv_heads": 4}),
    "exaone4": ("exaone4", {}),
    "exaone4, hybrid": (
        "exaone4",
        {"layers": 4, "stated": {"sliding_window": 50, "sliding_window_pattern": 4, "layer_types": None}},
    ),
    "olmo3": ("olmo3", {"tied": False, "layers": 4, "stated": {"layer_types": None, "sliding_window": 7}}),
    "olmo3, yarn where all is seen": (
        "olmo3",
        {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    "cwm": ("cwm", {"tied": False, "head_dim": 32}),
    "ministral": ("ministral", {"layers": 3, "stated": {"layer_types": None}}),
    "ministral3": (
        "ministral3",
        {
            "tied": False,
            "head_dim": 32,
            "rope": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma3_text": ("gemma3_text", {"layers": 7, "head_dim": 32, "stated": {"layer_types": None}}),
    "gemma3_text, scores and positions scaled": (
        "gemma3_text",
        {
            "tied": False,
            "bias": True,
            "rope": {"rope_type": "linear", "factor": 8.0},
            "stated": {"query_pre_attn_scalar": 50},
        },
    ),
    "ernie4_5": ("ernie4_5", {"bias": True}),
    "helium": ("helium", {"tied": False, "bias": True}),
    "phi3, a part of each head": (
        "phi3",
        {"heads": 3, "kv_heads": 1, "head_dim": 32, "rope": {"partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": ("phi3", LONGROPE),
    "phi3, longrope of a part of each head": (
        "phi3",
        {
            **LONGROPE,
            "heads": 3,
            "kv_heads": 1,
            "head_dim": 32,
            "rope": {
                **LONGROPE["rope"],
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * each for each in range(12)],
                "long_factor": [2.0 + each for each in range(12)],
            },
        },
    ),
    "glm4, yarn": (
        "glm4",
        {
            "head_dim": 32,
            "rope": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    **{f"{name}, windows that it has not": (name, STRAY) for name in ("seed_oss", "granite", "olmo2", "ministral3")},
    "phi3, windows in all layers": ("phi3", STRAY),
    "mistral, windows in some layers": ("mistral", STRAY),
    "llama, longrope": ("llama", LONGROPE),
    "qwen3_moe": ("qwen3_moe", {"tied": False}),
    "qwen3_moe, some layers with one MLP": ("qwen3_moe", {"layers": 4, "stated": {"mlp_only_layers": [0]}}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"layers": 4, "bias": True, "stated": {"decoder_sparse_step": 2}}),
    "qwen2_moe": ("qwen2_moe", {"tied": False}),
    "granitemoe": ("granitemoe", {"bias": True}),
    "mixtral": ("mixtral", {"tied": False, "stated": {"sliding_window": 17}}),
    "olmoe": ("olmoe", {"tied": False, "bias": True}),
    "glm4_moe": (
        "glm4_moe",
        {"tied": False, "bias": True, "layers": 3, "head_dim": 32, "stated": {"use_qk_norm": True}},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {"layers": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_worth_what_transformers_says(tmp_path: Path, name: str) -> None:
    architecture, sizes = CASES[name]
    path = tiny_checkpoint(tmp_path, architecture, **sizes)
    said_as_transformers_says(path, path)


def test_longer_texts_than_a_model_was_first_trained_on_have_frequencies_of_their_own(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "phi3", **LONGROPE)
    told: list[str] = []
    short = load_engine(EngineConfig(str(path), "none", "float32", "cpu"), told.append)
    assert short.info.max_model_len == ORIGINAL
    assert any(f"limited to {ORIGINAL} positions" in line and f"up to {STRETCHED}" in line for line in told)
    long = said_as_transformers_says(path, path, length=ORIGINAL + 30, max_model_len=STRETCHED)
    assert long.info.max_model_len == STRETCHED
    assert long.info.arithmetic != short.info.arithmetic  # no answer goes on from one to the other
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        said_as_transformers_says(path, path, max_model_len=STRETCHED)  # transformers takes the short ones there


def test_the_stated_length_bounds_what_a_model_stretches_to_and_a_window_does_not(tmp_path: Path) -> None:
    def lengths(**changes: Any) -> tuple[int, int | None]:
        edit_json(path / "config.json", **changes)
        config = load_config(find_model(str(path)))
        return config.max_positions, config.stretches_to

    path = tiny_checkpoint(tmp_path, "phi3", **LONGROPE)
    assert lengths() == (ORIGINAL, STRETCHED)
    assert lengths(sliding_window=50) == (ORIGINAL, STRETCHED)
    assert lengths(sliding_window=1000, max_position_embeddings=ORIGINAL) == (ORIGINAL, None)


def test_gemma_3_states_the_positions_that_it_has_scaled(tmp_path: Path) -> None:
    """Unlike others whose scaling is linear."""
    rope = {"rope_type": "linear", "factor": 8.0}
    for architecture, positions in (("gemma3_text", 1024), ("llama", 8192)):
        path = tiny_checkpoint(tmp_path / architecture, architecture, rope=rope, max_positions=1024)
        assert load_config(find_model(str(path))).max_positions == positions


def test_a_model_that_scales_far_queries_has_the_positions_before(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    path = tiny_checkpoint(tmp_path, "ministral3", rope={**yarn, "llama_4_scaling_beta": 0.1})
    assert load_config(find_model(str(path))).max_positions == 128


def test_rows_change_places_only_where_pairs_lie_otherwise(tmp_path: Path) -> None:
    def order(name: Architecture, **sizes: Any) -> list[int] | None:
        config = load_config(find_model(str(tiny_checkpoint(tmp_path / name, name, **sizes))))
        places = paired_as_stored(config)
        return None if places is None else places.tolist()

    assert order("llama") is None
    assert order("ernie4_5") == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert order("glm") == [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    assert order("phi3", rope={"partial_rotary_factor": 0.5}) == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]


def test_a_layer_without_positions_turns_nothing(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "smollm3", layers=3, stated={"no_rope_layers": [1, 0, 1]})
    tables = rotary_tables(load_config(find_model(str(path))), torch.device("cpu"))
    assert (tables.of(1).cos == 1).all()
    assert (tables.of(1).sin == 0).all()
    assert tables.of(0) is tables.of(2) is tables
    here = torch.tensor([7, 7, 1000])
    assert torch.equal(tables.at(here).of(0).sin, tables.sin[here])
    assert (tables.at(here).of(1).sin == 0).all()


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("granite", {"residual_multiplier": 0}, "its residual_multiplier is 0, not a positive number"),
        ("granite", {"attention_multiplier": "x"}, "is not valid"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}, "short_factor"),
        ("phi3", {"partial_rotary_factor": 0.2}, "an even head size, not 3"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, architecture: Architecture, changes: dict[str, Any], message: str
) -> None:
    path = tiny_checkpoint(tmp_path, architecture)
    if "partial_rotary_factor" in changes:
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **changes}}
    edit_json(path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(find_model(str(path)))
    assert "\n" not in str(refused.value)
