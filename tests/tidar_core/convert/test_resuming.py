"""A training that stops: it goes on to the same loss, survives kills and bad luck, and keeps its best."""

import errno
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors import safe_open

from tests.tidar_core.convert.trained import CONFIG, corpus_of, random_documents, train
from tidar_core.config import ConfigError
from tidar_core.convert import trainer
from tidar_core.convert.checkpoint import Progress, load_checkpoint, save_checkpoint
from tidar_core.convert.pace import SavePace

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(directory: Path, more: Mapping[str, object] = MappingProxyType({}), **progress: object) -> None:
    """Lets the last checkpoint tell this of its progress, and more settings."""
    path = sorted(directory.glob("*.safetensors"))[-1]
    with safe_open(path, framework="pt") as file:
        settings = json.loads(file.metadata()["about"])["settings"]
    saved, tensors, _ = load_checkpoint(directory, {})
    save_checkpoint(directory, settings | more, replace(saved, **progress), tensors)


def interrupted_at(step: int) -> Callable[..., None]:
    """As a kill while a measurement is told, once the checkpoint's time has come."""

    def measured(result: object, adapter: object, progress: Progress, best: bool) -> None:
        if progress.step == step:
            raise InterruptedError

    return measured


def test_a_resumed_training_has_the_same_losses(tiny, corpus, tmp_path, monkeypatch):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 24)

    class Stopped(Exception):
        pass

    def stop(result, adapter, progress, best) -> None:
        if progress.step == 10:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(SavePace, "due", lambda *_: True)
        with pytest.raises(Stopped):
            train(tiny, corpus, tmp_path / "parts", 24, measured=stop)
    lines: list[str] = []
    rest, progress = train(tiny, corpus, tmp_path / "parts", 24, line=lines.append)
    assert lines == ["going on from step 10"]
    assert [report.loss for report in rest] == [report.loss for report in whole[10:]]
    assert progress.step == 24
    assert progress.rows == sum(report.mask_rows for report in whole)


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
    with pytest.raises(ConfigError, match=r"clip 1\.0, not 0\.5"):
        train(tiny, corpus, tmp_path, 4, replace(CONFIG, clip=0.5))


def test_a_training_goes_on_with_what_a_user_is_told_to_lower(tiny, corpus, tmp_path):
    """Also from a checkpoint of a version that did not let these change."""
    train(tiny, corpus, tmp_path, 2)
    recorded(tmp_path, {"learning_rate": 1e-2, "rows_a_step": 128, "tensors": 13})
    lines: list[str] = []
    lower = replace(CONFIG, learning_rate=1e-3, rows_a_step=64)
    seen, _ = train(tiny, corpus, tmp_path, 4, lower, line=lines.append)
    assert lines == ["going on from step 2"]
    assert [report.mask_rows for report in seen] == [64, 64]
    assert lower.settings().items() >= {"learning_rate": 1e-3, "rows_a_step": 64}.items()


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


def test_a_gradient_that_is_no_number_stops_as_well(tiny, corpus, tmp_path, monkeypatch):
    train(tiny, corpus, tmp_path, 2)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(ConfigError, match="not a number at step 2"):
        train(tiny, corpus, tmp_path, 4)
    assert load_checkpoint(tmp_path, {})[0].step == 2


def test_a_training_that_ended_early_goes_on_with_more_budget(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=2, patience=3)
    train(tiny, corpus, tmp_path, 20, config)
    seen, progress = train(tiny, corpus, tmp_path, 60, config)
    assert len(seen) == 32
    assert progress.step == 52


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


def test_with_other_held_out_documents_the_drafter_is_judged_anew(tiny, corpus, tmp_path):
    """What an easier set gave keeps nothing away, and what a harder one gave lets nothing worse through."""
    train(tiny, corpus, tmp_path, 4)
    recorded(tmp_path, best=3.9, stale=5)
    kept: list[tuple[float, bool, int]] = []

    def measured(result, adapter, progress, best) -> None:
        kept.append((result.tokens_per_step, best, progress.stale))

    _, progress = train(tiny, corpus, tmp_path, 4, measured=measured)
    assert kept[0][1:] == (False, 5)
    assert progress.best == 3.9
    grown = corpus_of([corpus.document(index) for index in range(len(corpus))] + random_documents(200, seed=9))
    _, progress = train(tiny, grown, tmp_path, 4, measured=measured)
    assert kept[1][1:] == (True, 0)
    assert progress.best == kept[1][0] < 3.9
    train(tiny, grown, tmp_path, 4, measured=measured)
    assert kept[2] == kept[1]


@pytest.mark.usefixtures("signals_raise")
def test_what_was_measured_on_other_documents_is_not_taken_for_what_was_not_measured_yet(tiny, corpus, tmp_path):
    """A run that ended before its first measurement has left the drafter of before in the output folder."""
    train(tiny, corpus, tmp_path, 4)
    recorded(tmp_path, best=3.9, stale=5)
    grown = corpus_of([corpus.document(index) for index in range(len(corpus))] + random_documents(200, seed=9))

    def ended(report) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny, grown, tmp_path, 100, replace(CONFIG, measure_every=50), step=ended)
    bests: list[bool] = []
    train(
        tiny, grown, tmp_path, 5, measured=lambda *found: bests.append(found[-1]),
        kept=lambda progress: progress.knows(3.9),
    )  # fmt: skip
    assert bests == [True]


def test_where_the_best_is_gone_the_next_best_is_kept(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 4)
    for there in (3.95, 0.0):
        recorded(tmp_path, best=3.9, stale=5)
        bests: list[bool] = []
        _, progress = train(
            tiny, corpus, tmp_path, 4, measured=lambda *found, bests=bests: bests.append(found[-1]),
            kept=lambda progress, there=there: progress.knows(there),
        )  # fmt: skip
        assert bests == [not there]
        assert (progress.best == 3.95) == bool(there)


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(tiny, corpus, tmp_path, monkeypatch):
    train(tiny, corpus, tmp_path, 2)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            train(tiny, corpus, tmp_path, 4)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", lambda *given, **named: full(0))
        with pytest.raises(ConfigError, match="the disk is full"):
            train(tiny, corpus, tmp_path, 4)
    assert load_checkpoint(tmp_path, {})[0].step == 2


def test_a_drafters_settings_are_saved_by_the_names_that_checkpoints_have() -> None:
    """Else none of before could be gone on with, and adapters would say the same by another word."""
    config = trainer.TrainConfig()
    saved = config.settings()
    assert saved["final_rate"] == config.final_share
    assert "final_share" not in saved
    assert set(config.fixed()) <= set(saved)
