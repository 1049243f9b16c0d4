"""A signal that ends a conversion: what was done by then is saved, and the run ends as it would have without that."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from tests.tidar_core.convert.documents import HEADER
from tests.tidar_core.convert.test_full_training import Tiny
from tests.tidar_core.convert.test_gathering import SHORT, documents, engine_source, forget_all
from tests.tidar_core.convert.trained import Killed, train
from tests.tiny import tiny_checkpoint
from tidar_core.config import EngineConfig
from tidar_core.convert.checkpoint import load_checkpoint
from tidar_core.convert.ending import SIGNALS, end_put_off
from tidar_core.convert.growing import read_growing
from tidar_core.convert.own_words import Goal, gather_own_words
from tidar_core.convert.shards import open_store
from tidar_core.engine import load_engine
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _signals_raise():
    """All of them, as one does from a keyboard."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_a_second_signal_does_not_wait():
    assert ended_by(signal.SIGINT, signal.SIGINT) == [False, True]


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


def at(step: int, number: int = signal.SIGINT):
    """To be told of steps: at one of them a signal comes."""

    def told(report, *_) -> None:
        if report.progress.step == step:
            os.kill(os.getpid(), number)

    return told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_ended_loses_nothing(tiny, corpus, tmp_path, number):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 12)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(tiny, corpus, tmp_path / "parts", 12, step=at(7, number), line=lines.append)
    assert "once more stops at once" in lines[0]
    rest, _ = train(tiny, corpus, tmp_path / "parts", 12, line=lines.append)
    assert lines[1:] == ["going on from step 7"]
    assert [report.loss for report in rest] == [report.loss for report in whole[7:]]


def test_a_full_training_that_is_ended_loses_nothing(tmp_path):
    source = find_model(str(tiny_checkpoint(tmp_path / "model", layers=1, vocab=511)))
    full = Tiny(source, load_tokenizer(source), tmp_path, trained=at(3))
    with pytest.raises(KeyboardInterrupt):
        full.train(9)
    assert load_checkpoint(full.directory / "work", {})[0].step == 3
    assert full.train(4).step == 4
    assert "going on from step 3" in full.lines


def test_gathering_that_is_ended_keeps_what_there_is(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", likely=0)
    engine = load_engine(EngineConfig(model=str(model), dtype="float32", device="cpu", threads=1))
    store, seconds, found = open_store(tmp_path / "data", HEADER), [], []

    def ended_once_there_are_some(now) -> None:
        if now.documents >= 5 and not found:
            found.append(now.documents)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        gather_own_words(
            engine_source(engine), engine.tokenizer, SHORT, store, Goal(own_tokens=10**6),
            progress=ended_once_there_are_some, spent=seconds.append,
        )  # fmt: skip
    forget_all(engine)
    assert len(documents(store)) >= found[0]
    assert len(read_growing(store.directory)) >= 8
    assert sum(seconds) == pytest.approx(store.read().seconds)
