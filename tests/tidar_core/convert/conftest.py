"""What several of the conversion's tests stand on."""

import signal
from collections.abc import Iterator

import pytest

from tidar_core.signals import SIGNALS


@pytest.fixture
def signals_raise() -> Iterator[None]:
    """All that ask for an end raise KeyboardInterrupt, as one does from a keyboard; a shell's background job begins
    with SIGINT ignored."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
