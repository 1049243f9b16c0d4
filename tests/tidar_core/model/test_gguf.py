"""GGUF files: tensors and tokenizer of the checkpoint that they were made of, one line for what cannot be read."""

import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests.tidar_core.model.loaded import VARIANTS, assert_same_weights, load, reference_state
from tests.tiny import CHAT_TEMPLATE, SENTENCES, tiny_checkpoint, tiny_gguf
from tidar_core.config import ConfigError
from tidar_core.model import gguf as gguf_module
from tidar_core.model.configuration import load_config
from tidar_core.model.gguf import read_header
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama") / "tiny-llama")


@pytest.fixture(scope="module")
def whole_gguf(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama)


@pytest.mark.parametrize(
    ("architecture", "options"), [each for each in VARIANTS if each[0] in ("llama", "qwen2", "qwen3")]
)
def test_gguf_equals_the_checkpoint_it_was_made_of(architecture: Any, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture, **options)
    config, weights = load(tiny_gguf(tmp_path / "tiny.gguf", checkpoint))
    assert_same_weights(weights, reference_state(checkpoint))
    original = load_config(find_model(str(checkpoint)))
    assert config.norm_eps == pytest.approx(original.norm_eps)  # stored in fp32
    assert replace(config, norm_eps=original.norm_eps) == original


@pytest.mark.parametrize(("padding", "expected"), [(0, (2, 0)), (2, (2,)), (300, (2,)), (9999, (2,))])
def test_gguf_padding_ends_an_answer_where_it_is_a_control_token(
    padding: int, expected: tuple[int, ...], llama: Path, tmp_path: Path
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", llama, padding=padding)
    assert load_config(find_model(str(path))).eos_ids == expected


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_quantized_gguf_equals_transformers(
    architecture: Any, kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers takes 128 for every qwen3 head in a GGUF, whatever the file says.
    head_dim = 128 if architecture == "qwen3" else None
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture, tied=False, head_dim=head_dim)
    path = tiny_gguf(tmp_path / "tiny.gguf", checkpoint, kind)
    monkeypatch.setattr(gguf_module, "_CHUNK_WEIGHTS", 1000)  # several chunks a tensor, the last one shorter
    assert_same_weights(load(path)[1], reference_state(tmp_path, path.name))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.BF16, GGMLQuantizationType.F32])
