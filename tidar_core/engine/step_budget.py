"""The rows that a step still has to give while it is planned."""

import math
from collections.abc import Callable, Iterable
from functools import cache, partial

from tidar_core.engine.step_cost import StepCost
from tidar_core.request import Sequence

LEAST_PROMPT_ROWS = 64  # that are read in any step: with fewer, reading the weights costs as much as the rows do

RowsBehind = Callable[[int], int]
"""How many rows of a prompt a step may read behind so many tokens of it."""


def rows_behind(cost: StepCost, seconds: float, most: int) -> RowsBehind | None:
    """At most `most` rows, and fewer where that many would take longer than `seconds`, as with a large model on a CPU:
    meanwhile nobody hears anything, and nobody who leaves is heard. None where `seconds` is infinite."""
    return None if math.isinf(seconds) else cache(partial(_rows_behind, cost, seconds, most))


def _rows_behind(cost: StepCost, seconds: float, most: int, context: int) -> int:
    return min(most, max(LEAST_PROMPT_ROWS, cost.rows_within(seconds, context, most)))


class StepBudget:
    """Who runs in the step that is planned, and with how many known tokens: `rows` in all, `most` at most. One row is
    kept for each sequence of `decoding` that was not put in yet, so that a more urgent long prompt does not silence
    it. Of the time for prompts, where that is limited, each row of one takes the share that `rows_behind` gives it."""

    def __init__(self, most: int, decoding: Iterable[Sequence], rows_behind: RowsBehind | None) -> None:
        self.counts: dict[Sequence, int] = {}
        self.rows = 0
        self._most = most
        self._kept = dict.fromkeys(decoding)
        self._rows_behind = rows_behind
        self._shares: dict[Sequence, float] = {}
        self._left_to: dict[Sequence, int] = {}

    def room(self, sequence: Sequence) -> int:
        """Rows that a sequence may have now. Where there are any, one that decodes may have one at least."""
        left = self._most - self.rows
        room = max(left - len(self._kept) + (sequence in self._kept), min(1, left))
        if self._rows_behind is None or sequence in self._kept:
            return room
        if self._left_to:
            room = min(room, self._left_to.get(sequence, 0))
        time_left = 1.0 - sum(self._shares.values())
        return min(room, round(time_left * self._rows_behind(sequence.computed)))

    def is_slow(self, sequence: Sequence) -> bool:
        """Whether time is what limits how much of a sequence's prompt a step reads."""
        return self._rows_behind is not None and self._rows_behind(sequence.computed) < self._most

    def leave(self, sequence: Sequence, count: int, running: Iterable[Sequence], coming: Iterable[Sequence]) -> int:
        """What a long prompt, which by itself may take minutes, takes of `count` rows. Up to half is for others that
        have none yet, are at least as urgent, and have less than half of its rest to read; from now on no other prompt
        has any. Longer ones would gain less than it loses: where they come anew they may have one row, so that those
        behind them come too."""
        if self._rows_behind is None:
            return count
        urgency, half = sequence.request.priority, sequence.uncomputed / 2
        running = [each for each in running if each not in self.counts and 1 < each.uncomputed < half]
        urgent = [each for each in (*running, *coming) if each.request.priority <= urgency]
        self._left_to = {each: each.uncomputed if each.uncomputed < half else 1 for each in urgent}
        wanted = sum(rows / self._rows_behind(each.computed) for each, rows in self._left_to.items())
        # One at least: behind a long context a row takes as long as many short prompts, which would never come.
        least = min(1, len(self._left_to))
        return count - min(count // 2, max(least, round(wanted * self._rows_behind(sequence.computed))))

    def put(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence `count` rows of known tokens."""
        self.counts[sequence] = count
        self.rows += count
        if sequence in self._kept:
            del self._kept[sequence]
        elif self._rows_behind is not None:
            self._shares[sequence] = count / self._rows_behind(sequence.computed)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out of the step, its kept row included; one that is not here is ignored."""
        self.rows -= self.counts.pop(sequence, 0)
        self._shares.pop(sequence, None)
        self._kept.pop(sequence, None)
