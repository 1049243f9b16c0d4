"""What a conversion shows: stages, rates, and a time left that is no more certain than it can be."""

import io
import itertools

import pytest
import torch
from rich.console import Console

from tests.tidar_core.convert.trained import tiny_base
from tidar_core.convert import screen
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.drafter import new_drafter
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.own_words import GatherProgress, Goal
from tidar_core.convert.screen import Rate, TerminalScreen, time_left
from tidar_core.convert.speed import measure_peak, work_per_row
from tidar_core.convert.trainer import StepReport


def test_a_rate_forgets_what_is_long_ago(monkeypatch):
    clock = itertools.count(step=10)
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    rate = Rate()
    rate.see(0)
    assert rate.seconds_for(5) is None
    for amount in range(100, 2100, 100):
        rate.see(amount)
    assert rate.a_second() == pytest.approx(10)
    for _ in range(12):
        rate.see(2000 + 1)
    assert rate.a_second() < 1


def test_what_shrinks_has_no_rate_below_nothing(monkeypatch):
    """As the words on their way, whose questions do not count once they are asked."""
    clock = itertools.count()
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    rate = Rate()
    for amount in (900, 700):
        rate.see(amount)
    assert rate.a_second() == 0
    assert rate.seconds_for(5) is None


@pytest.mark.parametrize(
    ("gathered", "goal", "expected"),
    [
        (GatherProgress(9, 800, 0, 100.0, 0, 0.0), Goal(own_tokens=700), "unknown"),
        (
            GatherProgress(9, 800, 0, 100.0, 3, 0.0),
            Goal(own_tokens=700),
            "3 given prompts to answer, time left unknown",
        ),
        (GatherProgress(9, 800, 0, 100.0, 0, 130.0), Goal(seconds=130.0), "a second, about 30 s left"),
        (GatherProgress(9, 800, 0, 130.0, 3, 190.0), Goal(seconds=130.0), "3 given prompts to answer, about 60 s left"),
        (GatherProgress(9, 800, 0, 130.0, 0, 190.0), Goal(10**9, seconds=190.0), "a second, time left unknown"),
    ],
)
def test_the_time_that_prompts_take_is_no_time_left_for_nothing(gathered, goal, expected):
    out = io.StringIO()
    with TerminalScreen(Console(file=out, width=200)) as shown:
        shown.gathered(gathered, goal)
    assert expected in out.getvalue()


def test_a_number_of_own_words_takes_no_longer_than_there_is_time(monkeypatch):
    """At about a token a second."""
    clock = itertools.count(step=100)
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    for until, expected in ((130.0, "about 30 s left"), (900.0, "min left"), (0.0, "min left")):
        out = io.StringIO()
        with TerminalScreen(Console(file=out, width=200)) as shown:
            for tokens in (0, 200, 400):
                shown.gathered(GatherProgress(9, tokens, 0, 100.0, 0, until), Goal(own_tokens=480))
        assert expected in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "unknown yet"), (20, "20 s left"), (600, "10 min left"), (9000, "2.5 h left")],
)
def test_time_left_in_words(seconds, expected):
    assert expected in time_left(seconds)


@pytest.mark.parametrize("terminal", [True, False])
def test_all_stages_are_shown(terminal):
    out = io.StringIO()
    with TerminalScreen(Console(file=out, force_terminal=terminal, width=200)) as shown:
        shown.loading(1, 2)
        shown.gathered(GatherProgress(12, 3456, 44, 60.0), Goal(own_tokens=7000))
        shown.trained(StepReport(Progress(step=7, rows=1000), 1.5, 0.1, 512, 300, 1.0), 0.25, 0.5)
        shown.measured(HeldOutResult(9, 1.75, {"chat": 1.75}, 0.8, (0.5, 0.25)), Progress(step=7), True)
    text = out.getvalue()
    assert "1.750 tokens per step on 9 held-out documents (chat 1.75); slots 0.50 0.25, kept" in text
    if terminal:
        assert "step 7, loss 1.500" in text
    else:
        assert "12 documents, 3,500 tokens" in text


def test_how_long_a_training_takes_is_not_cut_off_in_80_columns(monkeypatch):
    clock = itertools.count(step=60)
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    with TerminalScreen(Console(file=out, force_terminal=True, width=80)) as shown:
        for step in (1001, 1002):
            progress = Progress(step=step, rows=step * 1536)
            shown.trained(StepReport(progress, 0.394, 0.1, 1536, 1500, 60.0), step / 2000, 0.41)
    assert "min left" in out.getvalue() or "h left" in out.getvalue()


def test_a_bar_goes_once_its_stage_is_over():
    """Behind it comes what takes minutes with a large model, and would seem to be that stage."""
    out = io.StringIO()
    with TerminalScreen(Console(file=out, force_terminal=True, width=200)) as shown:
        shown.loading(1, 2)
        shown.loading(2, 2)
        before = len(out.getvalue())
        shown.line("measuring")
        assert "reading weights" not in out.getvalue()[before:]
        shown.loading(1, 4)
    assert "25%" in out.getvalue()


def test_work_is_counted_from_the_shapes(tmp_path):
    tiny = tiny_base(tmp_path)
    drafter = new_drafter(tiny.identity, tiny.base.weights.embedding, 4, tiny.identity.projections, 4, 0)
    work = work_per_row(tiny.base, drafter, 512)
    trunk = 2 * (96 * (96 + 64) + 96 * 96 + 96 * 320 + 160 * 96)
    assert work.clean == 2 * trunk
    adapter = 4 * (96 + 160 + 96 + 96 + 96 + 320 + 160 + 96) * 2
    assert work.mask == 4 * trunk + 6 * adapter + 5 * 512 * 96
    assert work.fraction(10, 20, 2.0, 1e9) == (10 * work.clean + 20 * work.mask) / 2e9
    assert measure_peak(torch.device("cpu"), torch.float32) > 1e8
