"""The training of full weights: it resumes, knows its best after a kill, and survives bad luck."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from tests.tidar_core.convert.trained import Killed, corpus_of, random_documents
from tests.tidar_core.model.loaded import load
from tests.tiny import tiny_checkpoint
from tidar_core.config import ConfigError
from tidar_core.convert import full, full_run, run
from tidar_core.convert.base import Base
from tidar_core.convert.checkpoint import Progress, load_checkpoint
from tidar_core.convert.full import FullConfig, FullDrafts, FullTraining, doubled, joint_loss, measure_full
from tidar_core.convert.full_folder import check_replaceable, full_steps, kept_tokens_per_step, part_of
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.pace import SavePace
from tidar_core.convert.run import convert
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.screen import TerminalScreen
from tidar_core.convert.trainer import Budget
from tidar_core.model.configuration import load_config
from tidar_core.model.contract import read_own_drafter
from tidar_core.model.dense import check_dense, dense_model
from tidar_core.model.sources import ModelSource, find_model
from tidar_core.model.tokenizer import load_tokenizer


@dataclass
class Tiny:
    """What `train_full` needs, for a model and texts of next to nothing."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerFast
    directory: Path
    lines: list[str] = field(default_factory=list)
    trained: Callable[..., None] = lambda *_: None
    documents: int = 12

    @property
    def out(self) -> Path:
        return self.directory / "out"

    def line(self, text: str) -> None:
        self.lines.append(text)

    def train(self, steps: int | Budget, **changed: float) -> Progress:
        config = FullConfig(block=4, learning_rate=0.0, final_learning_rate=0.0, tokens_a_step=100)
        config = replace(config, **changed)
        budget = steps if isinstance(steps, Budget) else Budget(steps)
        base = Base(self.source, load_config(self.source), self.tokenizer, torch.device("cpu"))
        return full_run.train_full(
            base, corpus_of(random_documents(self.documents)), config, budget, self.out, self.directory / "work", self
        )


@pytest.fixture
def tiny(tmp_path) -> Tiny:
    source = find_model(str(tiny_checkpoint(tmp_path / "model", layers=1, vocab=511)))
    return Tiny(source, load_tokenizer(source), tmp_path)


def test_a_head_that_is_the_embedding_is_written_once(tiny):
    tiny.train(1)
    with safe_open(tiny.out / "model.safetensors", framework="pt") as file:
        written = set(file.keys())
    model = dense_model(find_model(str(tiny.out)), torch.bfloat16)
    assert written == {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in written
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("architecture", ["glm4_moe", "ernie4_5_moe"])
def test_what_experts_are_chosen_by_is_written_as_it_was(tmp_path, architecture):
    source = find_model(str(tiny_checkpoint(tmp_path / "model", architecture, vocab=511)))
    tiny = Tiny(source, load_tokenizer(source), tmp_path)
    tiny.train(1, learning_rate=1e-3)
    before, after = (load(path)[1].layers[1].expert_bias for path in (source.directory, tiny.out))
    assert before is not None
    assert torch.equal(before, after)


def test_starts_alone_do_not_end_a_training(tiny):
    stale = [tiny.train(steps).stale for steps in (8, 8, 8, 10)]
    assert stale == [1, 1, 1, 2]


def test_another_base_of_the_same_shape_does_not_go_on_from_this_ones_weights(tiny, tmp_path):
    tiny.train(2)
    other = find_model(str(tiny_checkpoint(tmp_path / "other", layers=1, vocab=511, seed=1)))
    with pytest.raises(ConfigError, match="holds a training with base"):
        Tiny(other, tiny.tokenizer, tiny.directory).train(4)
    tiny.train(4)


def test_a_training_that_ended_early_goes_on_with_more_budget(tiny):
    for steps in (4, 5, 6):
        tiny.train(steps)
    assert tiny.train(6).stale == 3
    assert tiny.train(8).stale == 1


def test_a_training_goes_on_with_what_a_user_is_told_to_lower(tiny):
    tiny.train(1)
    assert tiny.train(2, learning_rate=1e-6, tokens_a_step=50).step == 2
    assert read_own_drafter(tiny.out).training.keys() >= {"learning_rate", "tokens_a_step"}
    with pytest.raises(ConfigError, match=r"clip 1\.0, not 0\.5"):
        tiny.train(3, clip=0.5)


def test_a_training_that_an_earlier_version_began_goes_on(tiny):
    """Its settings are compared by the names that it gave them."""
    tiny.train(1)
    (checkpoint,) = (tiny.directory / "work").glob("step-*.safetensors")
    with safe_open(checkpoint, framework="pt") as file:
        settings = json.loads(file.metadata()["about"])["settings"]
    assert settings.keys() == {
        "base", "mode", "block", "within_block", "alpha", "final_rate", "clip", "seed",
    }  # fmt: skip
    assert (settings["alpha"], settings["final_rate"]) == (1.0, 0.0)


def measured_as(monkeypatch: pytest.MonkeyPatch, *found: float) -> None:
    values = iter(FullDrafts(one, (0.5, 0.5, 0.5)) for one in found)
    monkeypatch.setattr(full_run, "measure_full", lambda *_: next(values))


def test_a_resumed_training_has_the_same_losses(tiny):
    """Its weights and its moments are those that it had."""
    losses: list[float] = []
    tiny.trained = lambda report, *_: losses.append(report.loss)
    found = []
    for runs in ((4,), (2, 4)):
        torch.manual_seed(0)  # the mask's row of the embedding is drawn
        for steps in runs:
            tiny.train(steps, learning_rate=1e-3, final_learning_rate=1e-3)
        found.append(losses.copy())
        losses.clear()
        shutil.rmtree(tiny.out)
        shutil.rmtree(tiny.directory / "work")
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("harm", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tiny, monkeypatch, harm):
    tiny.train(1)
    if harm == "loss":
        monkeypatch.setattr(full, "joint_loss", lambda *given: joint_loss(*given) * math.nan)
    else:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(ConfigError, match=r"not a number at step 1: .*kept.*--learning-rate"):
        tiny.train(3)
    progress, tensors, _ = load_checkpoint(tiny.directory / "work", {})
    assert progress.step == 1
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_what_is_measured_on_is_not_trained_on(tiny, monkeypatch):
    judged: set[bytes] = set()
    trained: set[bytes] = set()

    def measured(model, documents, *_) -> FullDrafts:
        judged.update(tokens.tobytes() for tokens, _ in documents)
        return FullDrafts(1.5, (0.5, 0.5, 0.5))

    def noted(tokens, *given):
        trained.add(tokens.tobytes())
        return doubled(tokens, *given)

    monkeypatch.setattr(full_run, "measure_full", measured)
    monkeypatch.setattr(full, "doubled", noted)
    tiny.train(8)
    assert judged
    assert len(trained) > 8
    assert not judged & trained


def test_drafts_count_up_to_the_first_that_differs(monkeypatch):
    """Two blocks of four: behind the slot that is not counted, one holds once, the other in all three."""
    masked = F.one_hot(torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 0]), 2).float()
    following = F.one_hot(torch.zeros(9, dtype=torch.int64), 2).float()
    monkeypatch.setattr(full, "document_logits", lambda *_: (following, masked))
    tokens, own = np.arange(3, 12), np.arange(9) > 0
    assert measure_full(None, [(tokens, own)], 2, FullConfig(block=4)) == FullDrafts(3.0, (1.0, 0.5, 1.0))
    asked = np.arange(9) > 4  # what was asked is not drafted
    assert measure_full(None, [(tokens, asked)], 2, FullConfig(block=4)) == FullDrafts(4.0, (1.0, 1.0, 1.0))


