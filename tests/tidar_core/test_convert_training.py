"""The trainer: it learns, resumes to the same loss, survives kills and bad luck, and leaves a folder that serves."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.tidar_core.trained import TinyBase, corpus_of, random_documents, tiny_base
from tests.tiny import tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert import run, speed, trainer
from tidar_core.convert.blocks import BlockSizes, block_of_step
from tidar_core.convert.checkpoint import Progress, load_checkpoint
from tidar_core.convert.command import convert_command
from tidar_core.convert.drafter import PROJECTIONS, new_drafter
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.losses import LossConfig
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.shards import Corpus
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, Watch, learning_rate, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.engine import load_engine
from tidar_core.model.adapter_config import read_adapter_config
from tidar_core.model.weights import named_tensors
from tidar_core.request import SamplingParams

CONFIG = TrainConfig(
    block=4, anchors=16, rows_a_step=128, learning_rate=1e-2, warmup=5, measure_every=10, vocabulary=200
)


SIMPLE = {"layers": 1, "hidden": 48}  # a model whose words a small drafter can learn to foresee in seconds


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyBase:
    return tiny_base(tmp_path_factory.mktemp("tiny"), **SIMPLE)


def own_words_of(tiny: TinyBase, count: int) -> Corpus:
    """Greedy answers of the tiny base to random prompts."""
    engine = load_engine(EngineConfig(str(tiny.directory), "none", "float32", "cpu", max_running=64))
    prompts = [tuple(tokens[:8].tolist()) for tokens, _ in random_documents(count)]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    answers = answer_all(engine, prompts, [params] * count)
    texts = [np.array([*prompt, *answer.tokens], np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    return corpus_of([(text, np.arange(len(text)) >= 8) for text in texts])


@pytest.fixture(scope="module")
def corpus(tiny) -> Corpus:
    return own_words_of(tiny, 160)


def train(
    tiny: TinyBase, corpus: Corpus, directory: Path, steps: int, config: TrainConfig = CONFIG, **watch
) -> tuple[list[StepReport], Progress]:
    start = new_drafter(tiny.identity, tiny.base.weights.embedding, 8, PROJECTIONS, config.block, 0)
    learnt, held = corpus.split()
    sampler = Sampler(corpus, learnt.tolist(), config.block, tiny.base.config.max_positions, config.seed)
    windows = choose_windows(corpus, held.tolist(), config.block, tiny.base.config.max_positions)
    seen: list[StepReport] = []
    told = Watch(step=lambda r: seen.append(replace(r, progress=replace(r.progress))), **watch)
    vocabulary = Vocabulary(corpus, tiny.base.weights.head, config.vocabulary)
    budget = Budget(steps=steps)
    return seen, train_drafter(tiny.base, start, sampler, vocabulary, windows, config, budget, directory, told)


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(0.5, "product")])
def test_tokens_per_step_rise(tiny, corpus, tmp_path, within_block, loss):
    measured = []
    config = replace(CONFIG, within_block=within_block, loss=loss, measure_every=100)
    _, progress = train(
        tiny, corpus, tmp_path, 200, config, measured=lambda result, *_: measured.append(result.tokens_per_step)
    )
    assert measured[-1] > measured[0] + 0.1
    assert progress.best == max(measured)


@pytest.mark.parametrize(("sizes", "seen"), [("mixed", {2, 3, 4}), ("growing", {2, 3, 4})])
def test_blocks_may_be_of_several_sizes(tiny, corpus, tmp_path, monkeypatch, sizes, seen):
    found: list[int] = []

    def noted(*arguments):
        found.append(block_of_step(*arguments))
        return found[-1]

    monkeypatch.setattr(trainer, "block_of_step", noted)
    measured: list[float] = []
    config = replace(CONFIG, block_sizes=sizes, measure_every=100)
    train(tiny, corpus, tmp_path, 200, config, measured=lambda result, *_: measured.append(result.tokens_per_step))
    assert set(found) == seen
    assert sizes == "mixed" or (found == sorted(found) and found[100:] == [4] * 100)
    assert measured[-1] > measured[0] + 0.1


@given(whole=st.integers(2, 16), used=st.floats(0, 1), sizes=st.sampled_from(get_args(BlockSizes)), seed=st.integers(0))
def test_a_block_has_from_two_to_all_slots(whole, used, sizes, seed):
    block = block_of_step(sizes, whole, used, np.random.default_rng(seed))
    assert 2 <= block <= whole
    assert sizes == "mixed" or used < 0.5 or block == whole


def test_a_resumed_training_has_the_same_losses(tiny, corpus, tmp_path, monkeypatch):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 24)

    class Stopped(Exception):
        pass

    def stop(result, adapter, progress, best) -> None:
        if progress.step == 10:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(Stopped):
            train(tiny, corpus, tmp_path / "parts", 24, measured=stop)
    lines: list[str] = []
    rest, progress = train(tiny, corpus, tmp_path / "parts", 24, line=lines.append)
    assert lines == ["going on from step 10"]
    assert [report.loss for report in rest] == [report.loss for report in whole[10:]]
    assert progress.step == 24
    assert progress.rows == sum(report.mask_rows for report in whole)


def test_parts_of_a_step_add_up(tiny, corpus, tmp_path):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 4)
    parts, _ = train(tiny, corpus, tmp_path / "parts", 4, replace(CONFIG, rows_a_pass=24))
    for one, other in zip(whole, parts, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)


def test_a_broken_checkpoint_falls_back_to_the_one_before(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 3)
    train(tiny, corpus, tmp_path, 6)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    files[-1].write_bytes(files[-1].read_bytes()[:-100])
    lines: list[str] = []
    seen, _ = train(tiny, corpus, tmp_path, 6, line=lines.append)
    assert "cannot be read" in lines[0]
    assert lines[1] == "going on from step 3"
    assert len(seen) == 3


def test_other_settings_do_not_go_on(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"learning rate 0\.01, not 0\.5"):
        train(tiny, corpus, tmp_path, 4, replace(CONFIG, learning_rate=0.5))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 4)
    broken = replace(tiny.base.weights, final_norm=torch.full_like(tiny.base.weights.final_norm, torch.nan))
    harmed = replace(tiny, base=replace(tiny.base, weights=broken))
    with pytest.raises(ConfigError, match=r"not a number at step 4: .*kept.*--learning-rate") as raised:
        train(harmed, corpus, tmp_path, 8)
    assert "\n" not in str(raised.value)
    progress, tensors, _ = load_checkpoint(tmp_path, {})
    assert progress.step == 4
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_training_ends_where_nothing_is_gained(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=2, patience=3)
    seen, progress = train(tiny, corpus, tmp_path, 100, config)
    assert len(seen) == 6
    assert progress.stale == 3


def test_new_starts_are_no_reason_to_end(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=1000, patience=3)
    for _ in range(5):
        _, progress = train(tiny, corpus, tmp_path, 4, config)
        assert progress.stale == 1


def test_the_checkpoint_of_the_best_drafter_is_there_before_it_is_kept(tiny, corpus, tmp_path):
    """A run that is killed while it keeps its best knows afterwards how good that was."""
    with pytest.raises(InterruptedError):
        train(tiny, corpus, tmp_path, 100, replace(CONFIG, measure_every=40), measured=interrupted_at(80))
    saved, _, _ = load_checkpoint(tmp_path, {})
    assert saved.step == 80
    kept: list[tuple[int, bool]] = []
    train(
        tiny, corpus, tmp_path, 81, replace(CONFIG, measure_every=40),
        measured=lambda result, adapter, progress, best: kept.append((progress.step, best)),
    )  # fmt: skip
    assert kept[0] == (80, True)


def interrupted_at(step: int) -> Callable[..., None]:
    """As a kill while a measurement is told, once the checkpoint's time has come."""

    def told(result: object, adapter: object, progress: Progress, best: bool) -> None:
        if progress.step == step:
            raise InterruptedError

    return told


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(tiny, corpus, tmp_path, monkeypatch):
    train(tiny, corpus, tmp_path, 2)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            train(tiny, corpus, tmp_path, 4)
    assert load_checkpoint(tmp_path, {})[0].step == 2


