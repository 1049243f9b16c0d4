"""A signal that ends a conversion: what was done by then is saved, and the run ends as it would have without that."""

import errno
import os
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.tidar_core.convert.documents import HEADER
from tests.tidar_core.convert.test_full_training import Tiny
from tests.tidar_core.convert.test_gathering import SHORT, documents, engine_source, forget_all
from tests.tidar_core.convert.trained import Killed, train
from tests.tiny import tiny_checkpoint
from tidar_core.config import EngineConfig
from tidar_core.convert import ending, full_run, trainer
from tidar_core.convert.checkpoint import load_checkpoint
from tidar_core.convert.ending import ONE_END, end_put_off
from tidar_core.convert.full import measure_full
from tidar_core.convert.growing import read_growing
from tidar_core.convert.held_out import measure_held_out
from tidar_core.convert.own_words import Goal, gather_own_words
from tidar_core.convert.shards import open_store
from tidar_core.engine import load_engine
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.signals import SIGNALS

pytestmark = pytest.mark.usefixtures("one_thread", "signals_raise")


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> SimpleNamespace:
    """The one by which signals are told apart: it stands still unless a test sets it."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def ended_by(*numbers: int, failing: bool = False) -> list[bool]:
    """Whether an end was asked for, before each of these signals and behind them."""
    found: list[bool] = []
    with suppress(KeyboardInterrupt), end_put_off() as asked:
        for number in numbers:
            found.append(asked())
            os.kill(os.getpid(), number)
        if failing:
            raise Killed
        found.append(asked())
    assert all(signal.getsignal(number) is signal.default_int_handler for number in SIGNALS)
    return found


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_what_is_under_way(number):
    assert ended_by(number) == [False, True]


@pytest.mark.parametrize(("after", "number", "waits"), [
    (ONE_END + 0.1, signal.SIGINT, False), (ONE_END + 0.1, signal.SIGTERM, False),
    (ONE_END - 0.1, signal.SIGINT, True), (ONE_END - 0.1, signal.SIGTERM, True), (60.0, signal.SIGHUP, True),
])  # fmt: skip
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_signal_does_not_wait_unless_it_is_of_the_same_end(clock, first, after, number, waits):
    """As where a terminal is closed, of which the shell and the system each tell, or a service is stopped."""
    behind = []
    with suppress(KeyboardInterrupt), end_put_off() as asked:
        os.kill(os.getpid(), first)
        clock.seconds += after
        os.kill(os.getpid(), number)
        behind.append(asked())
    assert behind == [True] * waits


def test_the_user_is_told_once_and_at_once(capfd):
    with suppress(KeyboardInterrupt), end_put_off():
        os.kill(os.getpid(), signal.SIGINT)
        told = capfd.readouterr()
        os.kill(os.getpid(), signal.SIGTERM)
    assert (told.out, told.err.count("\n"), "once more stops at once" in told.err) == ("", 1, True)
    assert capfd.readouterr().err == ""


def test_a_terminal_that_is_gone_is_told_nothing(monkeypatch):
    def gone(*_) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ending, "os", SimpleNamespace(write=gone, isatty=lambda _: True))
    assert ended_by(signal.SIGHUP) == [False, True]


def test_what_goes_wrong_while_it_is_saved_is_told():
    with pytest.raises(Killed):
        ended_by(signal.SIGINT, failing=True)


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with end_put_off() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not asked()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_other_threads_put_nothing_off():
    found = []

    def elsewhere() -> None:
        with end_put_off() as asked:
            found.append(asked())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with end_put_off(False):
        found.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
    assert found == [False, False]


SCREENS_GONE = [OSError(errno.EIO, os.strerror(errno.EIO)), SystemExit(1)]


def at(step: int, number: int = signal.SIGINT, gone: BaseException | None = None):
    """To be told of steps: at one of them a signal comes. gone: what a screen raises whose reader it ended too."""

    def told(report, *_) -> None:
        if report.progress.step == step:
            os.kill(os.getpid(), number)
            if gone is not None:
                raise gone

    return told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("gone", [None, *SCREENS_GONE])
def test_a_training_that_is_ended_loses_nothing(tiny, corpus, tmp_path, number, gone):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 12)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(tiny, corpus, tmp_path / "parts", 12, step=at(7, number, gone), line=lines.append)
    rest, _ = train(tiny, corpus, tmp_path / "parts", 12, line=lines.append)
    assert lines == ["going on from step 7"]
    assert [report.loss for report in rest] == [report.loss for report in whole[7:]]


@pytest.mark.parametrize("gone", SCREENS_GONE)
def test_a_screen_that_fails_by_itself_ends_a_training(tiny, corpus, tmp_path, gone):
    def failing(_) -> None:
        raise gone

    with pytest.raises(type(gone)):
        train(tiny, corpus, tmp_path, 12, step=failing)


def test_between_measuring_and_a_step_a_training_ends_too(tiny, corpus, tmp_path):
    seen: list[int] = []

    def measured(_, __, progress, ___) -> None:
        if progress.step == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny, corpus, tmp_path, 20, step=lambda report: seen.append(report.progress.step), measured=measured)
    assert seen == list(range(1, 11))
    assert load_checkpoint(tmp_path, {})[0].step == 10


def test_a_measurement_is_not_waited_for(tiny, corpus, tmp_path, monkeypatch):
    """That of a large model takes minutes on a CPU."""
    whole, _ = train(tiny, corpus, tmp_path / "whole", 12)
    measured: list[object] = []

    def ended_while_measuring(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return measure_held_out(*given)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "measure_held_out", ended_while_measuring)
        with pytest.raises(KeyboardInterrupt):
            train(tiny, corpus, tmp_path / "parts", 12, measured=lambda *found: measured.append(found))
    assert measured == []
    rest, _ = train(tiny, corpus, tmp_path / "parts", 12)
    assert [report.loss for report in rest] == [report.loss for report in whole]


def tiny_full(tmp_path, **told) -> Tiny:
    source = find_model(str(tiny_checkpoint(tmp_path / "model", layers=1, vocab=511)))
    return Tiny(source, load_tokenizer(source), tmp_path, **told)


def test_between_measuring_and_a_step_a_full_training_ends_too(tmp_path, monkeypatch):
    full, looked = tiny_full(tmp_path), []

    def ended_while_measuring(*given):
        looked.append(given)
        os.kill(os.getpid(), signal.SIGINT)
        return measure_full(*given)

    full.train(2)
    monkeypatch.setattr(full_run, "measure_full", ended_while_measuring)
    with pytest.raises(KeyboardInterrupt):
        full.train(9)
    assert len(looked) == 1
    assert load_checkpoint(full.directory / "work", {})[0].step == 2


@pytest.mark.parametrize("gone", [None, *SCREENS_GONE])
def test_a_full_training_that_is_ended_loses_nothing(tmp_path, gone):
    full = tiny_full(tmp_path, trained=at(3, gone=gone))
    with pytest.raises(KeyboardInterrupt):
        full.train(9)
    assert load_checkpoint(full.directory / "work", {})[0].step == 3
    assert full.train(4).step == 4
    assert "going on from step 3" in full.lines


@pytest.mark.parametrize("gone", [None, *SCREENS_GONE])
def test_gathering_that_is_ended_keeps_what_there_is(tmp_path, gone):
    model = tiny_checkpoint(tmp_path / "model", likely=0)
    engine = load_engine(EngineConfig(model=str(model), dtype="float32", device="cpu", threads=1))
    store, seconds, found = open_store(tmp_path / "data", HEADER), [], []

    def ended_once_there_are_some(now) -> None:
        if now.documents >= 5 and not found:
            found.append(now.documents)
            os.kill(os.getpid(), signal.SIGINT)
            if gone is not None:
                raise gone

    with pytest.raises(KeyboardInterrupt):
        gather_own_words(
            engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=10**6),
            progress=ended_once_there_are_some, spent=seconds.append,
        )  # fmt: skip
    forget_all(engine)
    assert len(documents(store)) >= found[0]
    assert len(read_growing(store.directory)) >= 8
    assert sum(seconds) == pytest.approx(store.read().seconds)
