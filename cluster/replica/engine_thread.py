"""One engine, driven by a thread of its own: the event loop never waits for the model."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.line import Event, Failure, Refusal
from tidar_core.request import Request, RequestError

if TYPE_CHECKING:  # torch is imported on the engine's thread, after its number of CPU threads is set
    from tidar_core.engine import Engine, EngineStats

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class PrefixQuestion:
    """A question about the engine's cached prefixes, and where the answer goes."""

    limit: int
    marks: Future[bytes]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of one step, beside what it brought. rows: that it computed. begun: requests that ran for the first time, and
    since when, on the monotonic clock."""

    rows: int = 0
    begun: tuple[tuple[str, float], ...] = ()


NO_STEP = StepCounts()
Deliver = Callable[[Sequence[Event], StepCounts], None]


class EngineThread:
    """Loads an engine and steps it while there is work; `submit` and `abort` may be called from any thread.

    `deliver` is called once after each step, on the engine's thread, with all events of the step and its counts.
    Refusals and failures are delivered with `NO_STEP`. After a failure `failure` is set, a `Failure` was delivered, and
    nothing is served any more; `submit` then delivers a `Failure` itself, on its caller's thread.
    """

    def __init__(self, load: Callable[[], "Engine"], deliver: Deliver):
        self.ready: Future[Engine] = Future()
        self.failure: str | None = None
        self.stats: EngineStats | None = None
        self._step_began: float | None = None
        self._load = load
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Request | PrefixQuestion | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Its events come through `deliver`."""
        self._commands.put(request)
        if self.failure is not None:  # checked after the put: whichever thread comes second sees the other
            self._deliver([Failure(self.failure)], NO_STEP)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; one that is not here is ignored."""
        self._commands.put(request_id)

    def prefix_marks(self, limit: int) -> Future[bytes]:
        """What of prompts is cached (`Engine.prefix_marks`), told between two steps."""
        question = PrefixQuestion(limit, Future())
        self._commands.put(question)
        return question.marks

    def step_seconds(self) -> float:
        """How long the step that runs has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Stop after the step that runs, and wait for it."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.stats = engine.stats()
        self.ready.set_result(engine)
        try:
            while self._obey(engine):
                self._step_began = time.monotonic()
                outputs: Sequence[Event] = engine.step()
                self._step_began = None
                self.stats = engine.stats()
                counts = StepCounts(self.stats.passed, self.stats.begun)
                if outputs or counts != NO_STEP:
                    self._deliver(outputs, counts)
        except BaseException as error:
            log.exception("the engine failed")
            self.failure = f"the engine failed ({type(error).__name__}); the server restarts it"
            self._deliver([Failure(self.failure)], NO_STEP)

    def _obey(self, engine: "Engine") -> bool:
        """Carry out what was asked, waiting for a command where there is no work. False: stop."""
        while not (self._commands.empty() and engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            if isinstance(command, str):
                engine.abort(command)
            elif isinstance(command, PrefixQuestion):
                if command.marks.set_running_or_notify_cancel():  # else nobody waits any more
                    command.marks.set_result(engine.prefix_marks(command.limit))
            else:
                try:
                    engine.submit(command)
                except RequestError as error:
                    self._deliver([Refusal(command.request_id, str(error), error.param)], NO_STEP)
        return True
