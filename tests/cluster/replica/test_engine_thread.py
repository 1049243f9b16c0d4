"""The engine's own thread, with a real engine: submit, abort, refuse, break, end."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from cluster.line import Event, Failure, Refusal
from cluster.replica.engine_thread import EngineThread, StepCounts
from tests.tidar_core.engines import tiny_engine
from tidar_core.config import ConfigError
from tidar_core.engine import Engine
from tidar_core.request import FinishReason, Request, SamplingParams, StepOutput

SECONDS = 60


class Driven:
    """An engine thread, and what it delivered. `hold` stops the engine between two steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.steps = 0
        self.passes: list[int] = []
        self.begun: list[tuple[str, float]] = []
        self.hold = threading.Lock()
        self._step = engine.step
        engine.step = self.counted_step  # type: ignore[method-assign]
        self.thread = EngineThread(lambda: engine, self.deliver)

    def counted_step(self) -> list[StepOutput]:
        with self.hold:
            self.steps += 1
            return self._step()

    def deliver(self, events: Sequence[Event], counts: StepCounts) -> None:
        if counts.rows:
            self.passes.append(counts.rows)
        self.begun += counts.begun
        for event in events:
            self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=SECONDS)

    def close(self) -> None:
        self.thread.close()
        self.engine.step = self._step  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def driven(engine: Engine) -> Iterator[Driven]:
    driven = Driven(engine)
    yield driven
    driven.close()
    while engine.has_work:  # what a test left behind
        engine.step()


def request(name: str, max_tokens: int = 900) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))


def answer(driven: Driven, name: str) -> list[int]:
    """All tokens of a request that alone is under way."""
    tokens: list[int] = []
    while True:
        event = driven.next()
        assert isinstance(event, StepOutput)
        assert event.request_id == name
        tokens += event.tokens
        if event.finish:
            assert event.finish.reason is FinishReason.LENGTH
            return tokens


def test_passes_that_only_read_of_a_prompt_are_told_too(driven: Driven) -> None:
    """A long prompt's rows are most of what its steps compute; those that emit nothing were counted nowhere."""
    prompt = tuple(5 + place % 90 for place in range(700))
    driven.thread.submit(
        Request("long", prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, drafts="off"))
    )
    assert len(answer(driven, "long")) == 2
    *read, last = driven.passes
    assert sum(read) == len(prompt)
    assert (len(read), last) == (2, 1)


def test_requests_are_answered_one_after_the_other(driven: Driven) -> None:
    sent = time.monotonic()
    for name in ("a", "b"):
        driven.thread.submit(request(name, 12))
        assert len(answer(driven, name)) == 12
    (first, began), (second, later) = driven.begun
    assert (first, second) == ("a", "b")
    assert sent <= began <= later <= time.monotonic()
    assert driven.thread.stats is not None
    assert (driven.thread.stats.running, driven.thread.stats.pages_used) == (0, 0)


def test_an_abort_is_obeyed_within_two_steps(driven: Driven) -> None:
    driven.thread.submit(request("a"))
    driven.next()
    with driven.hold:
        steps = driven.steps
        driven.thread.abort("a")
        driven.thread.abort("a")
        driven.thread.abort("nobody")
    while True:
        event = driven.next()
        if isinstance(event, StepOutput) and event.finish:
            break
    assert event.finish.reason is FinishReason.ABORT
    assert driven.steps - steps <= 2
    driven.thread.submit(request("b", 1))
    answer(driven, "b")
    assert driven.thread.stats is not None
    assert driven.thread.stats.pages_used == 0


def test_a_refused_request_disturbs_no_other(driven: Driven) -> None:
    driven.thread.submit(request("alone", 40))
    expected = answer(driven, "alone")
    with driven.hold:
        driven.thread.submit(request("a", 40))
        driven.thread.submit(Request("empty", (), SamplingParams(max_tokens=3)))
    events = [driven.next() for _ in range(1)]
    while not (isinstance(events[-1], StepOutput) and events[-1].finish):
        events.append(driven.next())
    refusals = [event for event in events if isinstance(event, Refusal)]
    assert [(refusal.request_id, refusal.param) for refusal in refusals] == [("empty", "prompt")]
    tokens = [token for event in events if isinstance(event, StepOutput) for token in event.tokens]
    assert tokens == expected


def test_an_engine_that_breaks_ends_what_is_in_flight_and_what_comes(driven: Driven) -> None:
    driven.thread.submit(request("a"))
    driven.next()

    def broken() -> list[StepOutput]:
        raise RuntimeError("the device is gone")

    with driven.hold:
        driven.engine.step = broken  # type: ignore[method-assign]
    while not isinstance(event := driven.next(), Failure):
        pass
    assert "RuntimeError" in event.message
    assert "device" not in event.message  # what went wrong inside is for the log
    assert driven.thread.failure == event.message
    driven.thread.submit(request("b"))
    assert isinstance(driven.next(), Failure)
    driven.engine.step = driven._step  # type: ignore[method-assign]
    driven.engine.abort("a")


def test_a_model_that_cannot_be_loaded_is_told_to_the_one_who_waits() -> None:
    def load() -> Engine:
        raise ConfigError("no model here")

    thread = EngineThread(load, lambda events, counts: None)
    with pytest.raises(ConfigError, match="no model here"):
        thread.ready.result(SECONDS)
    thread.close()


def test_close_waits_for_the_thread(engine: Engine) -> None:
    driven = Driven(engine)
    driven.thread.submit(request("a"))
    driven.next()
    driven.close()
    steps = driven.steps
    engine.abort("a")
    engine.step()
    assert driven.steps == steps
