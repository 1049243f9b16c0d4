"""Ctrl-C, SIGTERM and a closed terminal as one wish to end, that is neither lost nor repeated."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from tidar_core.signals import SIGNALS


class Interrupts:
    """While entered, each of these signals raises KeyboardInterrupt in the main thread, whatever it is doing, unless it
    is `put_off`; not a SIGHUP that is ignored, as under `nohup`.

    Python drops an exception that is raised inside some of its own hooks (at a fork, in a destructor), so a long
    piece of work asks `check` between its steps too. It would say so in some lines of its own, a forked child perhaps
    after our last word: these are kept from the user, who asked for an end and gets it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._put_off = False
        self._before: dict[signal.Signals, Any] = {}
        self._tell_dropped = sys.unraisablehook

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]
        self._before = before
        self._tell_dropped, sys.unraisablehook = sys.unraisablehook, self._dropped
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._tell_dropped

    def listen(self) -> None:
        """Take the signals (again, where something else took one meanwhile)."""
        for number in self._before:
            signal.signal(number, self._interrupt)

    def ignore(self) -> None:
        """From here on nothing interrupts: the way down has begun."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Within this a first signal waits for the end, where it raises; a second one raises at once.

        For work that leaves something behind when it is broken off, and that seldom takes long.
        """
        self._put_off = True
        try:
            yield
        finally:
            self._put_off = False
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt where a signal came, even if its own exception was lost."""
        if self.asked:
            raise KeyboardInterrupt

    def _dropped(self, dropped: "sys.UnraisableHookArgs") -> None:
        if not (self.asked and dropped.exc_type is KeyboardInterrupt):
            self._tell_dropped(dropped)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if not (first and self._put_off):
            raise KeyboardInterrupt
