"""What comes often is told seldom: logs are cut, and a line a request would push all else out of them."""

import math
import threading
import time
from collections.abc import Callable, Hashable


class Seldom:
    """Each thing is told once in `seconds`. So many as `most` are remembered; while there are more, new ones are not
    told. May be asked from any thread."""

    def __init__(self, seconds: float, most: int = 1, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = seconds, most, clock
        self._told: dict[Hashable, tuple[float, int]] = {}  # when, how often it came since; the earliest first
        self._lock = threading.Lock()

    def times(self, what: Hashable = None) -> int:
        """How often it came since it was told last, this time included, where it is to be told now; else 0."""
        now = self._clock()
        with self._lock:
            told, since = self._told.get(what, (-math.inf, 0))
            if now - told < self._seconds:
                self._told[what] = told, since + 1
                return 0
            self._told.pop(what, None)
            while len(self._told) >= self._most:
                earliest = next(iter(self._told))
                if now - self._told[earliest][0] < self._seconds:
                    return 0
                del self._told[earliest]
            self._told[what] = now, 0
            return since + 1
