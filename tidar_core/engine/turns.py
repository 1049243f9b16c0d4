"""Sequences whose grammars take long take turns: else everybody waits in each step for all of them."""

from collections.abc import Collection
from itertools import accumulate

from tidar_core.request import Sequence

SLOW_SECONDS = 0.01  # of a step, from where on a grammar is slow
TOGETHER_SECONDS = 0.05  # that slow ones may take of a step, where that is not shorter itself


class Turns:
    """Whose turn it is among those with slow grammars. When they went they sit out as long as they took, so that the
    others have half of the time; not where there are no others.

    What sits out keeps its pages and goes on later: when a token comes changes, and never which.
    """

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._idle_until = 0.0

    def sitting_out(self, running: Collection[Sequence], step_seconds: float, now: float) -> frozenset[Sequence]:
        """Those that have no rows in the step that begins now, which takes `step_seconds` without grammars."""
        slow = [sequence for sequence in running if _seconds(sequence) > SLOW_SECONDS]
        if not slow:
            return frozenset()
        before = [sequence for sequence in self._line if sequence in slow]
        line = before + [sequence for sequence in slow if sequence not in before]
        if now < self._idle_until and len(slow) < len(running):
            self._line = line
            return frozenset(slow)
        took = list(accumulate(map(_seconds, line)))
        fit = max(1, sum(seconds <= max(TOGETHER_SECONDS, step_seconds) for seconds in took))
        self._line = line[fit:] + line[:fit]
        self._idle_until = now + step_seconds + 2 * took[fit - 1]
        return frozenset(line[fit:])


def _seconds(sequence: Sequence) -> float:
    return 0.0 if sequence.constraint is None else sequence.constraint.seconds
