"""The drafter adapter: what is written is what is read, and what does not fit is refused in one line."""

import json
import os
import shutil
import unicodedata
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.tiny import edit_json, tiny_adapter, tiny_checkpoint, tiny_gguf
from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.model.adapter import (
    CUT_PROBE,
    Adapter,
    cuts_fingerprint,
    default_adapter_for,
    identify_base,
    load_adapter,
    save_adapter,
    shipped_adapters,
    tokenizer_fingerprint,
)
from tidar_core.model.adapter_config import AdapterConfig, BaseIdentity, read_adapter_config
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import LayerAdapter


def identity(path: Path | str) -> BaseIdentity:
    source = find_model(str(path))
    config = load_config(source)
    weights = load_weights(source, config, torch.bfloat16, "cpu")
    return identify_base(source.name, config, weights, load_tokenizer(source))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def base(model: Path) -> BaseIdentity:
    return identity(model)


@pytest.fixture
def path(model: Path, tmp_path: Path) -> Path:
    return tiny_adapter(tmp_path / "drafter", model)


def tensors_of(adapter: Adapter) -> dict[str, Tensor]:
    found = {"mask_embedding": adapter.weights.slot_embeddings}
    for index, layer in enumerate(adapter.weights.layers):
        for name in LayerAdapter.__dataclass_fields__:
            pair = getattr(layer, name)
            if pair is not None:
                found |= {f"layers.{index}.{name}.A": pair.a, f"layers.{index}.{name}.B": pair.b}
    head = adapter.weights.slot_head
    if head is not None:
        found |= {f"slot_head.{name}": getattr(head, name) for name in ("hidden", "token", "state", "out")}
    return found


def load(path: Path, base: BaseIdentity) -> Adapter:
    return load_adapter(path, base, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_every_tensor_into_its_place(path: Path, base: BaseIdentity, dtype: torch.dtype) -> None:
    lines: list[str] = []
    adapter = load_adapter(path, base, dtype, "cpu", lines.append)
    stored = load_file(path / "adapter.safetensors")
    found = tensors_of(adapter)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name].to(dtype)) for name in stored)
    assert adapter.weights.slot_embeddings.shape == (4, 96)
    assert adapter.weights.layers[1].qkv is not None
    assert adapter.weights.layers[1].qkv.b.shape == ((6 + 2 + 2) * 32, 4)
    assert (adapter.name, adapter.config.rank, adapter.config.within_block) == ("drafter", 4, "bidirectional")
    assert lines == []


@pytest.mark.parametrize("slot_head", [0, 8])
def test_what_is_saved_is_what_is_loaded(
    path: Path, base: BaseIdentity, model: Path, tmp_path: Path, slot_head: int
) -> None:
    adapter = load(tiny_adapter(path, model, slot_head=slot_head), base)
    assert (adapter.weights.slot_head is None) == (slot_head == 0)
    save_adapter(adapter, tmp_path / "new" / "copy")
    again = load(tmp_path / "new" / "copy", base)
    assert again.config == adapter.config
    assert all(torch.equal(tensor, tensors_of(again)[name]) for name, tensor in tensors_of(adapter).items())
    assert sorted(file.name for file in (tmp_path / "new" / "copy").iterdir()) == [
        "adapter.json",
        "adapter.safetensors",
    ]


def test_saving_over_an_adapter_leaves_its_other_files(path: Path, base: BaseIdentity, model: Path) -> None:
    (path / "README.md").write_text("how it was trained")
    tiny_adapter(path, model, rank=2, within_block="causal", seed=1)
    assert load(path, base).config.rank == 2
    assert (path / "README.md").exists()


