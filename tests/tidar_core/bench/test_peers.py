"""Engines compared as processes: the real workers, on a tiny checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, CompileConfig
from typer.testing import CliRunner

import tidar_core
from tests.tiny import tiny_checkpoint, tiny_gguf
from tidar_core.bench import prompts
from tidar_core.bench.peers import compare
from tidar_core.bench.peers.compare import WORKER, Contender, Room, compare_engines, model_for, own_engines, peer_engine
from tidar_core.bench.peers.worker import compiled_steps, device_name
from tidar_core.bench.prompts import human_eval_prompts
from tidar_core.cli import app
from tidar_core.config import ConfigError
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

ROOM = Room(64, 2)


def test_our_engine_and_transformers_do_the_same_work(tmp_path):
    model = str(tiny_checkpoint(tmp_path / "model"))
    engines = [*own_engines(model, ROOM, drafts=["off"]), peer_engine("transformers", tmp_path, model, ROOM)]
    assert engines[1].command[0] == sys.executable, "no environment was made for it, and none is needed"
    said: list[str] = []
    results = compare_engines(
        engines, ["a b c", "def f", "x"], batches=[1, 2], rounds=2, at_least=2, max_tokens=8, honour_end=False,
        say=said.append,
    )  # fmt: skip
    assert [(r.batch, r.engine) for r in results] == [
        (batch, engine) for batch in (1, 2) for engine in ("tidar bfloat16, drafts off", "transformers")
    ]
    assert all(r.tokens_per_second > 0 and len(r.rounds) == 2 for r in results)
    assert {r.device for r in results} == {device_name("cuda" if torch.cuda.is_available() else "cpu")}
    assert results[0].ratio == results[2].ratio == 1.0
    assert said[-1].startswith("batch 2, round 2 of 2: tidar bfloat16, drafts off ")


def test_an_engine_that_does_not_start_is_named(tmp_path):
    broken = Contender("broken", (sys.executable, str(WORKER), "tidar", str(tmp_path / "nothing"), "--drafts", "off"))
    with pytest.raises(ConfigError, match=r"broken ended by itself \(status 1\) and said last: .*no model at"):
        compare_engines([broken], ["a"], batches=[1], rounds=1, at_least=1, max_tokens=1, honour_end=True)


ANOTHER_TREE = """
from tidar_core.bench.peers.compare import Room, compare_engines, own_engines
engines = own_engines("nothing", Room(8, 1), drafts=["off"])
compare_engines(engines, ["a"], batches=[1], rounds=1, at_least=1, max_tokens=1, honour_end=True)
"""


def test_our_engine_is_the_one_of_the_tree_that_asks(tmp_path):
    """Be another one installed, or none."""
    package = Path(tidar_core.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.cpp", "adapters"))
    (tmp_path / package.name / "bench" / "drive.py").write_text("raise SystemExit('the tree that asked')")
    asking = [sys.executable, "-c", ANOTHER_TREE]
    done = subprocess.run(asking, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "said last: the tree that asked" in done.stderr


def test_a_peer_that_is_not_there_names_what_installs_it(tmp_path):
    with pytest.raises(ConfigError, match=r"vllm is not installed in .*install\.sh .* vllm"):
        peer_engine("vllm", tmp_path, "model", ROOM)
    (tmp_path / "transformers").mkdir()
    with pytest.raises(ConfigError, match=r"transformers is not installed in .*install\.sh .* transformers"):
        peer_engine("transformers", tmp_path, "model", ROOM)


COMPILES = """
import json, sys
print(json.dumps({"device": "abacus", "notes": ["beads are slow"]}), flush=True)
seen = set()
for line in sys.stdin:
    batch = len(json.loads(line)["prompts"])
    print(json.dumps({"tokens": batch, "seconds": 1.0 if batch in seen else 1000.0}), flush=True)
    seen.add(batch)
"""


def test_what_an_engine_compiles_for_a_batch_is_not_measured():
    slow = Contender("slow", (sys.executable, "-c", COMPILES))
    kept: list[list[int]] = []
    said: list[str] = []
    results = compare_engines(
        [slow], ["a", "b"], batches=[1, 4], rounds=2, at_least=4, max_tokens=1, honour_end=True, say=said.append,
        keep=lambda found: kept.append([len(r.rounds) for r in found]),
    )  # fmt: skip
    assert said[:2] == ["starting slow", "slow: beads are slow"]
    assert [(r.device, r.batch, r.rounds) for r in results] == [("abacus", 1, (1.0, 1.0)), ("abacus", 4, (4.0, 4.0))]
    assert kept == [[1], [2], [2, 1], [2, 2]], "what was measured is known after every round"


def test_a_prompt_of_another_length_finds_transformers_steps_compiled(tmp_path):
    """As on a GPU, but for the compiler: what comes of it there is decided by how often it is asked."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "model"), dtype=torch.float32).eval()
    compiled: list[int] = []

    def compiler(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    how = CompileConfig(dynamic=False, backend=compiler, mode=None)
    how._compile_all_devices = True
    steps = compiled_steps(model, 64, how)
    for batch, length, seen in ((1, 3, 1), (1, 17, 1), (1, 9, 1), (4, 5, 2), (4, 12, 2), (1, 30, 2)):
        ids = torch.arange(3, 3 + batch * length).view(batch, length)
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
        answers = model.generate(**asked, do_sample=False, **steps(batch))
        assert torch.equal(answers, model.generate(**asked, do_sample=False))
        assert len(compiled) == seen


@pytest.mark.parametrize("installed", [True, False])
def test_mt_bench_is_taken_where_it_is_installed(monkeypatch, installed):
    def talk() -> list[str]:
        if not installed:
            raise ImportError
        return ["one", "two"]

    monkeypatch.setattr(prompts, "_mt_bench", talk)
    texts, sets = prompts.mixed_prompts()
    assert texts[0] == human_eval_prompts(1)[0]
    assert (len(texts), texts[1] == "one", "mtbench" in sets) == (4 if installed else 164, installed, installed)


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


def test_a_peers_environment_is_looked_for_in_the_folder_that_is_named(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path / "tiny", max_positions=4096)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs" / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "envs" / "vllm" / "bin" / "python").symlink_to(shutil.which("false"))
    words = ["--peer", "vllm", "--model", "tiny", "--prompts", "1", "--drafts", "off"]
    told = CliRunner().invoke(app, ["bench", "peers", "envs", *words])
    assert told.exit_code == 1
    assert "vllm ended by itself (status 1)" in " ".join(told.output.split())


ONE_ROUND = """
import sys
print('{"device": "none", "notes": []}', flush=True)
sys.stdin.readline()
print('{"tokens": 1, "seconds": 1}', flush=True)
"""


def test_an_engine_that_dies_between_two_rounds_is_named():
    dies = Contender("dies", (sys.executable, "-c", ONE_ROUND))
    with pytest.raises(ConfigError, match="dies ended by itself"):
        compare_engines([dies], ["a"], batches=[1], rounds=3, at_least=1, max_tokens=1, honour_end=True)
