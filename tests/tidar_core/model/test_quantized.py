"""Quantized checkpoints: the numbers that they stand for, whatever the format, and one line for what is not read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tidar_core.model.loaded import VARIANTS, assert_same_weights, load, said_as_transformers_says
from tests.tidar_core.model.quantizers import FORMATS, pack_gptq, pack_mlx, quantize, stated, words
from tests.tiny import edit_json, tiny_checkpoint
from tidar_core.config import Architecture, ConfigError
from tidar_core.model import quantized as quantized_module
from tidar_core.model.configuration import load_config
from tidar_core.model.dense import dense_model
from tidar_core.model.fingerprint import fingerprint
from tidar_core.model.quantization import Quantization, read_quantization
from tidar_core.model.quantized import StoredLinear, unpacked
from tidar_core.model.quantized_layouts import quantized_matrix
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

ONE_OF_EACH: tuple[tuple[str, Architecture], ...] = (
    ("fp8, blocks", "qwen3"),
    ("compressed-tensors, fp8 rows", "llama"),
    ("compressed-tensors, 4 bits and zero points", "qwen2"),
    ("gptq, shuffled", "qwen2"),
    ("awq", "llama"),
    ("bitsandbytes, nf4", "llama"),
    ("modelopt, nvfp4", "qwen3"),
    ("mlx", "qwen3"),
    ("fp8, blocks", "qwen3_moe"),
    ("gptq", "qwen2_moe"),
    ("bitsandbytes, nf4", "mixtral"),
)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the head's name for a tied embedding, as transformers has it."""
    return {"lm_head.weight": state["model.embed_tokens.weight"]} | state


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_module, "_CHUNK_WEIGHTS", 700)  # several chunks a tensor, the last one shorter


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_that_it_stands_for(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama")
    expected = whole(quantize(path, FORMATS[name]))
    full, half = load(path)[1], load(path, torch.bfloat16)[1]
    assert_same_weights(full, expected)
    assert_same_weights(half, expected, torch.bfloat16)
    assert fingerprint(full) == fingerprint(half)


@pytest.mark.parametrize(("architecture", "options"), VARIANTS)
@pytest.mark.parametrize("name", ["fp8, blocks", "gptq", "bitsandbytes, nf4", "mlx"])
def test_every_architecture_is_read(name: str, architecture: Any, options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture, **options)
    expected = whole(quantize(path, FORMATS[name]))
    assert_same_weights(load(path)[1], expected)


@pytest.mark.parametrize(("name", "architecture"), ONE_OF_EACH)
def test_it_says_what_transformers_says_of_the_plain_weights(
    name: str, architecture: Architecture, tmp_path: Path
) -> None:
    path, plain = (tiny_checkpoint(tmp_path / each, architecture) for each in ("model", "plain"))
    save_file(quantize(path, FORMATS[name]), plain / "model.safetensors", {"format": "pt"})
    engine = said_as_transformers_says(path, plain)
    assert engine.info.fingerprint == fingerprint(load(plain)[1])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["fp8, blocks", "gptq", "bitsandbytes, nf4", "mlx"])
def test_transformers_own_model_has_plain_weights_and_can_be_saved(name: str, tied: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen3", tied=tied)
    expected = whole(quantize(path, FORMATS[name]))
    model = dense_model(find_model(str(path)), torch.float32, attn_implementation="sdpa")
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[each], expected[each]) for each in expected)
    model.save_pretrained(tmp_path / "saved")
    load_tokenizer(find_model(str(path))).save_pretrained(tmp_path / "saved")
    config, weights = load(tmp_path / "saved")
    assert_same_weights(weights, expected)
    assert config == load_config(find_model(str(path)))
    assert config.eos_ids == (2, 0)


# What checkpoints differ in


