"""Models of more than text, whose text part is served; and models of types that nobody else knows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.tidar_core.model.loaded import said_as, said_as_transformers_says
from tests.tiny import edit_json, randomise, tiny_checkpoint, tiny_tokenizer
from tidar_core.config import Architecture, ConfigError, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.model.configuration import load_config
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter
from tidar_core.model.dense import dense_model
from tidar_core.model.sources import find_model

TEXT = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": None,
}  # fmt: skip
SEEN = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
QWENS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 96}
THREE_COORDINATES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WHOLES: dict[str, tuple[Architecture, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2", {"rope_parameters": THREE_COORDINATES}, {**QWENS, "fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        "qwen3",
        {"rope_parameters": {**THREE_COORDINATES, "mrope_interleaved": True}},
        {**QWENS, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_moe",
        {
            "rope_parameters": {**THREE_COORDINATES, "mrope_interleaved": True},
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        {**QWENS, "deepstack_visual_indexes": [0]},
    ),
    "mistral3": ("mistral", {"model_type": "mistral"}, {**SEEN, "model_type": "pixtral"}),
    "llava": ("llama", {"model_type": "llama"}, {**SEEN, "model_type": "clip_vision_model", "image_size": 28}),
    "idefics3": ("llama", {"model_type": "llama"}, {**SEEN, "image_size": 28, "patch_size": 14}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False},
        {**SEEN, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    ),
    "internvl": ("qwen2", {"model_type": "qwen2"}, {**SEEN, "image_size": [28, 28], "patch_size": [14, 14]}),
}


def whole_model(directory: Path, name: str, tied: bool) -> PreTrainedModel:
    """A random model of more than text, saved into `directory` with a tokenizer."""
    _, text, seen = WHOLES[name]
    config = CONFIG_MAPPING[name](text_config=TEXT | text, vision_config=seen, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    randomise(model, tokenizer, torch.Generator().manual_seed(1), likely=8)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WHOLES)
def test_the_text_part_of_a_larger_model_says_what_the_whole_says(tmp_path: Path, name: str, tied: bool) -> None:
    whole = whole_model(tmp_path, name, tied)
    source = find_model(str(tmp_path))
    config = load_config(source)
    assert (config.architecture, config.tied_head) == (WHOLES[name][0], tied)
    said_as(tmp_path, whole)
    apart = dense_model(source, torch.float32).eval()
    tokens = torch.tensor([list(range(30, 60))])
    with torch.no_grad():
        torch.testing.assert_close(apart(tokens).logits, whole(tokens).logits, rtol=0, atol=2e-5)


def test_what_ends_an_answer_of_the_whole_ends_one_of_its_text_part(tmp_path: Path) -> None:
    """Copies of Gemma 3 without a generation_config.json name both tokens at the top of config.json alone."""
    whole_model(tmp_path, "gemma3", tied=True)
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", eos_token_id=[1, 106])
    assert load_config(find_model(str(tmp_path))).eos_ids == (1, 106)


def test_a_type_of_its_own_is_taken_for_what_its_contract_says(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", "qwen2")
    path = tiny_checkpoint(tmp_path / "model", "qwen2")
    edit_json(path / "config.json", model_type="tidar_qwen2", auto_map={"AutoConfig": "configuration_tidar.Config"})
    with pytest.raises(ConfigError, match=r"'tidar_qwen2' is not supported, only .* state \"architecture\"") as refused:
        load_config(find_model(str(path)))
    assert "\n" not in str(refused.value)
    elsewhere = tmp_path / "drafting.json"
    elsewhere.write_text(OwnDrafter(architecture="qwen2", mask_token_id=400, block_length=4).model_dump_json())
    engine = load_engine(EngineConfig(str(path), str(elsewhere), "float32", "cpu"))
    assert engine.info.block_length == 4
    (path / CONTRACT_FILE).write_text(elsewhere.read_text())
    said_as_transformers_says(path, plain)
    source = find_model(str(path))
    tokens = torch.tensor([list(range(30, 60))])
    with torch.no_grad():
        both = [dense_model(each, torch.float32).eval()(tokens).logits for each in (source, find_model(str(plain)))]
    assert torch.equal(*both)


@pytest.mark.parametrize("stated", ["gemma3", "tidar"])
def test_an_architecture_that_is_none_is_refused(tmp_path: Path, stated: str) -> None:
    path = tiny_checkpoint(tmp_path)
    (path / CONTRACT_FILE).write_text(json.dumps({"architecture": stated, "mask_token_id": 1, "block_length": 4}))
    edit_json(path / "config.json", model_type="tidar")
    with pytest.raises(ConfigError, match="architecture"):
        load_config(find_model(str(path)))


def test_a_larger_model_whose_text_part_cannot_be_run_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    edit_json(path / "config.json", model_type="qwen3_5_moe", text_config={"model_type": "qwen3_5_moe_text"})
    with pytest.raises(ConfigError, match="'qwen3_5_moe' is not supported"):
        load_config(find_model(str(path)))
