"""The rows that a step still has to give while it is planned."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from tidar_core.engine.step_cost import StepCost
from tidar_core.request import Sequence

PROMPT_SECONDS = 2.0  # of a step, that reading prompts takes
LEAST_PROMPT_ROWS = 64  # that are read all the same: with fewer, reading the weights costs as much as the rows do


def rows_to_read(cost: StepCost, going: Items[Sequence], decoding: int, most: int) -> int:
    """Rows of known tokens for a step: `most`, or fewer where it would take long with so many, as with a large model on
    a CPU. Meanwhile nobody hears anything, and nobody who leaves is heard. decoding: how many of those `going` have
    only one token to be computed."""
    context = max((each.computed for each in going if len(each.tokens) - each.computed > 1), default=0)
    return min(most, decoding + max(LEAST_PROMPT_ROWS, cost.rows_within(PROMPT_SECONDS, context, most)))


class StepBudget:
    """Who runs in the step that is planned, and with how many known tokens: `rows` in all, `most` at most. One row is
    kept for each sequence of `decoding` that was not put in yet, so that a more urgent long prompt does not silence
    it."""

    def __init__(self, most: int, decoding: Iterable[Sequence]) -> None:
        self.counts: dict[Sequence, int] = {}
        self.rows = 0
        self._most = most
        self._kept = dict.fromkeys(decoding)

    def room(self, sequence: Sequence) -> int:
        """Rows that a sequence may have now: where there are any, one at least."""
        left = self._most - self.rows
        return max(left - len(self._kept) + (sequence in self._kept), min(1, left))

    def put(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence `count` rows of known tokens."""
        self.counts[sequence] = count
        self.rows += count
        self._kept.pop(sequence, None)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out of the step, its kept row included; one that is not here is ignored."""
        self.rows -= self.counts.pop(sequence, 0)
        self._kept.pop(sequence, None)