def test_a_rank_that_does_not_fit_is_one_line(tiny):
    with pytest.raises(ConfigError, match=r"rank 49 does not fit .* choose 1 to 48"):
        new_drafter(tiny.identity, tiny.base.weights.embedding, 49, PROJECTIONS, 4, 0)


def test_a_new_drafter_adapts_what_was_asked_for_and_changes_nothing_yet(tiny):
    drafter = new_drafter(tiny.identity, tiny.base.weights.embedding, 4, ("qkv", "down"), 4, 0)
    names = {name for name, _ in named_tensors(drafter)}
    assert names == {"mask_embedding"} | {
        f"layers.{i}.{p}.{m}" for i in range(tiny.identity.layers) for p in ("qkv", "down") for m in "AB"
    }
    assert all(tensor.eq(0).all() for name, tensor in named_tensors(drafter) if name.endswith(".B"))


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=10, final_rate=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(config, 500, 0.5) == pytest.approx(0.55)
    assert learning_rate(config, 1000, 1.0) == pytest.approx(0.1)


def test_documents_come_once_an_epoch(corpus):
    learnt, _ = corpus.split()
    sampler, progress = Sampler(corpus, learnt.tolist(), 4, 1024, 0), Progress()
    seen: list[bytes] = []
    while progress.epoch == 0:
        seen += [tokens.tobytes() for tokens, _ in sampler.next_documents(progress, 8, 16)]
    assert len(set(seen[: len(sampler)])) == len(sampler) == len(learnt)


# The command


