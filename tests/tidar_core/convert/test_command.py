"""`tidar convert` as a user runs it: a folder that serves, the user's own text, mistakes in one line, a kill midway."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.tidar_core.convert.documents import HEADER
from tests.tidar_core.convert.trained import BRIEF, SMALL, random_documents, run_command
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.convert import base, gathering, run, speed
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.own_words import add_text
from tidar_core.convert.shards import KINDS, ShardStore
from tidar_core.convert.trainer import train_drafter
from tidar_core.engine import load_engine
from tidar_core.model.adapter_config import read_adapter_config
from tidar_core.request import SamplingParams


def test_convert_makes_a_folder_that_serves(tmp_path):
    model = tiny_checkpoint(tmp_path / "model: #1, mine", **BRIEF)
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 40, *SMALL)
    assert status == 0, output
    assert shlex.join(["tidar", "up", "--model", str(model), "--adapter", str(tmp_path / "drafter")]) in output
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "README.md", "adapter.json", "adapter.safetensors",
    ]  # fmt: skip
    config = read_adapter_config(tmp_path / "drafter")
    data, corpus = config.training["data"], ShardStore(tmp_path / "drafter.work" / "data", HEADER).read().corpus
    for counts, indices in zip((data, data["held_out"]), corpus.split(), strict=True):
        assert sum(counts["documents"].values()) == len(indices) > 1
        assert counts["own_tokens"] == sum(int(corpus.document(index)[1].sum()) for index in indices)
    assert data["own_tokens"] + data["held_out"]["own_tokens"] >= 3000
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"**{config.training['held_out']['tokens_per_step']:.2f} tokens per step**" in card
    assert config.training["held_out"]["tokens_per_step"] > 1.1
    assert np.cumprod(config.holds) == pytest.approx(config.training["held_out"]["all_right"], abs=0.005)
    assert "Questions and answers are the base model's own" in card
    assert shlex.join(["tidar", "up", "--model", str(model), "--adapter", "drafter"]) in card
    front_matter = yaml.safe_load(card.split("---")[1])
    assert front_matter["library_name"] == "tidar"
    assert "base_model" not in front_matter, "a hub refuses a card that names a path"
    held_out = data["held_out"]
    documents = sum(held_out["documents"].values())
    assert f"{data['own_tokens']:,} tokens to learn from. {documents} more documents, with" in card

    learnt = f"{sum(data['documents'].values())} documents, {data['own_tokens']:,} tokens to learn from"
    assert f"{learnt}; {documents} more, with {held_out['own_tokens']:,} such tokens, are" in output

    # The base's answers with the adapter are bit for bit those without.
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full")
    prompts = [tuple(tokens.tolist()) for tokens, _ in random_documents(12)]
    answers = []
    for adapter in (str(tmp_path / "drafter"), "none"):
        engine = load_engine(EngineConfig(str(model), adapter, "float32", "cpu"))
        assert engine.info.expected_acceptance == (() if adapter == "none" else config.holds)
        answers.append(answer_all(engine, prompts, [params] * 12))
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert sum(step.accepted for answer in answers[0] for step in answer.steps) > 10

    # Where its training is gone, nothing untrained takes its place.
    kept = (tmp_path / "drafter" / "adapter.safetensors").read_bytes()
    (tmp_path / "drafter.work" / "training").rename(tmp_path / "elsewhere")
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 50, *SMALL)
    assert status == 1
    assert f"holds what 40 steps have trained, and the training itself is not in {tmp_path}" in output
    assert (tmp_path / "drafter" / "adapter.safetensors").read_bytes() == kept
    (tmp_path / "elsewhere").rename(tmp_path / "drafter.work" / "training")

    # Started again with more steps, it goes on: no new data, and the steps that were there are kept.
    shards = sorted((tmp_path / "drafter.work" / "data").iterdir())
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 50, *SMALL)
    assert status == 0, output
    assert "going on from step 40" in output
    assert sorted((tmp_path / "drafter.work" / "data").iterdir()) == shards

    # Another base of the same shape does not go on with it.
    other = tiny_checkpoint(tmp_path / "other", seed=1, **BRIEF)
    status, output = run_command(other, "--out", tmp_path / "drafter", "--steps", 60, *SMALL)
    assert status == 1
    assert f"holds the words of {model.name}: they are trained on as they are" in output
    base = read_adapter_config(tmp_path / "drafter").base
    assert base.name == model.name
    assert f"holds a training with base {base.fingerprint}, not " in output

    # Another training may begin from what this one made.
    status, output = run_command(
        model, "--out", tmp_path / "more", "--steps", 2, "--start", tmp_path / "drafter",
        "--data", tmp_path / "drafter.work" / "data", *SMALL,
    )  # fmt: skip
    assert status == 0, output
    assert read_adapter_config(tmp_path / "more").training["held_out"]["tokens_per_step"] > 1.1


def test_a_training_goes_on_from_what_it_began_from_alone(tmp_path, gathered):
    model, data = gathered
    for seed in (0, 1):
        tiny_adapter(tmp_path / f"adapter{seed}", model, seed=seed)
    common = (model, "--data", data, *SMALL[:6], *SMALL[8:])

    def run_from(start: object, steps: int, out: str = "out") -> tuple[int, str]:
        return run_command(*common, "--out", tmp_path / out, "--start", start, "--steps", steps)

    status, output = run_from(tmp_path / "adapter0", 2)
    assert status == 0, output
    begun = read_adapter_config(tmp_path / "out").training["start"]
    assert f"begun from an adapter ({begun})" in (tmp_path / "out" / "README.md").read_text()
    for start in (tmp_path / "adapter1", "none"):
        status, output = run_from(start, 4)
        assert status == 1
        error = output.splitlines()[-1]
        assert f"holds a training with start {begun}, not " in error
        assert error.endswith("go on with that, or choose another --out")

    # Wherever the adapter has come to lie.
    (tmp_path / "adapter0").rename(tmp_path / "moved")
    status, output = run_from(tmp_path / "moved", 4)
    assert status == 0, output
    assert "going on from step 2" in output

    # One that is replaced by what comes of it is itself again.
    for steps in (2, 4):
        status, output = run_from(tmp_path / "adapter1", steps, "adapter1")
        assert status == 0, output
    assert "going on from step 2" in output


def test_a_drafter_that_is_better_than_its_checkpoints_stays(tmp_path, gathered):
    """As where the checkpoint that was newest is torn, and with it what it knew of the best."""
    (model, data), out = gathered, tmp_path / "drafter"
    common = (model, "--out", out, "--data", data, *SMALL)
    status, output = run_command(*common, "--steps", 2)
    assert status == 0, output
    config = json.loads((out / "adapter.json").read_text())
    config["training"]["held_out"]["tokens_per_step"] = 3.5
    (out / "adapter.json").write_text(json.dumps(config))
    status, output = run_command(*common, "--steps", 4)
    assert "3.50 tokens per step on held-out documents" in output
    assert json.loads((out / "adapter.json").read_text()) == config

    for file in out.iterdir():
        file.unlink()
    status, output = run_command(*common, "--steps", 5)
    assert status == 0, output
    found = read_adapter_config(out).training["held_out"]["tokens_per_step"]
    printed, found_in = output.splitlines()[-2].split(maxsplit=1)
    assert float(printed) == pytest.approx(found, abs=0.0051), "rounded once, and once more where it is kept"
    assert found_in.startswith("tokens per step on held-out documents")


def test_a_drafter_may_adapt_some_layers_alone(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF | {"layers": 3})
    chosen = ("--layers", "0,2", "--block-sizes", "growing", "--steps", 6)
    status, output = run_command(model, "--out", tmp_path / "drafter", *chosen, *SMALL)
    assert status == 0, output
    assert read_adapter_config(tmp_path / "drafter").layers == (0, 2)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "of layers 0, 2;" in card
    assert "blocks grew from 2 slots" in card
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, drafts="full")
    prompts = [tuple(tokens.tolist()) for tokens, _ in random_documents(6)]
    answers = []
    for adapter in (str(tmp_path / "drafter"), "none"):
        engine = load_engine(EngineConfig(str(model), adapter, "float32", "cpu"))
        answers.append(answer_all(engine, prompts, [params] * 6))
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]

    status, output = run_command(model, "--out", tmp_path / "drafter", "--layers", "0,1", *chosen[2:], *SMALL)
    assert status == 1
    assert "holds a training of other weights (--layers, --projections or another model)" in output.splitlines()[-1]

    again = (model, "--start", tmp_path / "drafter", "--data", tmp_path / "drafter.work" / "data", *SMALL, "--steps", 1)
    status, output = run_command(*again, "--out", tmp_path / "less", "--layers", "1-2", "--projections", "qkv,o")
    assert status == 0, output
    less = read_adapter_config(tmp_path / "less")
    assert (less.layers, less.projections) == ((2,), ("qkv", "o"))
    status, output = run_command(*again, "--out", tmp_path / "none", "--layers", "1")
    assert (status, "drafter adapts nothing of what --projections and --layers name" in output) == (1, True)


def test_weights_that_memory_does_not_hold_are_told(tmp_path, gathered, monkeypatch):
    monkeypatch.setattr(speed, "measure_peak", lambda device, dtype: 1e10 if dtype is torch.float32 else 1e9)
    model, data = gathered
    asked = (model, "--out", tmp_path / "drafter", "--data", data, "--steps", 2, *SMALL[:2])
    monkeypatch.setattr(base, "free_memory_and_swap", lambda: 1000)
    status, output = run_command(*asked)
    assert status == 1
    assert "takes 0.0 GiB of memory in bfloat16, and 0.0 GiB are free: free some, or" in output.splitlines()[-1]
    monkeypatch.setattr(base, "free_memory_and_swap", partial(next, iter([1 << 40, 1000])))
    status, output = run_command(*asked)
    assert status == 1
    assert "in fp32 takes 0.0 GiB of memory more, and 0.0 GiB are free: free some, take a" in output.splitlines()[-1]
    # What the generator has left counts as free.
    freed: list[int] = []
    monkeypatch.setattr(base, "free_memory_and_swap", lambda: sum(freed))
    monkeypatch.setattr(base, "give_back_memory", lambda device: freed.append(1 << 40))
    status, output = run_command(*asked)
    assert status == 0, output


@pytest.mark.parametrize(("bf16", "wide"), [(1e9, True), (2e10, False)])
def test_training_is_in_fp32_where_a_processor_is_slow_in_bf16(tmp_path, gathered, monkeypatch, bf16, wide):
    monkeypatch.setattr(speed, "measure_peak", lambda device, dtype: 1e10 if dtype is torch.float32 else bf16)
    trained: list[torch.dtype] = []

    def noted(base, *arguments):
        trained.append(base.dtype)
        return train_drafter(base, *arguments)

    monkeypatch.setattr(run, "train_drafter", noted)
    model, data = gathered
    in_bf16 = [*SMALL[: SMALL.index("--dtype")], *SMALL[SMALL.index("--dtype") + 2 :]]
    status, output = run_command(model, "--out", tmp_path / "drafter", "--data", data, "--steps", 2, *in_bf16)
    assert status == 0, output
    assert ("training in fp32: this processor is slow in bfloat16" in output) == wide
    assert trained == [torch.float32 if wide else torch.bfloat16]


def test_the_best_is_kept_and_measured_on_documents_that_are_not_trained_on(tmp_path, gathered, monkeypatch):
    trained: list[bytes] = []
    judged: list[bytes] = []

    def measuring(base, start, data, config, budget, directory, watch, *_) -> Progress:
        trained.extend(tokens.tobytes() for tokens, _ in data.sampler.next_documents(Progress(), 10**6, 64))
        judged.extend(tokens.tobytes() for tokens, _ in data.held_out.documents)
        for step, found in enumerate((2.0, 1.5)):
            result = HeldOutResult(1, found, {"chat": found}, 0.5, (0.5, 0.4, 0.3))
            watch.measured(result, start, Progress(step=step), found == 2.0)
        return Progress(step=1, best=2.0)

    monkeypatch.setattr(run, "train_drafter", measuring)
    model, data = gathered
    status, output = run_command(model, "--out", tmp_path / "drafter", "--data", data, "--steps", 1, *SMALL)
    assert status == 0, output
    assert read_adapter_config(tmp_path / "drafter").training["held_out"]["tokens_per_step"] == 2.0
    assert judged
    assert not [tokens for tokens in judged if any(each.startswith(tokens) for each in trained)]


def test_convert_learns_from_text_and_prompts_through_transformers(tmp_path, monkeypatch):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    (tmp_path / "text").write_text("".join(f"The quick brown fox jumps over {i} lazy dogs.\n" for i in range(400)))
    (tmp_path / "prompts").write_text("What is the answer?\n" + json.dumps({"prompt": "Why do dogs mind?"}))
    status, output = run_command(
        model, "--out", tmp_path / "drafter", "--steps", 4, "--generator", "transformers",
        "--text", tmp_path / "text", "--prompts", tmp_path / "prompts", *SMALL,
    )  # fmt: skip
    assert status == 0, output
    data = read_adapter_config(tmp_path / "drafter").training["data"]
    assert data["documents"]["prompt"] == 2
    assert data["documents"]["file"] >= 4
    assert data["documents"]["chat"] > 4
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "The given prompts and texts came from elsewhere and may have terms of their own" in card
    assert "are the base model's own" not in card

    # Prompts that come later are answered, and those that were asked cost no start of the generator.
    (tmp_path / "prompts").write_text("What is the answer?\nHow so, and why?\n" + "And so on? " * 500)
    read: list[Path] = []
    monkeypatch.setattr(gathering, "add_text", lambda *given: read.append(given[1]) or add_text(*given))
    for generating in (True, False):
        status, output = run_command(
            model, "--out", tmp_path / "drafter", "--steps", 4, "--generator", "transformers",
            "--text", tmp_path / "text", "--prompts", tmp_path / "prompts", *SMALL,
        )  # fmt: skip
        assert status == 0, output
        assert read == [tmp_path / "text"], "once"
        assert [f"reading {path}" in output for path in (tmp_path / "text", tmp_path / "prompts")] == [True] * 2
        read.clear()
        assert ("generating with transformers" in output) == generating
        assert "1 of --prompts left out: longer than the" in output


@pytest.mark.parametrize("generator", ["engine", "transformers"])
def test_a_model_of_few_positions_says_what_fits(tmp_path, generator):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 2, "--generator", generator, *SMALL)
    assert status == 0, output
    corpus = ShardStore(tmp_path / "drafter.work" / "data", HEADER).read().corpus
    assert set(corpus.kinds.tolist()) >= {KINDS.index("chat"), KINDS.index("text")}
    assert 128 <= np.diff(corpus.ends).max() <= 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", 500), "rank 500 does not fit"),
        (("--projections", "qkv,up"), "choose some of qkv, o, gate_up, down"),
        (("--layers", "1-"), "--layers 1-: write all, or numbers from 0 on, as in 0,20-29"),
        (("--layers", "0-99999999999"), "--layers 0-99999999999: no model has so many layers"),
        (("--layers", "0-2"), "has no layer 1: choose from 0 to 0"),
        (("--start", "default"), "no drafter is shipped for"),
        (("--start", "/nowhere"), "no adapter at /nowhere"),
        (("--text", "/nowhere"), "the text /nowhere cannot be read"),
        (("--prompts", "/nowhere"), "the prompts /nowhere cannot be read"),
        (("--mode", "full", "--slot-head", 5), "--slot-head is for drafters: leave it out where --mode is full"),
        (("--rows", 3, "--block-length", 4), "--rows 3 is less than one block of 4 slots"),
        (("--out", "/dev/null"), "/dev/null cannot be used (Not a directory): choose a new folder for --out"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, arguments, message):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 1, *SMALL[:4], *arguments)
    assert status == 1
    errors = [line for line in output.splitlines() if line.startswith("tidar: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments", [("--seed", 2**64), ("--slot-head", 10**9), ("--minutes", "inf"), ("--minutes", "nan")]
)
def test_numbers_that_nothing_could_be_done_with_are_refused_before_anything_is_read(tmp_path, arguments):
    status, output = run_command(tmp_path / "none", *arguments)
    assert status == 2
    assert arguments[0] in output


def test_a_text_that_is_none_at_its_end_is_told_before_any_of_it_is_stored(tmp_path):
    model, text = tiny_checkpoint(tmp_path / "model", **BRIEF), tmp_path / "text"
    text.write_bytes(b"The quick brown fox jumps over lazy dogs.\n" * 9000 + b"\xff")
    status, output = run_command(model, "--out", tmp_path / "out", "--text", text, "--steps", 1, *SMALL)
    assert (status, output.splitlines()) == (
        1, [f"tidar: the text {text} cannot be read (it is not in UTF-8): save it as plain text in UTF-8"]
    )  # fmt: skip
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("mode", [(), ("--mode", "full", "--text", "text")])
def test_where_no_folder_can_be_is_told_before_anything_is_gathered(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    (tmp_path / "text").write_text("".join(f"The quick brown fox jumps over {i} lazy dogs.\n" for i in range(100)))
    out, data = tmp_path / "text" / "out", tmp_path / "data"
    status, output = run_command(model, "--out", out, "--data", data, "--steps", 1, *SMALL[:4], *mode)
    assert status == 1
    assert output == f"tidar: {out}.work cannot be made (Not a directory): choose another --out\n"
    assert not data.exists()


@pytest.mark.parametrize("asks", ["exists", "is_symlink", "iterdir"])
def test_an_out_that_the_user_may_not_look_into_is_one_line(tmp_path, monkeypatch, asks):
    model, out = tiny_checkpoint(tmp_path / "model", **BRIEF), tmp_path / "theirs" / "out"
    ours = getattr(Path, asks)

    def refused(path: Path, *given: object, **named: object) -> object:
        if path == out:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return ours(path, *given, **named)

    out.mkdir(parents=True)
    monkeypatch.setattr(Path, asks, refused)
    status, output = run_command(model, "--out", out, "--steps", 1, *SMALL)
    assert status == 1
    assert output == f"tidar: {out} cannot be used (Permission denied): choose a new folder for --out\n"


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    status, output = run_command(model, "--out", model, "--steps", 1, *SMALL)
    assert status == 1
    assert "holds something else than a drafter: choose a new or empty folder" in output
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_an_out_that_is_no_place_for_a_drafter_is_told_before_anything_is_gathered(tmp_path):
    model, out = tiny_checkpoint(tmp_path / "model", **BRIEF), tmp_path / "out"
    status, output = run_command(model, "--out", out, "--data", out / "data", "--steps", 1, *SMALL)
    assert (status, output) == (
        1, f"tidar: {out / 'data'} lies in {out}: choose a folder outside of --out for --data\n"
    )  # fmt: skip
    out.symlink_to(tmp_path / "unmounted")
    status, output = run_command(model, "--out", out, "--steps", 1, *SMALL)
    assert status == 1
    assert output == f"tidar: {out} is a link to what is not there: mend it, or choose a new folder for --out\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


KILLED = """
import sys
import tidar_core.convert.own_words as own_words, tidar_core.convert.pace as pace
own_words.FLUSH_SECONDS, pace.SavePace.due = 0.05, lambda *_: True
import typer
from tidar_core.convert.command import convert_command
sys.argv[1:] = {arguments!r}
typer.run(convert_command)
"""


def test_a_killed_conversion_goes_on(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    arguments = [
        str(each) for each in (model, "--out", tmp_path / "drafter", "--steps", 60, *SMALL, "--learning-rate", 0.005)
    ]
    script = KILLED.format(arguments=arguments)
    data, training = tmp_path / "drafter.work" / "data", tmp_path / "drafter.work" / "training"

    def killed_when(there) -> None:
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not there() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()

    killed_when(lambda: len(list(data.glob("*.safetensors"))) >= 2)
    shards = set(data.glob("*.safetensors"))
    killed_when(lambda: len(list(training.glob("*.safetensors"))) >= 2)
    assert shards <= set(data.glob("*.safetensors"))
    reached = max(int(path.stem.removeprefix("step-")) for path in training.glob("step-*.safetensors"))
    status, output = run_command(*arguments)
    assert status == 0, output
    assert f"going on from step {reached}" in output
    tiny = load_engine(EngineConfig(str(model), str(tmp_path / "drafter"), "float32", "cpu"))
    assert tiny.info.block_length == 4


def test_a_tilde_is_home_also_behind_an_equals_sign(gathered, tmp_path, monkeypatch):
    """Where shells leave it as it is; a folder of that name would be made where the command runs."""
    model, data = gathered
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # with the kernels that were compiled once
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(model)
    (tmp_path / "text").write_text("word for word\n" * 200)
    status, output = run_command(
        model, "--out=~/out", f"--data=~/{data.name}", "--text=~/text", "--steps", 1, *SMALL
    )  # fmt: skip
    assert status == 0, output
    status, output = run_command(
        model, "--out=~/next", f"--data=~/{data.name}", "--start=~/out", "--steps", 1, *SMALL
    )  # fmt: skip
    assert status == 0, output
    assert not (model / "~").exists()
    assert load_engine(EngineConfig(str(model), "~/out", device="cpu")).info.adapter == "out"
