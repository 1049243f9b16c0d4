"""Calls into native code that may take for ever: on a thread beside the engine's, which waits so long and no longer.

Such a call cannot be ended. A thread whose call is late is left to it, and ends behind it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")

LIMIT_SECONDS = 1.0  # of a call's own computing
WAITS = 4  # times as long, where the machine is so busy that the call does not get to compute
CROWDED_FROM = 2  # late calls at once, from where on nothing new should begin: each takes a processor
MOST_LATE = 4  # at once, of those that were needed


class Late(Exception):
    """A call did not return in time, and may still be going on: what it works on is lost. computing: it would be late
    on an idle machine too. waited: seconds that were waited for it."""

    def __init__(self, computing: bool = True, waited: float = 0.0):
        super().__init__()
        self.computing = computing
        self.waited = waited


class Crowded(Late):
    """So many calls are late that this one was not begun."""


@dataclass(frozen=True, slots=True)
class _LateCall:
    worker: "_Worker"
    key: object
    speculative: bool


class TimedCalls:
    """Calls one function at a time, for one thread."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._late: list[_LateCall] = []

    @property
    def crowded(self) -> bool:
        return len(self._late_and_needed()) >= CROWDED_FROM

    def call(self, function: Callable[[], T], key: object = None, speculative: bool = False) -> T:
        """What the function returns or raises. Raises Late.

        key: what it works on; while a call of that key is late no other is begun, else each choice of one request would
        be late, one after another. speculative: the result may never be used; such calls are refused first, so that
        they never delay the others.
        """
        late = self._still_late()
        if key is not None and any(call.key is key and (speculative or not call.speculative) for call in late):
            raise Late(computing=not speculative)
        if speculative and len(late) >= CROWDED_FROM:
            raise Crowded(computing=False)
        if self._worker is None:
            if len(self._late_and_needed()) >= MOST_LATE:
                raise Crowded(computing=False)
            self._worker = _Worker()
            self._worker.ends_with(self)
        worker = self._worker
        try:
            returned, error = worker.answer(function)
        except Late as reason:
            self._worker = None
            self._late.append(_LateCall(worker, key if reason.computing else None, speculative))
            raise
        if error is not None:
            raise error
        return returned  # type: ignore[no-any-return]

    def _still_late(self) -> "list[_LateCall]":
        if self._late:
            self._late = [call for call in self._late if call.worker.is_alive()]
        return self._late

    def _late_and_needed(self) -> "list[_LateCall]":
        return [call for call in self._still_late() if not call.speculative]


class _Worker(Thread):
    def __init__(self) -> None:
        super().__init__(name="timed-calls", daemon=True)
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._began = 0.0
        self._ending: finalize[Any, Any] | None = None
        self._given_up = False
        self.start()

    def ends_with(self, owner: object) -> None:
        self._ending = finalize(owner, self.end)

    def run(self) -> None:
        while True:
            function = self._asked.get()
            if function is None:
                return
            self._began = _own_seconds()
            answer: tuple[Any, BaseException | None]
            try:
                answer = function(), None
            except BaseException as error:
                answer = None, error
            del function  # what it works on may be large
            if not self._given_up:
                self._answers.put(answer)
            del answer

    def answer(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Raises Late: the thread ends behind the call then, and what that returns is nobody's."""
        began = time.monotonic()
        self._asked.put(function)
        wait = LIMIT_SECONDS
        while True:
            try:
                return self._answers.get(timeout=wait)
            except Empty:
                waited = time.monotonic() - began
                computing = min(waited, self._computed()) >= LIMIT_SECONDS
                if computing or waited >= WAITS * LIMIT_SECONDS:
                    self.end()
                    raise Late(computing, waited) from None
                wait = LIMIT_SECONDS / 10

    def end(self) -> None:
        self._given_up = True
        if self._ending is not None:
            self._ending.detach()
        self._asked.put(None)

    def _computed(self) -> float:
        """Processor seconds of the call that goes on; without end where the system does not tell of another thread."""
        if self.ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return inf
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident)) - self._began


def _own_seconds() -> float:
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) if hasattr(time, "CLOCK_THREAD_CPUTIME_ID") else 0.0
