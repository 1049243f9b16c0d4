"""Engines compared as processes: the real workers, on a tiny checkpoint."""

import subprocess
import sys

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.tiny import tiny_checkpoint, tiny_gguf
from tidar_core.bench.peers import compare
from tidar_core.bench.peers.compare import WORKER, Engine, compare_engines, model_for, own_engines, peer_engine
from tidar_core.config import ConfigError
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_tokenizer, load_weights
from tidar_core.model.sources import find_model


def test_our_engine_and_transformers_do_the_same_work(tmp_path):
    model = str(tiny_checkpoint(tmp_path / "model"))
    words = (sys.executable, str(WORKER), "transformers", model, "--context", "64")
    engines = [own_engines(model, 64)[0], Engine("transformers", words)]
    said: list[str] = []
    results = compare_engines(
        engines, ["a b c", "def f", "x"], batches=[1, 2], rounds=2, at_least=2, max_tokens=8, honour_end=False,
        say=said.append,
    )  # fmt: skip
    assert [(r.batch, r.engine) for r in results] == [
        (batch, engine) for batch in (1, 2) for engine in ("tidar bfloat16, drafts off", "transformers")
    ]
    assert all(r.tokens_per_second > 0 and len(r.rounds) == 2 for r in results)
    assert results[0].ratio == results[2].ratio == 1.0
    assert said[-1].startswith("batch 2, round 2 of 2: tidar bfloat16, drafts off ")


def test_an_engine_that_does_not_start_is_named(tmp_path):
    broken = Engine("broken", (sys.executable, str(WORKER), "tidar", str(tmp_path / "nothing"), "--drafts", "off"))
    with pytest.raises(ConfigError, match=r"broken ended by itself \(status 1\) and said last: .*no model at"):
        compare_engines([broken], ["a"], batches=[1], rounds=1, at_least=1, max_tokens=1, honour_end=True)


def test_a_peer_that_is_not_there_names_what_installs_it(tmp_path):
    with pytest.raises(ConfigError, match=r"vllm is not installed in .*install\.sh .* vllm"):
        peer_engine("vllm", tmp_path, "model", 64)


def test_peers_get_the_form_that_they_read(tmp_path):
    checkpoint = find_model(str(tiny_checkpoint(tmp_path / "model")))
    assert model_for("vllm", checkpoint, tmp_path) == str(checkpoint.directory)
    with pytest.raises(ConfigError, match="GGUF"):
        model_for("llama.cpp", checkpoint, tmp_path)


def test_a_quantized_file_becomes_a_directory_with_its_weights(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    source = find_model(str(tiny_gguf(tmp_path / "tiny.gguf", checkpoint, GGMLQuantizationType.Q4_1)))
    written = find_model(model_for("vllm", source, tmp_path / "peers"))
    ours, theirs = (load_weights(each, load_config(each), torch.bfloat16, "cpu") for each in (source, written))
    assert torch.equal(ours.embedding, theirs.embedding)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(ours.layers, theirs.layers, strict=True))
    assert load_tokenizer(written).get_vocab() == load_tokenizer(source).get_vocab()


def test_another_file_of_the_same_name_is_another_model(tmp_path):
    source = find_model(str(tiny_gguf(tmp_path / "tiny.gguf", tiny_checkpoint(tmp_path / "one", seed=1))))
    first = model_for("vllm", source, tmp_path / "peers")
    assert model_for("vllm", source, tmp_path / "peers") == first
    tiny_gguf(tmp_path / "tiny.gguf", tiny_checkpoint(tmp_path / "two", seed=2))
    second = find_model(model_for("vllm", source, tmp_path / "peers"))
    assert str(second.directory) != first
    ours, theirs = (load_weights(each, load_config(each), torch.float32, "cpu") for each in (source, second))
    assert torch.equal(ours.embedding.bfloat16().float(), theirs.embedding)


def test_a_model_that_was_not_written_to_its_end_is_written_again(tmp_path, monkeypatch):
    source = find_model(str(tiny_gguf(tmp_path / "tiny.gguf", tiny_checkpoint(tmp_path / "model"))))
    with monkeypatch.context() as patched:
        patched.setattr(compare, "load_tokenizer", None)  # calling it fails, once the weights are written
        with pytest.raises(TypeError):
            model_for("vllm", source, tmp_path / "peers")
    assert list((tmp_path / "peers").iterdir()) == []
    assert find_model(model_for("vllm", source, tmp_path / "peers"))


def test_the_script_is_a_script():
    done = subprocess.run(
        ["bash", str(WORKER.with_name("install.sh"))], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode != 0
    assert "usage: install.sh DIR" in done.stderr