def test_shards_and_the_bare_model(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = whole(quantize(path, FORMATS["gptq, shuffled"]))
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    shards = [sorted(stored)[0::2], sorted(stored)[1::2]]  # a layer's tensors in both
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, names in zip(files, shards, strict=True):
        save_file({name: stored[name] for name in names}, path / file, {"format": "pt"})
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same_weights(load(path)[1], expected)


def test_single_modules_of_mlx_have_their_own_bits(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "qwen2", tied=False)
    expected = quantize(path, FORMATS["mlx"])
    rng = np.random.default_rng(1)
    layer = "model.layers.0.self_attn.o_proj"
    parts, matrix = pack_mlx(rng, 96, 96, bits=8, group=16)
    stored = load_file(path / "model.safetensors") | {f"{layer}.{part}": each for part, each in parts.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    own = {"group_size": 32, "bits": 4, layer: {"group_size": 16, "bits": 8}, "lm_head": True, "model.norm": False}
    edit_json(path / "config.json", quantization=own, quantization_config=own)
    assert_same_weights(load(path)[1], expected | {f"{layer}.weight": torch.from_numpy(matrix).float()})


def test_single_modules_of_auto_round_have_their_own_bits(tmp_path: Path) -> None:
    """As it writes them: by name, and by patterns over many; some are left as they were, the head may be packed."""
    path = tiny_checkpoint(tmp_path / "model", "qwen2", tied=False)
    expected = quantize(path, FORMATS["auto-round"])
    rng = np.random.default_rng(1)
    stored = load_file(path / "model.safetensors")
    own = {"model.layers.0.self_attn.o_proj": (8, 48, 96, 96), "lm_head": (6, 96, 512, 96)}
    for layer, (bits, group, rows, columns) in own.items():
        parts, matrix = pack_gptq(rng, rows, columns, bits=bits, group=group, order="")
        for part in [name for name in stored if name.startswith(f"{layer}.")]:
            del stored[part]
        stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
        expected[f"{layer}.weight"] = torch.from_numpy(np.ascontiguousarray(matrix)).float()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    extra = {
        r".*self_attn\.o_proj.*": {"bits": 8, "group_size": 48},
        "lm_head": {"bits": 6, "group_size": -1, "sym": True, "data_type": "int", "act_bits": 16},
        "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"},
    }
    kept = FORMATS["auto-round"].config["quantization_config"]
    edit_json(path / "config.json", quantization_config={**kept, "extra_config": extra})
    assert_same_weights(load(path)[1], expected)


@pytest.mark.usefixtures("chunked")
def test_rows_of_bitsandbytes_may_begin_anywhere_in_a_byte(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", intermediate=161)
    expected = whole(quantize(path, FORMATS["bitsandbytes, nf4"]))
    assert_same_weights(load(path)[1], expected)


def test_a_plain_checkpoint_may_say_that_it_was_quantized_once(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = whole(load_file(path / "model.safetensors"))
    for config in (stated("BitsAndBytes", load_in_4bit=True), {"quantization_config": {}}):
        edit_json(path / "config.json", **config)
        assert_same_weights(load(path)[1], expected)


def test_zero_points_below_the_first_of_gptq_come_round(tmp_path: Path) -> None:
    """A zero point of 0 is stored as -1, which is 15 in four bits."""
    path = tiny_checkpoint(tmp_path / "model")
    expected = whole(quantize(path, FORMATS["gptq, v2"]))
    layer = "model.layers.0.mlp.up_proj"
    stored = load_file(path / "model.safetensors")
    kept, scale = stored[f"{layer}.qzeros"], stored[f"{layer}.scales"].float()
    stored[f"{layer}.qzeros"] = torch.full_like(kept, -1)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", **stated("gptq", bits=4, group_size=32))
    found = load(path)[1].layers[0].gate_up[160:]
    zeros = torch.stack([kept >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1)
    difference = (zeros * scale).repeat_interleave(32, 0).T
    assert torch.equal(found, expected[f"{layer}.weight"] + difference)


def test_an_order_of_columns_that_is_left_open(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = whole(quantize(path, FORMATS["compressed-tensors, 4 bits"]))
    stored = load_file(path / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    save_file(
        stored | {f"{layer}.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)},
        path / "model.safetensors",
        {"format": "pt"},
    )
    assert_same_weights(load(path)[1], expected)


@pytest.fixture(scope="module")
def quantizations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Quantization | None]:
    found = {}
    for name, form in FORMATS.items():
        directory = tmp_path_factory.mktemp("stated")
        for file, content in ({"config.json": form.config} | form.beside).items():
            (directory / file).write_text(json.dumps(content))
        found[name] = read_quantization(directory)
    return found


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    shape=st.tuples(st.integers(1, 6).map(lambda n: 32 * n), st.integers(1, 6).map(lambda n: 32 * n)),
    ends=st.tuples(st.integers(0, 192), st.integers(0, 192)),
    seed=st.integers(0, 9),
)
def test_any_rows_of_a_matrix_of_any_size(
    name: str, shape: tuple[int, int], ends: tuple[int, int], seed: int, quantizations: dict[str, Quantization]
) -> None:
    stored, expected = FORMATS[name].pack(np.random.default_rng(seed), *shape)
    matrix = quantized_matrix(StoredLinear("here", stored.get), quantizations[name])
    assert matrix is not None
    assert matrix.shape == shape
    start, stop = sorted(min(end, shape[0]) for end in ends)
    if start < stop:
        assert np.array_equal(matrix.rows(start, stop).double().numpy(), expected[start:stop])


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(1, 80), seed=st.integers(0, 99))
def test_numbers_of_any_bits_come_out_of_words(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, (3, count))
    assert np.array_equal(unpacked(words(numbers, bits), bits, count).numpy(), numbers)


# One line for what cannot be read


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (stated("hqq"), "not read, hqq: give the original checkpoint or a GGUF file of it"),
        (stated("torchao"), "torchao"),
        ({"quantization_config": {"bits": 4}}, "of no name"),
        (stated("gptq", bits=4, checkpoint_format="marlin"), "gptq's marlin"),
        (stated("gptq", bits=4, is_marlin_format=True), "gptq's marlin"),
        (stated("awq", bits=4, version="gemv"), "awq's gemv with 4 bits"),
        (stated("auto-round", bits=4, data_type="mx_fp"), "auto-round's auto_round:auto_gptq of mx_fp with 4 bits"),
        (
            stated("auto-round", bits=8, data_type="fp", packing_format="auto_round:fp8_static", act_bits=8),
            "not read, auto-round's auto_round:fp8_static of fp: give",
        ),
        (
            stated("auto-round", bits=5, packing_format="auto_round:auto_awq"),
            "auto-round's auto_round:auto_awq of int with 5 bits",
        ),
        (
            stated("auto-round", bits=4, extra_config={"lm_head": {"bits": 8, "data_type": "mx_fp"}}),
            "of mx_fp with 8 bits",
        ),
        (stated("auto-round", bits=4, packing_format="auto_round:fake"), "auto-round's auto_round:fake of int: give"),
        (stated("auto-round", bits=4, act_bits=8), "of int with 4 bits, activations with 8"),
        (stated("auto-round", bits=4, rotation_config={"block_size": 32}), "auto-round with rotations"),
        (stated("auto-round", group_size=32), "no valid one of auto-round"),
        (stated("compressed-tensors", format="marlin-24"), "compressed-tensors' marlin-24"),
        (
            stated("compressed-tensors", config_groups={"a": {"format": "mxfp4-pack-quantized"}}),
            "compressed-tensors' mxfp4-pack-quantized",
        ),
        (
            stated("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}),
            "compressed-tensors' sparse-24-bitmask",
        ),
        (stated("compressed-tensors", transform_config={"config_groups": {"a": {}}}), "transform_config"),
        (stated("modelopt", quant_algo="W4A8_AWQ"), "modelopt's W4A8_AWQ"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mlx's mxfp4"),
        (stated("fp8", weight_block_size=[0, 128]), "no valid one of fp8"),
        (stated("fp8", weight_block_size=128), "no valid one of fp8"),
        (stated("gptq", group_size="many"), "no valid one of gptq"),
        (stated("compressed-tensors", config_groups=[1]), "no valid one of compressed-tensors"),
    ],
)
def test_a_method_that_is_not_read_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    edit_json(path / "config.json", **config)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(find_model(str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_that_is_missing_or_misshapen_is_one_line(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", layers=1)
    quantize(path, FORMATS[name])
    stored, layer = load_file(path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    any_bytes = ("weight",) if f"{layer}.weight.absmax" in stored else ()
    harmless = {  # without an optional tensor it stands for other numbers
        "missing": ("weight_zero_point", "g_idx", "weight_g_idx"),
        "deep": any_bytes,
        "other": ("weight_zero_point", *any_bytes),
    }
    for part in [each.removeprefix(f"{layer}.") for each in stored if each.startswith(layer)]:
        tensor = stored[f"{layer}.{part}"]
        damaged = {
            "missing": None,
            "short": tensor.reshape(-1)[:-1],
            "long": torch.cat((tensor.reshape(-1).view(torch.uint8), torch.zeros(8, dtype=torch.uint8))),
            "deep": tensor[None, None, None],
            "empty": tensor.reshape(-1)[:0],
            "other": torch.zeros(tensor.shape, dtype=torch.int16),
        }
        for how, content in damaged.items():
            if part in harmless.get(how, ()) or part == "weight_format":
                continue
            changed = {key: each for key, each in stored.items() if key != f"{layer}.{part}"}
            if content is not None:
                changed[f"{layer}.{part}"] = content.contiguous()
            save_file(changed, path / "model.safetensors", {"format": "pt"})
            with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj") as error:
                load(path)
            assert "\n" not in str(error.value), (part, how)


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    quantize(path, FORMATS["fp8, blocks"])
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.0.self_attn.k_proj.weight_scale_inv"]
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.k_proj lacks its weight_scale"):
        load(path)


def test_blocks_of_another_size_than_stated_are_told(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    quantize(path, FORMATS["fp8, blocks"])
    edit_json(path / "config.json", **stated("fp8", weight_block_size=[32, 32]))
    with pytest.raises(
        ConfigError, match=r"weight_scale_inv is \[2, 1\], which fits no block of a matrix of \[96, 96\]"
    ):
        load(path)


def test_blocks_of_two_sizes_that_both_fit_are_told(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    quantize(path, FORMATS["auto-round"])
    stated_twice = stated("auto-round", bits=4, group_size=32, extra_config={"lm_head": {"group_size": 40}})
    edit_json(path / "config.json", **stated_twice)
    with pytest.raises(ConfigError, match=r"scales is \[96, 3\], which fits blocks of 1x32 and 1x40 in a matrix"):
        load(path)


def test_a_group_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    quantize(path, FORMATS["gptq"])
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.g_idx"][5] = 3
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="g_idx names group 3 of 3"):
        load(path)


def test_a_quantized_tensor_in_a_checkpoint_that_says_nothing_of_it(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    quantize(path, FORMATS["fp8, blocks"])
    edit_json(path / "config.json", quantization_config=None)
    with pytest.raises(ConfigError, match="is stored as F8_E4M3: only F64"):
        load(path)
