"""Ctrl-C, SIGTERM and a closed terminal, put off until what a run has done is saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = "stopping: what was trained is saved first; once more stops at once"


@contextmanager
def end_put_off(putting_off: bool = True) -> Iterator[Callable[[], bool]]:
    """Within this the first of these signals only makes the function that it gives true, and does what it does
    elsewhere at the end of the context; a second one does so at once. One that is ignored, as under `nohup`, stays so.

    putting_off: False for no change at all. There is none outside the main thread either, which alone has signals.
    """
    if not putting_off or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    came: list[int] = []

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            give_back()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, take)
    try:
        yield lambda: bool(came)
    finally:
        give_back()
    if came:
        signal.raise_signal(came[0])
