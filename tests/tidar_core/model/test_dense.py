"""transformers' own model of a checkpoint: it is the one that the engine serves, or one line says why there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.tidar_core.model.loaded import load
from tests.tiny import edit_json, tiny_checkpoint, tiny_gguf
from tidar_core.config import Architecture, ConfigError
from tidar_core.convert.full_run import add_mask
from tidar_core.model import dense
from tidar_core.model.configuration import load_config
from tidar_core.model.dense import check_dense, dense_model
from tidar_core.model.sampling_defaults import read_sampling_defaults
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

TOKENS = torch.tensor([list(range(30, 130))])
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def dense_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return dense_model(find_model(str(path)), dtype).eval()


def scores(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def rewritten(path: Path, change: Any) -> dict[str, Tensor]:
    """Its tensors, after a change of them is on the disk; change: takes and gives tensors by their names."""
    tensors = load_file(path / "model.safetensors")
    save_file(change(dict(tensors)), path / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("prefix", ["_orig_mod.", "base_model.model.", "module."])
def test_names_with_a_prefix_are_those_of_the_same_weights(tmp_path: Path, prefix: str) -> None:
    path = tiny_checkpoint(tmp_path / "model", tied=False)
    expected = rewritten(path, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    state = dense_of(path).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_weights_under_another_files_name_are_found(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = scores(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert torch.equal(scores(dense_of(path)), expected)


@pytest.mark.parametrize(
    ("layers", "why"), [(3, r"model\.layers\.2\.\S+ is missing"), (1, r"it has no place for model\.layers\.1\.\S+")]
)
def test_weights_are_neither_made_up_nor_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, why: str
) -> None:
    made = dense._config

    def another(*given: Any) -> PreTrainedConfig:
        config = made(*given)
        config.num_hidden_layers = layers
        return config

    monkeypatch.setattr(dense, "_config", another)
    with pytest.raises(ConfigError, match=rf"cannot hold model as it is \({why}\)") as raised:
        dense_of(tiny_checkpoint(tmp_path / "model"))
    assert "\n" not in str(raised.value)


def test_what_the_library_cannot_build_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_config", lambda *_: PreTrainedConfig())
    with pytest.raises(ConfigError, match="transformers cannot hold model as it is") as raised:
        check_dense(find_model(str(tiny_checkpoint(tmp_path / "model"))))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"bias": True, "tied": False}),
        ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope": LLAMA_3}),
        ("llama", {"head_dim": 32}),
        ("qwen2", {"rope": YARN}),
        ("qwen3", {"rope": {"rope_theta": 500000.0}}),
    ],
)
def test_a_gguf_file_is_the_model_that_it_was_made_of(
    tmp_path: Path, architecture: Architecture, options: dict[str, Any]
) -> None:
    """As it is, and saved."""
    path = tiny_checkpoint(tmp_path / "plain", architecture, **options)
    file = tiny_gguf(tmp_path / "model.gguf", path)
    expected = scores(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    model = dense_of(file)
    torch.testing.assert_close(scores(model), expected, rtol=0, atol=1e-4)
    assert model.generation_config.eos_token_id == [2, 0]
    model.save_pretrained(tmp_path / "saved")
    load_tokenizer(find_model(str(file))).save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(scores(dense_of(tmp_path / "saved")), expected, rtol=0, atol=1e-4)
    before, after = load_config(find_model(str(file))), load_config(find_model(str(tmp_path / "saved")))
    assert (after.eos_ids, after.max_positions, after.rope_theta) == (
        before.eos_ids, before.max_positions, before.rope_theta
    )  # fmt: skip


def test_a_gguf_file_that_is_no_model_of_the_librarys_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Qwen2 always has biases."""
    path = tiny_checkpoint(tmp_path / "plain", "llama")
    file = tiny_gguf(tmp_path / "model.gguf", path)
    monkeypatch.setattr(dense, "CONFIG_MAPPING", {"llama": dense.CONFIG_MAPPING["qwen2"]})
    with pytest.raises(ConfigError, match=r"self_attn\.k_proj\.bias is missing"):
        dense_of(file)


def test_a_head_that_was_trained_apart_stays_so_when_the_embedding_grows(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", vocab=511)
    edit_json(path / "config.json", vocab_size=448)
    apart = torch.randn(448, 96, generator=torch.Generator().manual_seed(1))
    rewritten(
        path,
        lambda tensors: {
            **{name: tensor[:448] if "embed" in name else tensor for name, tensor in tensors.items()},
            "lm_head.weight": apart,
        },
    )
    model = dense_of(path)
    before = scores(model)
    rows = model.get_input_embeddings().num_embeddings
    add_mask(model, load_tokenizer(find_model(str(path))))
    assert model.get_input_embeddings().num_embeddings > rows
    assert torch.equal(scores(model)[..., :448], before)
    assert torch.equal(model.get_output_embeddings().weight[:448], apart)
    model.save_pretrained(tmp_path / "saved")
    load_tokenizer(find_model(str(path))).save_pretrained(tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved")[1].head[:448], apart)


def test_a_head_beside_the_embedding_that_it_equals_is_tied_to_it(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    rewritten(path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = dense_of(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert check_dense(find_model(str(path))) == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("pad", [-1, 512, 600])
def test_a_padding_token_that_is_none_is_left_out(tmp_path: Path, pad: int) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    edit_json(path / "config.json", pad_token_id=pad)
    model = dense_of(path)
    assert model.config.pad_token_id is None
    assert model.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize(
    "odd",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"pad_token_id": -1, "temperature": 0.6},
        {"max_new_tokens": -5, "temperature": 0.6, "top_k": 7},
        {"num_return_sequences": 4, "do_sample": False},
        {"cache_implementation": "none such", "top_p": 0.9},
    ],
)
def test_an_odd_generation_config_costs_neither_ends_nor_what_is_sampled_by(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    edit_json(path / "generation_config.json", **odd)
    dense_of(path).save_pretrained(tmp_path / "saved")
    load_tokenizer(find_model(str(path))).save_pretrained(tmp_path / "saved")
    told: list[str] = []
    before, after = (
        (load_config(source).eos_ids, read_sampling_defaults(source, told.append))
        for source in (find_model(str(path)), find_model(str(tmp_path / "saved")))
    )
    assert before == after
    assert not told


@pytest.mark.parametrize("architecture", ["glm4_moe", "ernie4_5_moe"])
def test_what_experts_are_chosen_by_is_not_rounded(tmp_path: Path, architecture: Architecture) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture)
    expected = load(path)[1].layers[1].expert_bias
    state = dense_of(path, torch.bfloat16).state_dict()
    (found,) = (tensor for name, tensor in state.items() if "layers.1." in name and "correction_bias" in name)
    assert expected is not None
    assert torch.equal(found.flatten(), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "granitemoe", "phi3"])
def test_its_weights_are_counted_before_they_are_read(tmp_path: Path, architecture: Architecture) -> None:
    path = tiny_checkpoint(tmp_path / "model", architecture)
    assert check_dense(find_model(str(path))) == sum(each.numel() for each in dense_of(path).parameters())