def test_threads_that_share_a_tensor_change_no_bit(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", tiny_checkpoint(tmp_path / "checkpoint"), kind)
    whole = load(path)[1]
    monkeypatch.setattr(gguf_module, "_CHUNK_WEIGHTS", 1000)
    noted, in_memory = [], []

    def counted(*of: Any) -> np.ndarray:
        rows = dequantized(*of)
        in_memory.append(weakref.ref(rows))
        noted.append(sum(each() is not None for each in in_memory))
        return rows

    dequantized = gguf_module._dequantized
    monkeypatch.setattr(gguf_module, "_dequantized", counted)
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        noted.clear()
        weights = load(path)[1]
        assert 1 <= max(noted) <= threads + 1, "and the one that is copied"
        assert torch.equal(weights.embedding, whole.embedding)
        for layer, expected in zip(weights.layers, whole.layers, strict=True):
            for field in fields(layer):
                found, other = getattr(layer, field.name), getattr(expected, field.name)
                assert (found is None and other is None) or torch.equal(found, other)


def test_gguf_tokenizer_equals_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    ours = load_tokenizer(find_model(str(tiny_gguf(tmp_path / "tiny.gguf", checkpoint))))
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    text = "<|im_start|>user\n" + "".join(SENTENCES) + "<|im_end|>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.eos_token, ours.chat_template) == ("<|im_end|>", CHAT_TEMPLATE)


def test_a_tokenizer_beside_a_gguf_file_is_none_of_its(tmp_path: Path) -> None:
    """llama.cpp's converter writes into the checkpoint's folder, and a folder of downloads has files of many models."""
    checkpoint, other = tiny_checkpoint(tmp_path / "checkpoint"), tiny_checkpoint(tmp_path / "other", vocab=384)
    alone = load_tokenizer(find_model(str(tiny_gguf(tmp_path / "alone.gguf", checkpoint))))
    beside = tiny_gguf(checkpoint / "tiny.gguf", checkpoint)
    for tokenizer_json in ((other / "tokenizer.json").read_text(encoding="utf-8"), "{}"):
        (checkpoint / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        found = load_tokenizer(find_model(str(beside)))
        assert found.chat_template == CHAT_TEMPLATE
        assert found.eos_token_id == alone.eos_token_id is not None
        assert found.backend_tokenizer.to_str() == alone.backend_tokenizer.to_str()


def write_gguf(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A GGUF header with one small tensor; `changes` adds metadata (dots written as two underscores)."""
    writer = GGUFWriter(path, architecture)
    numbers = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    for key, value in (numbers | {"attention.head_count": 2, "attention.head_count_kv": 2}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_configuration_beside_a_gguf_file_is_none_of_its(tmp_path: Path) -> None:
    """transformers looks into one for Mistral's where a vocabulary is as large as that of its first models."""
    writer = GGUFWriter(tmp_path / "large.gguf", "llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "he", *(f"word-{number}" for number in range(100_000))])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(7)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{")
    tokenizer = load_tokenizer(find_model(str(tmp_path / "large.gguf")))
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (len(letters) + 100_001, 7)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not supported, only llama, olmoe, qwen2, qwen2moe, qwen3, qwen3moe"),
        ("llama", {"llama__rope__dimension_count": 8}, "part of each head"),
        ("llama", {"llama__context_length": 4_000_000_000}, "4000000000 positions are more than any model has"),
        ("qwen2", {"qwen2__attention__sliding_window": 4096}, "sliding window"),
        ("qwen3", {"qwen3__attention__value_length": 8}, "head size for values"),
        ("qwen2", {"qwen2__attention__key_length": 15, "qwen2__attention__value_length": 15}, "even head size, not 15"),
        ("llama", {"split__count": 3}, "split into several files"),
        ("qwen3moe", {"qwen3moe__expert_used_count": 2}, "metadata qwen3moe.expert_count is missing"),
        ("llama", {"llama__expert_count": 8}, "metadata llama.expert_used_count is missing"),
        ("olmoe", {"olmoe__expert_count": 8, "olmoe__expert_used_count": 9}, "9 of 8 experts of 32 cannot be chosen"),
        ("qwen3", {"qwen3__rope__freq_base": "high"}, "metadata qwen3.rope.freq_base is missing or not one number"),
    ],
)
def test_a_gguf_that_cannot_be_run(architecture: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(find_model(str(write_gguf(tmp_path / "tiny.gguf", architecture, **changes))))
    assert "\n" not in str(error.value)


def test_a_matrix_with_a_scale_beside_it_is_refused(llama: Path, tmp_path: Path) -> None:
    header = read_header(tiny_gguf(tmp_path / "tiny.gguf", llama))
    scaled = header.tensors | {"blk.1.attn_q.scale": header.tensors["output_norm.weight"]}
    with pytest.raises(ConfigError, match="a matrix with a scale beside it"):
        gguf_module.config_from_gguf(replace(header, tensors=scaled))


def test_a_gguf_that_lacks_tensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks the tensor model.layers.0.self_attn.q_proj.weight"):
        load(write_gguf(tmp_path / "tiny.gguf"))


def test_a_broken_gguf_file_is_one_line(llama: Path, tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "tiny.gguf", llama).read_bytes()
    path = tmp_path / "broken.gguf"
    for content in (
        b"",
        b"GG",
        b"no GGUF file at all",
        b"GGUF\x01" + whole[5:],
        *(whole[:n] for n in range(8, 9000, 97)),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a readable GGUF file") as error:
            load_config(find_model(str(path)))
        assert "\n" not in str(error.value)
    path.write_bytes(whole[:-1000])
    with pytest.raises(ConfigError, match="runs past the end of the file"):
        load(path)


def test_a_header_that_wants_billions_of_tensors_is_refused_at_the_first_that_lacks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "many.gguf", llama__block_count=2**31)
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.0\."):
        load(path)


@given(flips=st.lists(st.tuples(st.integers(0, 9500), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_damaged_gguf_header_is_refused_or_read(whole_gguf: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(whole_gguf.read_bytes())
    for position, value in flips:
        content[position] = value
    path = whole_gguf.with_name("damaged.gguf")
    path.write_bytes(content)
    refused = ""
    try:  # some bytes do not matter
        load(path)
    except ConfigError as error:  # nothing else may be raised
        refused = str(error)
    assert "\n" not in refused
