"""What a conversion finds when it starts, told before anything takes long or is lost: words, tokens, drafters."""

import gc
from pathlib import Path

import pytest
import torch

from tests.tidar_core.convert.documents import HEADER, document
from tests.tidar_core.convert.trained import SIMPLE, run_command, tiny_base
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.convert import gathering, run
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.drafter import new_drafter, rank_of
from tidar_core.convert.shards import Corpus, Document, open_store
from tidar_core.model import adapter
from tidar_core.model.adapter import shape_of
from tidar_core.model.adapter_config import read_adapter_config
from tidar_core.model.configuration import load_config
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import ModelWeights

SMALL = ("--dtype", "float32", "--block-length", 4, "--rank", 8, "--rows", 256, "--threads", 1, "--steps", 1)
FEW = ("--own-tokens", 300)


def stored_words(directory: Path, model: Path, *documents: Document) -> Path:
    """A data directory of the model, as gathering leaves it."""
    source = find_model(str(model))
    identity = shape_of(source.name, load_config(source), load_tokenizer(source))
    header = HEADER.model_copy(update={"model": identity.name, "tokenizer": identity.tokenizer})
    open_store(directory, header).append(documents, [0], 1.0)
    return directory


def test_an_expert_alone_has_the_rank_that_was_asked_for(tmp_path):
    tiny = tiny_base(tmp_path, "qwen3_moe")
    for projections in (("expert",), ("qkv", "expert")):
        made = new_drafter(tiny.identity, tiny.base.weights.embedding, 4, projections, block_length=4, seed=0)
        assert rank_of(made) == 4


@pytest.mark.parametrize("mistake", ["seed", "tokenizer"])
def test_other_words_are_told_before_anything_is_loaded_or_stored(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(gathering, "load_engine", None)
    model, text = tiny_checkpoint(tmp_path / "model", **SIMPLE), tmp_path / "text"
    text.write_text("The quick brown fox jumps over lazy dogs.\n" * 100)
    if mistake == "seed":
        data = stored_words(tmp_path / "data", model, document(0))
    else:
        data = tmp_path / "data"
        open_store(data, HEADER).append([document(0)], [0], 1.0)
    status, output = run_command(
        model, "--out", tmp_path / "out", "--data", data, "--text", text, "--seed", 3, *SMALL, *FEW
    )
    message = "was begun with --seed 0: use it" if mistake == "seed" else "holds tokens of tiny, another tokenizer"
    assert status == 1
    assert message in output.splitlines()[-1]
    assert [path.name for path in data.glob("*.safetensors")] == ["shard-000000.safetensors"]


def test_stored_tokens_that_the_model_has_no_embedding_of_are_told(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    beyond = Document((3, 512) * 50, (True,) * 100, 5, "file", -1)
    data = stored_words(tmp_path / "data", model, *(document(number, 400) for number in range(12)), beyond)
    status, output = run_command(model, "--out", tmp_path / "out", "--data", data, *SMALL, "--own-tokens", 9)
    assert status == 1
    assert f"{data} holds token 512, and model has 512 of them: choose another --data" in output.splitlines()[-1]


def test_documents_are_in_memory_once(tmp_path, monkeypatch):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    data = stored_words(tmp_path / "data", model, *(document(number, 400) for number in range(12)))

    def corpora() -> int:
        gc.collect()
        return sum(type(each) is Corpus for each in gc.get_objects())

    before, found = corpora(), []
    monkeypatch.setattr(run, "train_gathered", lambda *_: found.append(corpora()) or Progress())
    status, output = run_command(model, "--out", tmp_path / "out", "--data", data, *SMALL, "--own-tokens", 9)
    assert status == 0, output
    assert found == [before]


def test_weights_are_in_memory_once_where_transformers_generates(tmp_path, monkeypatch):
    def loaded() -> int:
        gc.collect()
        return sum(type(each) is ModelWeights for each in gc.get_objects())

    before, found = loaded(), []

    def full(*_) -> None:
        found.append(loaded())
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gathering, "dense_model", full)
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    status, output = run_command(model, "--out", tmp_path / "out", "--generator", "transformers", *SMALL, *FEW)
    assert found == [before]
    assert status == 1
    assert "memory is full: it does not hold what transformers generates with, leave --generator out" in output


def test_a_drafter_that_was_made_elsewhere_stays(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    made = tiny_adapter(tmp_path / "theirs", model)
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    status, output = run_command(model, "--out", made, *SMALL, *FEW)
    assert status == 1
    assert "theirs holds a drafter, and the training itself is not in" in output
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


@pytest.mark.parametrize("fits", [True, False])
def test_a_shipped_drafter_is_known_by_the_bases_weights(tmp_path, monkeypatch, fits):
    """Whatever the base is called; and before anything is gathered where it is for others."""
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    tiny_adapter(tmp_path / "shipped", model)
    monkeypatch.setattr(adapter, "shipped_adapters", lambda: [tmp_path / "shipped"])
    if fits:
        model.rename(tmp_path / "mine")
    else:
        tiny_checkpoint(tmp_path / "mine", seed=1, **SIMPLE)
    status, output = run_command(tmp_path / "mine", "--out", tmp_path / "out", "--start", "default", *SMALL, *FEW)
    if fits:
        assert status == 0, output
        assert read_adapter_config(tmp_path / "out").training["start"] not in ("none", "--out")
    else:
        assert output.splitlines()[-1] == "tidar: no drafter is shipped for mine: leave --start out"
        assert not list((tmp_path / "out.work" / "data").glob("*.safetensors"))
