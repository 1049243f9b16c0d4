"""When a training is saved: less often where it takes long, so that a small share of the time goes into it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tidar_core.convert.trained import CONFIG, train
from tidar_core.convert import trainer
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.pace import CHECKPOINT_LATEST, CHECKPOINT_SECONDS, CHECKPOINT_SHARE, Pace, SavePace

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_checkpoint_that_takes_long_is_seldom_written():
    saves = SavePace(100.0)
    assert [saves.due(100.0 + CHECKPOINT_SECONDS + off) for off in (-1, 1)] == [False, True]
    assert saves.saved(150.0, 150.5) == 0.5
    assert [saves.due(150.5 + CHECKPOINT_SECONDS + off) for off in (-1, 1)] == [False, True]
    assert saves.saved(200.0, 240.0) == 40.0
    assert [saves.due(240.0 + 40.0 / CHECKPOINT_SHARE + off) for off in (-1, 1)] == [False, True]
    assert saves.saved(1000.0, 1600.0) == 600.0
    assert [saves.due(1600.0 + CHECKPOINT_LATEST + 600.0 + off) for off in (-1, 1)] == [False, True]


def test_what_the_best_took_to_save_puts_the_next_measurement_off_and_counts_once():
    pace, progress = Pace(60.0, 0.1), Progress(step=1, seconds=130.0)
    pace.measured(progress, 70.0, counted=30.0)
    assert progress.seconds == pace.measured_at == 170.0
    assert [pace.due(replace(progress, seconds=170.0 + 700.0 + off)) for off in (-1, 1)] == [False, True]


def test_a_trainers_checkpoints_take_a_small_share_of_the_time(tiny, corpus, tmp_path, monkeypatch):
    """By a clock that ten seconds pass by at each step, and thirty at each checkpoint."""
    now, saved_at = 0.0, []

    def saved(*given) -> None:
        nonlocal now
        now += 30
        saved_at.append(given[2].step)

    def ten_seconds_pass(_) -> None:
        nonlocal now
        now += 10

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trainer, "save_training", saved)
    still = replace(CONFIG, measure_every=1000, learning_rate=0.0)
    train(tiny, corpus, tmp_path, 70, still, step=ten_seconds_pass)
    assert saved_at == [0, 60, 70, 70]
