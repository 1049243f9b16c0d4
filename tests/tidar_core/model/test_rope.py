"""Rope scaling: the tables and the answers of transformers, from a directory and from a GGUF file."""

import random
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tests.tidar_core.ways import decode_ways
from tests.tiny import edit_json, tiny_adapter, tiny_checkpoint, tiny_gguf
from tidar_core.config import Architecture, ConfigError, EngineConfig, ModelConfig, RopeScaling
from tidar_core.engine import load_engine
from tidar_core.kernels.ops import rotary_tables
from tidar_core.model.configuration import load_config
from tidar_core.model.gguf import config_from_gguf, read_header
from tidar_core.model.rope import inverse_frequencies
from tidar_core.model.sources import find_model
from tidar_core.request import SamplingParams

CPU = torch.device("cpu")
THEIRS = {"llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}
ORIGINAL = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS = {
    "unscaled": {},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3, original length not stated": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    "linear": LINEAR,
    "linear, integer": {"rope_type": "linear", "factor": 3},
    "yarn": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale unused": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0},
    "yarn, betas": {**YARN, "beta_fast": 4, "beta_slow": 0.5},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, no factor": {**YARN, "factor": None},
    "yarn, original length not stated": {"rope_type": "yarn", "factor": 2.5},
}
PUBLISHED: dict[str, tuple[Architecture, int, dict[str, Any], int]] = {
    "Llama-3.1-8B": (
        "llama",
        131072,
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        131072,
    ),
    "Llama-3.2-1B": (
        "llama",
        131072,
        {**LLAMA3, "factor": 32.0, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        131072,
    ),
    "Qwen2.5-7B-Instruct": (
        "qwen2",
        32768,
        {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
        131072,
    ),
    "Qwen3-8B": (
        "qwen3",
        40960,
        {**YARN, "rope_theta": 1000000, "original_max_position_embeddings": 32768},
        131072,
    ),
    "vicuna-7b-v1.5-16k": ("llama", 4096, {**LINEAR, "rope_theta": 10000.0}, 16384),
}


def written(directory: Path, architecture: Architecture, **settings: Any) -> PreTrainedConfig:
    config = AutoConfig.for_model(architecture, **settings)
    config.save_pretrained(directory)
    return config


def loaded(path: Path) -> ModelConfig:
    return load_config(find_model(str(path)))


def assert_tables_are_transformers_own(ours: ModelConfig, architecture: str, theirs: PreTrainedConfig) -> None:
    """The frequencies bit for bit; cos and sin of all positions but for the vector width of the loop over them."""
    embedding = THEIRS[architecture](theirs)
    inverse, attention_factor = inverse_frequencies(ours)
    assert torch.equal(inverse, embedding.inv_freq)
    assert attention_factor == embedding.attention_scaling
    tables = rotary_tables(ours, CPU)
    both_halves = embedding(torch.zeros(1), torch.arange(ours.max_positions)[None])
    for table, expected in zip((tables.cos, tables.sin), both_halves, strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(torch.cat((table, table), dim=-1)[None], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tables_are_transformers_own(architecture: Architecture, scaling: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, **SCALINGS[scaling]}
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
    theirs = written(tmp_path, architecture, **shape, rope_parameters=rope)
    ours = loaded(tmp_path)
    assert (ours.rope_scaling is None) == (scaling in ("unscaled", "dynamic"))
    assert_tables_are_transformers_own(ours, architecture, theirs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_of_published_models(name: str, tmp_path: Path) -> None:
    architecture, stated, rope, positions = PUBLISHED[name]
    shape = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    if architecture == "qwen3":
        shape |= {"head_dim": 128}
    theirs = written(tmp_path, architecture, **shape, max_position_embeddings=stated, rope_parameters=rope)
    ours = loaded(tmp_path)
    assert ours.max_positions == positions
    assert_tables_are_transformers_own(ours, architecture, theirs)


def test_dynamic_scaling_is_served_as_far_as_it_changes_nothing(tmp_path: Path) -> None:
    """Behind that transformers gives the keys of all tokens other frequencies with each token more."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    written(tmp_path, "llama", hidden_size=96, num_attention_heads=6, max_position_embeddings=256, rope_parameters=rope)
    assert loaded(tmp_path).max_positions == 256


def test_older_spelling_of_scaling(tmp_path: Path) -> None:
    """rope_scaling beside rope_theta, its kind as "type", as checkpoints were written for years."""
    written(tmp_path, "llama", max_position_embeddings=256)
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=20000.0, rope_scaling={**YARN, "type": "yarn"})
    config = loaded(tmp_path)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, ORIGINAL, truncate=True)
    assert config.rope_theta == 20000.0
    assert hash(config) == hash(loaded(tmp_path))


# GGUF


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [LINEAR, YARN, {**YARN, "attention_factor": 1.25, "beta_fast": 4, "beta_slow": 0.5}])
def test_gguf_scaling_is_the_directorys(architecture: Architecture, rope: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", architecture, layers=1, max_positions=256, rope=rope)
    ours, original = loaded(tiny_gguf(tmp_path / "tiny.gguf", checkpoint)), loaded(checkpoint)
    assert replace(ours, norm_eps=original.norm_eps) == original
    assert original.rope_scaling is not None


def test_gguf_divisors_give_llama3_tables(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", layers=1, max_positions=512, rope=LLAMA3)
    path = tiny_gguf(tmp_path / "tiny.gguf", checkpoint)
    assert "rope_freqs.weight" in {tensor.name for tensor in GGUFReader(path).tensors}
    ours, original = loaded(path), loaded(checkpoint)
    assert ours.rope_scaling is not None
    assert ours.rope_scaling.rope_type == "divisors"
    assert 1.0 in ours.rope_scaling.divisors
    assert 8.0 in ours.rope_scaling.divisors
    assert any(1 < each < 8 for each in ours.rope_scaling.divisors)
    assert ours.max_positions == original.max_positions == 512
    # The file holds rounded quotients: the frequencies are right to fp32, the angles to that times the position.
    tables, expected = rotary_tables(ours, CPU), rotary_tables(original, CPU)
    torch.testing.assert_close(tables.cos, expected.cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(tables.sin, expected.sin, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def plain_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    checkpoint = tiny_checkpoint(directory / "model", layers=1, max_positions=ORIGINAL)
    return tiny_gguf(directory / "tiny.gguf", checkpoint)


def with_keys(path: Path, **keys: Any) -> ModelConfig:
    header = read_header(path)
    return config_from_gguf(
        replace(header, metadata={**header.metadata, **{f"llama.rope.{k}": v for k, v in keys.items()}})
    )


def test_gguf_keys_have_the_meaning_that_llama_cpp_gives_them(plain_gguf: Path) -> None:
    plain = with_keys(plain_gguf)
    assert plain.rope_scaling is None
    for keys in (
        {"scaling.type": "none", "scaling.factor": 4.0},
        {"scaling.type": "linear"},
        {"scaling.factor": 0.0},
        {"scale_linear": 1.0},
    ):
        assert with_keys(plain_gguf, **keys) == plain
    for keys in ({"scaling.factor": 4.0}, {"scale_linear": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}):
        assert with_keys(plain_gguf, **keys) == replace(
            plain, rope_scaling=RopeScaling("linear", 4.0), max_positions=4 * ORIGINAL
        )
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0}
    own = RopeScaling("yarn", 4.0, ORIGINAL, truncate=True)
    assert with_keys(plain_gguf, **yarn).rope_scaling == own
    assert with_keys(plain_gguf, **yarn, **{"scaling.original_context_length": 16}).rope_scaling == replace(
        own, original_max_position_embeddings=16
    )


def test_gguf_attn_factor_comes_on_top_of_yarns_own(plain_gguf: Path) -> None:
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0}
    own = rotary_tables(with_keys(plain_gguf, **yarn), CPU)
    assert own.cos[0, 0] == pytest.approx(0.1 * log(4) + 1)
    more = rotary_tables(with_keys(plain_gguf, **yarn, **{"scaling.attn_factor": 1.5}), CPU)
    torch.testing.assert_close(more.cos, 1.5 * own.cos)
    stated = rotary_tables(
        with_keys(plain_gguf, **yarn, **{"scaling.attn_factor": 1.5, "scaling.yarn_attn_factor": 2.0}), CPU
    )
    assert stated.cos[0, 0] == pytest.approx(3.0)


# The whole engine


def greedy(model: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
        eos_token_id=-1, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "rope", "file"),
    [
        ("llama", LLAMA3, "directory"),
        ("llama", LLAMA3, "gguf"),
        ("llama", LINEAR, "directory"),
        ("qwen2", YARN, "directory"),
        ("qwen2", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}, "directory"),
        ("qwen3", {**YARN, "attention_factor": 1.5}, "directory"),
    ],
)
def test_greedy_answers_beyond_the_original_length(
    architecture: Architecture, rope: dict[str, Any], file: str, tmp_path: Path
) -> None:
    stated = ORIGINAL if rope["rope_type"] != "llama3" else 4 * ORIGINAL
    path = tiny_checkpoint(tmp_path / "model", architecture, max_positions=stated, rope=rope)
    adapter = tiny_adapter(tmp_path / "adapter", path)
    served = path if file == "directory" else tiny_gguf(tmp_path / "tiny.gguf", path)
    engine = load_engine(EngineConfig(model=str(served), adapter=str(adapter), dtype="float32", device="cpu"))
    assert engine.info.exact
    assert engine.info.max_model_len == 4 * ORIGINAL

    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(3, 512) for _ in range(length)) for length in (ORIGINAL - 8, 150, 4 * ORIGINAL - 24)
    ]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ways = decode_ways(engine, prompts, lambda mode: replace(params, drafts=mode), len(prompts))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = [greedy(model, prompt, 24) for prompt in prompts]
    for way, answers in ways.items():
        assert list(answers) == expected, way

    edit_json(path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    unscaled = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert [greedy(unscaled, prompt, 24) for prompt in prompts] != expected  # else the test would show nothing


# What is refused


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7, "factor": 4.0},
            "rope scaling 'longrope' needs 8 numbers as long_factor",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0], "long_factor": [2.0] * 8, "factor": 4.0},
            "rope scaling 'longrope' needs a list of positive numbers as short_factor",
        ),
        ({"rope_type": "proportional"}, "'proportional' is not supported, only linear, llama3, yarn, longrope, dyn"),
        ({"rope_type": "linear"}, "config.json is not valid .*factor"),
        ({"rope_type": "linear", "factor": 0}, "'linear' needs a positive number as factor, not 0"),
        ({"rope_type": "linear", "factor": None}, "'linear' needs a positive number as factor, not None"),
        ({"rope_type": "linear", "factor": True}, "needs a positive number as factor, not True"),
        ({**YARN, "factor": -4.0}, "'yarn' needs a positive number as factor, not -4.0"),
        ({**YARN, "beta_fast": -1}, "needs a positive number as beta_fast, not -1"),
        ({**YARN, "attention_factor": "1.0"}, "needs a positive number as attention_factor, not '1.0'"),
        ({**YARN, "attention_factor": 0.0}, "needs a positive number as attention_factor, not 0.0"),
        ({**LLAMA3, "low_freq_factor": 0.0}, "needs a positive number as low_freq_factor"),
        ({**LINEAR, "partial_rotary_factor": 0.5}, "its rope_parameters are not supported"),
        ({**YARN, "rope_theta": None}, "its rope_parameters are not supported"),
    ],
)
def test_scaling_that_is_refused(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "max_position_embeddings": 256}
    written(tmp_path, "llama", **shape)
    edit_json(tmp_path / "config.json", rope_parameters={"rope_theta": 10000.0, **rope})
    with pytest.raises(ConfigError, match=message) as error:
        loaded(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scaling.type": "longrope", "scaling.factor": 4.0}, "rope scaling 'longrope' is not supported"),
        ({"scaling.type": "linear", "scaling.factor": -1.0}, "needs a positive number as factor, not -1.0"),
        ({"scaling.type": "linear", "scaling.factor": "4"}, "rope.scaling.factor is missing or not one number"),
        ({"scaling.type": (1.0, 2.0)}, r"rope scaling \(1.0, 2.0\) is not supported"),
        ({"scaling.factor": 4.0, "scaling.attn_factor": 1.5}, "rope scaling 'linear' with attn_factor 1.5"),
        ({"scaling.type": "yarn", "scaling.attn_factor": 0.0}, "rope scaling 'yarn' with attn_factor 0.0"),
        ({"scaling.type": "yarn", "scaling.yarn_ext_factor": 0.5}, "rope scaling 'yarn' with yarn_ext_factor"),
        ({"scaling.type": "yarn", "scaling.yarn_log_multiplier": 0.1}, "rope scaling 'yarn' with yarn_log_multiplier"),
        ({"scaling.type": "yarn", "scaling.yarn_beta_fast": "x"}, "needs a positive number as beta_fast, not 'x'"),
        ({"scaling.type": "yarn", "scaling.original_context_length": 0}, "original_max_position_embeddings, not 0"),
    ],
)
def test_gguf_scaling_that_is_refused(plain_gguf: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_keys(plain_gguf, **keys)
    assert "\n" not in str(error.value)


def test_gguf_tensors_of_scaling_that_are_refused(plain_gguf: Path) -> None:
    header = read_header(plain_gguf)
    eight = replace(header.tensors["output_norm.weight"], shape=(8,))
    for tensors, metadata, message in (
        ({"rope_factors_short.weight": eight}, {}, "rope scaling 'longrope' is not supported"),
        ({"rope_freqs.weight": replace(eight, shape=(7,))}, {}, "rope_freqs.weight is not 8 positive numbers"),
        ({"rope_freqs.weight": replace(eight, start=10**9)}, {}, "rope_freqs.weight runs past the end of the file"),
        ({"rope_freqs.weight": replace(eight, type_number=999)}, {}, "rope_freqs.weight has the unknown type 999"),
        (
            {"rope_freqs.weight": eight},
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            "rope scaling 'yarn' together with rope_freqs.weight",
        ),
    ):
        changed = replace(header, tensors={**header.tensors, **tensors}, metadata={**header.metadata, **metadata})
        with pytest.raises(ConfigError, match=message):
            config_from_gguf(changed)
