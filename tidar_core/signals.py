"""The signals by which an end is asked for, and how some code has them for itself for a while."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def taken(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[Callable[[], None]]:
    """Within this `handler` gets these signals. From its end on, or from a call of the function that it gives on, they
    do again what they did before. For the main thread, which alone has signals."""
    before = {number: signal.getsignal(number) for number in numbers}

    def give_back() -> None:
        for number, own in before.items():
            signal.signal(number, own)

    for number in before:
        signal.signal(number, handler)
    try:
        yield give_back
    finally:
        give_back()
