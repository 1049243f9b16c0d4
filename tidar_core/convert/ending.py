"""Ctrl-C, SIGTERM and a closed terminal, put off until what a run has done is saved."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tidar_core.signals import SIGNALS, taken

SAVING = "stopping: what there is by now is saved first; once more stops at once"
ONE_END = 0.5  # seconds in which systemd, `timeout` and a shell send more than one signal for the same end


@contextmanager
def end_put_off(putting_off: bool = True) -> Iterator[Callable[[], bool]]:
    """Within this the first of these signals only makes the function that it gives true, and does what it does
    elsewhere at the end of the context; a second one does so at once. One that is ignored, as under `nohup`, stays so.
    The user is told at the first. What comes within `ONE_END` of it is no second one, nor is SIGHUP ever: a terminal
    that is closed sends several.

    putting_off: False for no change at all. There is none outside the main thread either, which alone has signals.
    """
    if not putting_off or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    came: list[tuple[int, float]] = []

    def take(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not came:
            came.append((number, now))
            _tell()
        elif number != signal.SIGHUP and now - came[0][1] > ONE_END:
            give_back()
            signal.raise_signal(number)

    with taken(heeded, take) as give_back:
        yield lambda: bool(came)
    if came:
        signal.raise_signal(came[0][0])


@contextmanager
def unseen(asked: Callable[[], bool]) -> Iterator[None]:
    """Where an end was asked for (`asked`), what is under way within this may fail for its screen: the terminal may be
    closed, and the pipe that is printed to ended by the same Ctrl-C. Rich makes SystemExit of that."""
    try:
        yield
    except (OSError, SystemExit):
        if not asked():
            raise


def _tell() -> None:
    """Tells the user, past all that buffers or draws: who reads that may be gone."""
    behind_a_bar = "\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{behind_a_bar}{SAVING}\n".encode())
