"""Calls into native code that may take for ever: on a thread beside the engine's, which waits so long and no longer.

Such a call cannot be ended. A thread whose call is late is left to it, and ends behind it.
"""

import time
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")

LIMIT_SECONDS = 1.0  # of a call's own computing
WAITS = 4  # times as long, where the machine is so busy that the call does not get to compute
CROWDED_FROM = 2  # late calls at once, from where on nothing new should begin: each takes a processor
MOST_LATE = 8  # at once


class Late(Exception):
    """A call did not return in time, and may still be going on: what it works on is lost."""


class Crowded(Late):
    """So many calls are late that this one was not begun."""


class Aside:
    """Calls one function at a time, for one thread."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._late: list[_Worker] = []

    @property
    def crowded(self) -> bool:
        return self._still_late() >= CROWDED_FROM

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises. Raises Late."""
        if self._worker is None:
            if self._still_late() >= MOST_LATE:
                raise Crowded
            self._worker = _Worker()
            finalize(self, self._worker.end)
        worker = self._worker
        try:
            returned, error = worker.answer(function)
        except Empty:
            self._worker = None
            self._late.append(worker)
            raise Late from None
        if error is not None:
            raise error
        return returned  # type: ignore[no-any-return]

    def _still_late(self) -> int:
        self._late = [worker for worker in self._late if worker.is_alive()]
        return len(self._late)


class _Worker(Thread):
    def __init__(self) -> None:
        super().__init__(name="aside", daemon=True)
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._began = 0.0
        self.start()

    def run(self) -> None:
        while True:
            function = self._asked.get()
            if function is None:
                return
            self._began = _own_seconds()
            try:
                self._answers.put((function(), None))
            except BaseException as error:
                self._answers.put((None, error))
            del function  # what it works on may be large

    def answer(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Raises Empty where it is late: the thread ends behind it then."""
        began = time.monotonic()
        self._asked.put(function)
        wait = LIMIT_SECONDS
        while True:
            try:
                return self._answers.get(timeout=wait)
            except Empty:
                waited = time.monotonic() - began
                if min(waited, self._computed()) >= LIMIT_SECONDS or waited >= WAITS * LIMIT_SECONDS:
                    self.end()
                    raise
                wait = LIMIT_SECONDS / 10

    def end(self) -> None:
        self._asked.put(None)

    def _computed(self) -> float:
        """Processor seconds of the call that goes on; without end where the system does not tell of another thread."""
        if self.ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return inf
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident)) - self._began


def _own_seconds() -> float:
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) if hasattr(time, "CLOCK_THREAD_CPUTIME_ID") else 0.0
