"""Sequences whose grammars take long take turns: else everybody waits in each step for all of them."""

from collections.abc import Callable, Collection
from itertools import accumulate

from tidar_core.request import Sequence

SLOW_SECONDS = 0.01  # of a step, from where on a grammar is slow
TOGETHER_SECONDS = 0.05  # that slow ones may take of a step, where that is not shorter itself


class Turns:
    """Whose turn it is among the sequences with slow grammars, whatever their priority. After a step with some of them,
    all of them sit out for as long as the grammars took in it, so that the others have about half of the time; where
    there are no others nobody sits out.

    A sequence that sits out keeps its pages and goes on later: its tokens come later, and are the same.
    """

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._went: list[Sequence] = []
        self._idle_until = 0.0

    def sitting_out(
        self, running: Collection[Sequence], step_seconds: Callable[[int], float], now: float
    ) -> frozenset[Sequence]:
        """Those that have no rows in the step that begins now. step_seconds: what a step of so many sequences takes
        without grammars."""
        went, self._went = self._went, []
        if went:
            self._idle_until = now + sum(map(_seconds, went))
        slow = [sequence for sequence in running if _seconds(sequence) > SLOW_SECONDS]
        before = [sequence for sequence in self._line if sequence in slow]
        self._line = before + [sequence for sequence in slow if sequence not in before]
        if now < self._idle_until and len(slow) < len(running):
            return frozenset(slow)
        if not slow:
            return frozenset()
        most = max(TOGETHER_SECONDS, step_seconds(len(running)))
        fit = max(1, sum(seconds <= most for seconds in accumulate(map(_seconds, self._line))))
        self._went, idle = self._line[:fit], self._line[fit:]
        self._line = idle + self._went
        return frozenset(idle)


def _seconds(sequence: Sequence) -> float:
    """Seconds of a step that a sequence's grammar takes; none while known tokens are computed."""
    if sequence.constraint is None or len(sequence.tokens) - sequence.computed != 1:
        return 0.0
    return sequence.constraint.seconds