def test_the_best_is_known_after_a_kill(tiny, monkeypatch):
    def trained(report, *_) -> None:
        report.progress.seconds += 600  # so that it is time to measure
        if report.progress.step > 1:
            raise Killed

    tiny.trained = trained
    measured_as(monkeypatch, 1.5, 2.5)
    with pytest.raises(Killed):
        tiny.train(10)
    assert load_checkpoint(tiny.directory / "work", {})[0].best == 2.5
    measured_as(monkeypatch, 2.0, 2.25)
    tiny.trained = lambda *_: None
    tiny.train(2)
    assert kept_tokens_per_step(tiny.out) == 2.5


@pytest.mark.parametrize("killed", ["save", "write_model"])
def test_a_kill_as_the_best_is_kept_leaves_what_the_next_run_goes_on_from(tiny, monkeypatch, killed):
    """What stands in `out` has a checkpoint behind it: without one the same command would be refused."""

    def kill(*_) -> None:
        raise Killed

    measured_as(monkeypatch, 1.5, 2.5)
    tiny.train(0)
    assert full_steps(tiny.out) == 0
    measured_as(monkeypatch, 1.5, 2.5)
    with monkeypatch.context() as patched:
        patched.setattr(full_run, killed, kill)
        with pytest.raises(Killed):
            tiny.train(1)
    assert full_steps(tiny.out) == 0
    assert kept_tokens_per_step(tiny.out) == 1.5
    measured_as(monkeypatch, 2.25, 2.25)
    assert tiny.train(1).best == 2.25
    assert kept_tokens_per_step(tiny.out) == 2.25