def test_a_save_that_fails_leaves_the_old_adapter(
    path: Path, base: BaseIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(path, base)

    def full_disk(self: Path, content: bytes) -> None:
        self.open("wb").close()  # as a real one: what was there is gone
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    worse = replace(before.weights, slot_embeddings=torch.zeros_like(before.weights.slot_embeddings))
    with pytest.raises(OSError, match="no space"):
        save_adapter(Adapter(before.config, worse, "drafter"), path)
    monkeypatch.undo()
    assert sorted(file.name for file in path.iterdir()) == ["adapter.json", "adapter.safetensors"]
    assert torch.equal(load(path, base).weights.slot_embeddings, before.weights.slot_embeddings)


def test_an_adapter_is_on_the_disk_before_it_takes_the_place_of_another(
    path: Path, base: BaseIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine stopped behind the renames, both could have been empty."""
    before, flushed, replace_file = load(path, base), set[int](), os.replace
    replaced: list[bool] = []

    def replacing(part: Path, whole: Path) -> None:
        replaced.append(part.stat().st_ino in flushed)
        replace_file(part, whole)

    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    monkeypatch.setattr(os, "replace", replacing)
    save_adapter(before, path)
    assert replaced == [True, True]


def test_an_adapter_of_some_projections_only(path: Path, base: BaseIdentity, tmp_path: Path) -> None:
    whole = load(path, base)
    config = AdapterConfig(base=base, rank=4, projections=("qkv", "down"), block_length=4, within_block="causal")
    save_adapter(Adapter(config, whole.weights, "part"), tmp_path / "part")
    part = load(tmp_path / "part", base).weights.layers[0]
    assert part.o is None
    assert part.gate_up is None
    assert part.qkv is not None
    assert part.down is not None


def test_an_adapter_of_some_layers_only(path: Path, base: BaseIdentity, tmp_path: Path) -> None:
    whole = load(path, base)
    config = AdapterConfig(base=base, rank=4, layers=(1,), block_length=4, within_block="causal")
    save_adapter(Adapter(config, whole.weights, "part"), tmp_path / "part")
    first, second = load(tmp_path / "part", base).weights.layers
    assert first == LayerAdapter()
    assert all(getattr(second, name) is not None for name in base.projections)


def test_other_weights_of_a_fitting_base_are_one_line(path: Path, base: BaseIdentity) -> None:
    lines: list[str] = []
    other = base.model_copy(update={"fingerprint": "0" * 16, "name": "finetuned"})
    load_adapter(path, other, torch.float32, "cpu", lines.append)
    assert len(lines) == 1
    assert "other weights (tiny) than finetuned" in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "does not fit: made for tiny with layers 2, tiny has 3"),
        ({"hidden_size": 576}, "does not fit: made for tiny with hidden_size 96, tiny has 576"),
        ({"head_dim": 16}, "head_dim 32, tiny has 16"),
        ({"architecture": "llama"}, "architecture qwen3, tiny has llama"),
        ({"tokenizer": "f" * 16}, "made for another tokenizer than that of tiny"),
    ],
)
def test_a_misfit_is_refused(path: Path, base: BaseIdentity, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, base.model_copy(update=changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2: input should be 1"),
        ({"kind": "projections"}, "kind 'projections' is not supported yet, only 'low-rank' is"),
        ({"kind": "magic"}, "kind is 'magic': input should be 'low-rank'"),
        ({"slot_0": "anchor"}, "slot_0 'anchor' goes with labels 'shifted' alone"),
        ({"slot_tokens": "random"}, "slot_tokens 'random' is not supported yet"),
        ({"labels": "sideways"}, "labels is 'sideways': input should be 'aligned' or 'shifted'"),
        ({"within_block": "sideways"}, "within_block is 'sideways': input should be 'bidirectional' or 'causal'"),
        ({"within_block": None}, "is not valid: within_block is missing"),
        ({"rank": "4"}, "rank is '4': input should be a valid integer"),
        ({"rank": 0}, "rank is 0: input should be greater than or equal to 1"),
        ({"block_length": 1}, "block_length is 1: input should be greater than or equal to 2"),
        ({"colour": "blue"}, "is not valid: unknown key 'colour': there are format, kind, base, rank"),
        ({"slot_haed": 4}, "unknown key 'slot_haed': did you mean 'slot_head'"),
        ({"projections": ["qkv", "head"]}, r"projections.1 is 'head': input should be 'qkv'"),
        ({"layers": [0, 2]}, r"layers \[0, 2\] are not all from 0 to 1"),
        ({"rank": 5}, r"tensor layers.0.qkv.A is \[4, 96\], but \[5, 96\] was expected"),
        ({"block_length": 8}, r"tensor mask_embedding is \[4, 96\], but \[8, 96\] was expected"),
        ({"projections": ["qkv"]}, "holds the tensor layers.0.down.A, which adapter.json does not speak of"),
    ],
)
def test_a_config_that_cannot_be_run(path: Path, base: BaseIdentity, changes: dict[str, Any], message: str) -> None:
    edit_json(path / "adapter.json", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load(path, base)
    assert "\n" not in str(error.value)


def test_missing_and_broken_files(path: Path, base: BaseIdentity, tmp_path: Path) -> None:
    tensors = load_file(path / "adapter.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1.o.B" not in name}, path / "adapter.safetensors"
    )
    with pytest.raises(ConfigError, match=r"lacks the tensor layers.1.o.B"):
        load(path, base)
    (path / "adapter.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="is not a readable safetensors file"):
        load(path, base)
    (path / "adapter.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter.safetensors"):
        load(path, base)
    (path / "adapter.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid") as error:
        load(path, base)
    assert "\n" not in str(error.value)
    for nowhere in (tmp_path / "nowhere", path / "adapter.json"):
        with pytest.raises(ConfigError, match=r"no adapter at .*: there is no adapter.json|cannot be read"):
            load(nowhere, base)


def test_tokenizer_fingerprint_sees_ids_and_not_the_padding_of_gguf_files(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(find_model(str(model)))
    plain = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(load_tokenizer(find_model(str(tiny_gguf(tmp_path / "a.gguf", model))))) == plain
    tokenizer.add_tokens([f"[PAD{len(tokenizer)}]"])
    assert tokenizer_fingerprint(tokenizer) == plain
    tokenizer.add_tokens(["<|tool|>"])
    assert tokenizer_fingerprint(tokenizer) != plain


def cut_otherwise(tokenizer: PreTrainedTokenizerFast) -> list[PreTrainedTokenizerFast]:
    """The same words behind other pre-tokenizers, another normalizer, and fewer merges."""
    digits, as_gpt2 = pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)
    others = [deepcopy(tokenizer) for _ in range(4)]
    others[0].backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_gpt2])
    others[1].backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    others[2].backend_tokenizer.normalizer = normalizers.Lowercase()
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    stated["model"]["merges"].pop(0)
    others[3]._tokenizer = Tokenizer.from_str(json.dumps(stated))
    return others


def test_other_cuts_of_the_same_words_are_one_line(path: Path, base: BaseIdentity, model: Path) -> None:
    """As in the safetensors of a fine-tune whose maker saved the tokenizer by another class."""
    tokenizer = load_tokenizer(find_model(str(model)))
    others = cut_otherwise(tokenizer)
    assert {tokenizer_fingerprint(other) for other in others} == {base.tokenizer}
    for number, other in enumerate(others):
        lines: list[str] = []
        served = base.model_copy(update={"name": "other", "cuts": cuts_fingerprint(other)})
        load_adapter(path, served, torch.float32, "cpu", lines.append)
        assert lines == [
            "adapter drafter was made for other cuts of text into tokens (tiny) than other: its drafts may hold less "
            "often, the text stays the model's own"
        ], number


def test_an_adapter_that_does_not_say_how_text_was_cut_is_taken_as_it_is(path: Path, base: BaseIdentity) -> None:
    stated = json.loads((path / "adapter.json").read_text())
    assert stated["base"].pop("cuts") == base.cuts
    (path / "adapter.json").write_text(json.dumps(stated))
    lines: list[str] = []
    load_adapter(path, base, torch.float32, "cpu", lines.append)
    assert lines == []


def test_a_gguf_file_cuts_as_its_folder_does(model: Path, base: BaseIdentity, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf", model)
    assert cuts_fingerprint(load_tokenizer(find_model(str(file)))) == base.cuts
    assert unicodedata.normalize("NFC", CUT_PROBE) == CUT_PROBE


# The adapter that is shipped


@pytest.fixture(scope="module")
def default_base() -> BaseIdentity:
    return identity(DEFAULT_MODEL)


def test_the_default_model_has_its_own_adapter(default_base: BaseIdentity) -> None:
    path = default_adapter_for(default_base)
    assert path is not None
    assert read_adapter_config(path).base == default_base.model_copy(update={"cuts": ""})  # it is older than the key
    lines: list[str] = []
    adapter = load_adapter(path, default_base, torch.bfloat16, "cpu", lines.append)
    assert lines == []
    assert (adapter.config.block_length, adapter.config.rank, adapter.config.within_block) == (8, 32, "bidirectional")
    assert adapter.config.slot_head == 256
    assert sum(tensor.numel() for tensor in tensors_of(adapter).values()) == 8_622_592
    assert all(tensor.isfinite().all() for tensor in tensors_of(adapter).values())
    last = adapter.config.training["stages"][-1]["held_out"]["all_right"]
    assert np.cumprod(adapter.config.holds) == pytest.approx(last, abs=0.002)


def test_shipped_adapters_are_small_and_credited() -> None:
    for path in shipped_adapters():
        assert sum(file.stat().st_size for file in path.iterdir()) < 20_000_000
        assert "Recipe" in (path / "README.md").read_text()


def test_other_models_have_their_adapter_by_name_or_none(default_base: BaseIdentity, base: BaseIdentity) -> None:
    shipped = default_adapter_for(default_base)
    original = {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "fingerprint": "0" * 16}
    assert default_adapter_for(default_base.model_copy(update=original)) == shipped
    assert default_adapter_for(default_base.model_copy(update={"name": "my-file"})) == shipped
    assert default_adapter_for(default_base.model_copy(update=original | {"tokenizer": "0" * 16})) is None
    assert default_adapter_for(base) is None


def test_an_adapter_is_read_from_anywhere(default_base: BaseIdentity, tmp_path: Path) -> None:
    copy = shutil.copytree(shipped_adapters()[0], tmp_path / "mine")
    assert load_adapter(copy, default_base, torch.float32, "cpu").name == "mine"
    assert json.loads((copy / "adapter.json").read_text())["format"] == 1