def run_command(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(convert_command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


SMALL = ("--own-tokens", 3000, "--dtype", "float32", "--block-length", 4, "--rank", 8, "--rows", 256, "--threads", 1)


def test_convert_makes_a_folder_that_serves(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 40, *SMALL)
    assert status == 0, output
    assert f"tidar up --model {model} --adapter {tmp_path / 'drafter'}" in output
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "README.md", "adapter.json", "adapter.safetensors",
    ]  # fmt: skip
    config = read_adapter_config(tmp_path / "drafter")
    assert config.training["data"]["own_tokens"] >= 3000
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"**{config.training['held_out']['tokens_per_step']:.2f} tokens per step**" in card
    assert config.training["held_out"]["tokens_per_step"] > 1.1
    assert np.cumprod(config.holds) == pytest.approx(config.training["held_out"]["all_right"], abs=0.005)
    assert "Questions and answers are the base model's own" in card

    # The base's answers with the adapter are bit for bit those without.
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full")
    prompts = [tuple(tokens.tolist()) for tokens, _ in random_documents(12)]
    answers = []
    for adapter in (str(tmp_path / "drafter"), "none"):
        engine = load_engine(EngineConfig(str(model), adapter, "float32", "cpu"))
        assert engine.info.expected_holds == (() if adapter == "none" else config.holds)
        answers.append(answer_all(engine, prompts, [params] * 12))
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert sum(step.accepted for answer in answers[0] for step in answer.steps) > 10

    # Started again with more steps, it goes on: no new data, and the steps that were there are kept.
    shards = sorted((tmp_path / "drafter.work" / "data").iterdir())
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 50, *SMALL)
    assert status == 0, output
    assert "going on from step 40" in output
    assert sorted((tmp_path / "drafter.work" / "data").iterdir()) == shards

    # Another training may begin from what this one made.
    status, output = run_command(
        model, "--out", tmp_path / "more", "--steps", 2, "--start", tmp_path / "drafter",
        "--data", tmp_path / "drafter.work" / "data", *SMALL,
    )  # fmt: skip
    assert status == 0, output
    assert read_adapter_config(tmp_path / "more").training["held_out"]["tokens_per_step"] > 1.1


def test_a_drafter_may_adapt_some_layers_alone(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", layers=3, hidden=48)
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

    again = (model, "--start", tmp_path / "drafter", "--data", tmp_path / "drafter.work" / "data", *SMALL, "--steps", 1)
    status, output = run_command(*again, "--out", tmp_path / "less", "--layers", "1-2", "--projections", "qkv,o")
    assert status == 0, output
    less = read_adapter_config(tmp_path / "less")
    assert (less.layers, less.projections) == ((2,), ("qkv", "o"))
    status, output = run_command(*again, "--out", tmp_path / "none", "--layers", "1")
    assert (status, "drafter adapts nothing of what --projections and --layers name" in output) == (1, True)


@pytest.mark.parametrize(("bf16", "wide"), [(1e9, True), (2e10, False)])
def test_training_is_in_fp32_where_a_processor_is_slow_in_bf16(tmp_path, monkeypatch, bf16, wide):
    monkeypatch.setattr(speed, "measure_peak", lambda device, dtype: 1e10 if dtype is torch.float32 else bf16)
    trained: list[torch.dtype] = []

    def noted(base, *arguments):
        trained.append(base.dtype)
        return train_drafter(base, *arguments)

    monkeypatch.setattr(run, "train_drafter", noted)
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    in_bf16 = [*SMALL[: SMALL.index("--dtype")], *SMALL[SMALL.index("--dtype") + 2 :]]
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 2, *in_bf16)
    assert status == 0, output
    assert ("training in fp32: this processor is slow in bfloat16" in output) == wide
    assert trained == [torch.float32 if wide else torch.bfloat16]


def test_convert_learns_from_text_and_prompts_through_transformers(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
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
    (tmp_path / "prompts").write_text("What is the answer?\nHow so, and why?")
    for generating in (True, False):
        status, output = run_command(
            model, "--out", tmp_path / "drafter", "--steps", 4, "--generator", "transformers",
            "--prompts", tmp_path / "prompts", *SMALL,
        )  # fmt: skip
        assert status == 0, output
        assert ("generating with transformers" in output) == generating


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", 500), "rank 500 does not fit"),
        (("--projections", "qkv,up"), "choose some of qkv, o, gate_up, down"),
        (("--layers", "1-"), "--layers 1-: write all, or numbers from 0 on, as in 0,20-29"),
        (("--layers", "0-2"), "has no layer 1: choose from 0 to 0"),
        (("--start", "default"), "no drafter is shipped for"),
        (("--start", "/nowhere"), "no adapter at /nowhere"),
        (("--text", "/nowhere"), "the text /nowhere cannot be read"),
        (("--prompts", "/nowhere"), "the prompts /nowhere cannot be read"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, arguments, message):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
    status, output = run_command(model, "--out", tmp_path / "drafter", "--steps", 1, *SMALL[:4], *arguments)
    assert status == 1
    errors = [line for line in output.splitlines() if line.startswith("tidar: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output


KILLED = """
import sys
import tidar_core.convert.own_words as own_words, tidar_core.convert.trainer as trainer
own_words.FLUSH_SECONDS = trainer.CHECKPOINT_SECONDS = 0.05
import typer
from tidar_core.convert.command import convert_command
sys.argv[1:] = {arguments!r}
typer.run(convert_command)
"""


def test_a_killed_conversion_goes_on(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **SIMPLE)
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