def test_the_time_that_checkpoints_take_counts(tiny, monkeypatch):
    """By a clock that stands still but while a checkpoint is written."""
    now, steps = 0.0, 0

    def saved(*_) -> None:
        nonlocal now
        now += 30

    def trained(*_) -> None:
        nonlocal steps
        steps += 1
        assert steps < 9

    tiny.trained = trained
    monkeypatch.setattr(SavePace, "due", lambda *_: True)
    monkeypatch.setattr(full_run, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(full_run, "save_training", saved)
    measured_as(monkeypatch, *[1.5] * 9)
    assert tiny.train(Budget(seconds=100)).step == steps == 4


def test_where_the_best_is_gone_the_next_best_is_kept(tiny, monkeypatch):
    measured_as(monkeypatch, 1.5, 2.5)
    tiny.train(1)
    shutil.rmtree(tiny.out)
    measured_as(monkeypatch, 2.0, 2.25)
    assert tiny.train(2).best == 2.25
    assert kept_tokens_per_step(tiny.out) == 2.25


def test_with_other_held_out_documents_the_model_is_judged_anew(tiny, monkeypatch):
    measured_as(monkeypatch, 1.5, 2.5)
    tiny.train(1)
    measured_as(monkeypatch, 1.75, 1.25)
    tiny.documents = 13  # one of them is held out that was not before
    assert tiny.train(2).best == 1.75
    assert kept_tokens_per_step(tiny.out) == 1.75


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # as the tokenizer's library says it
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_a_full_disk_is_one_line_and_keeps_the_model_before(tiny, monkeypatch, error):
    tiny.train(1)
    before = {path.name: path.read_bytes() for path in tiny.out.iterdir()}
    (tiny.out / "README.md").write_text("as it was")

    def full(*_, **__) -> None:
        raise error

    measured_as(monkeypatch, 5.0, 5.0)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(ConfigError, match="the disk is full: free some space") as raised:
        tiny.train(2)
    assert "\n" not in str(raised.value)
    assert {path.name for path in tiny.out.iterdir()} == set(before)
    assert (tiny.out / "README.md").read_text() == "as it was"
    assert not part_of(tiny.out).exists()


def test_what_a_kill_leaves_of_the_writing_is_known_for_ours(tiny, monkeypatch):
    def killed(*_, **__) -> None:
        raise Killed

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", killed)
    with pytest.raises(Killed):
        tiny.train(1)
    assert any(part_of(tiny.out).glob("*.safetensors"))
    check_replaceable(tiny.out, [])


def test_other_errors_of_the_writing_are_no_full_disk(tiny, monkeypatch):
    def wrong(*_, **__) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", wrong)
    with pytest.raises(TypeError, match="a mistake"):
        tiny.train(1)


@pytest.mark.parametrize(
    ("device", "host", "card", "message"),
    [
        ("cpu", 23, 0, "takes 0.0 GiB of memory, and 0.0 GiB are free: free some, or take a smaller model"),
        ("cpu", 24, 0, None),
        ("cuda", 24, 15, "takes 0.0 GiB of the GPU's memory, and"),
        ("cuda", 23, 16, "takes 0.0 GiB of memory, and"),
        ("cuda", 24, 16, None),
    ],
)
def test_what_plainly_does_not_fit_is_refused(tiny, monkeypatch, device, host, card, message):
    parameters = check_dense(tiny.source)
    base = Base(tiny.source, load_config(tiny.source), tiny.tokenizer, torch.device(device))
    monkeypatch.setattr(full_run, "free_memory_and_swap", lambda: host * parameters)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card * parameters, 0))
    monkeypatch.setattr(psutil, "MACOS", False)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message) as raised:
        full_run.check_memory(base, parameters)
    if message is not None:
        assert str(raised.value).startswith(f"to train all {parameters:,} weights of model ")


def test_too_little_memory_is_told_before_anything_is_gathered(tiny, monkeypatch):
    monkeypatch.setattr(full_run, "free_memory_and_swap", lambda: 1 << 20)
    monkeypatch.setattr(psutil, "MACOS", False)
    text = tiny.directory / "text"
    text.write_text("A sentence of several words, for once. " * 400)
    options = ConvertOptions(str(tiny.source.directory), tiny.out, mode="full", text=text, device="cpu")
    with pytest.raises(ConfigError, match="to train all"):
        convert(options, TerminalScreen(Console(quiet=True)))
    assert not options.work.exists()


def test_a_full_gpu_is_told_without_what_would_not_help(tiny, monkeypatch):
    """`--rows` is what a step learns from, one document after another."""

    def full(*_) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(run, "train_full", full)
    text = tiny.directory / "text"
    text.write_text("A sentence of several words, for once. " * 400)
    options = ConvertOptions(str(tiny.source.directory), tiny.out, mode="full", text=text, device="cpu")
    with pytest.raises(ConfigError, match=r"memory is full: .* take a smaller model, or a larger GPU$") as raised:
        convert(options, TerminalScreen(Console(quiet=True)))
    assert "--rows" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_in_the_dtype_that_was_asked_for(tiny, monkeypatch, dtype):
    sampler = Sampler(random_documents(12).__getitem__, dict.fromkeys(range(12), 8), 1024, 0)
    training = FullTraining(dense_model(tiny.source, torch.float32), 2, FullConfig(block=4, dtype=dtype), sampler)
    training.model = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    found: list[bool] = []

    def noted(kind: str, dtype: torch.dtype, enabled: bool) -> None:
        found.append(enabled)
        raise Killed

    monkeypatch.setattr(torch, "autocast", noted)
    with pytest.raises(Killed):
        training.step(0.0)
    assert found == [dtype == "bfloat16"]
