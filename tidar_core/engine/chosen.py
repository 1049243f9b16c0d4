"""The rows of a step while it is planned."""

from collections.abc import Iterable

from tidar_core.request import Sequence


class Chosen:
    """Who runs in the step that is planned, with how many known tokens, `rows` of them in all, `most` at most. Each of
    `decoding` that has not come yet has one row kept for it: a long prompt of greater urgency does not silence it."""

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
        self.counts[sequence] = count
        self.rows += count
        self._kept.pop(sequence, None)

    def drop(self, sequence: Sequence) -> None:
        self.rows -= self.counts.pop(sequence, 0)
        self._kept.pop(sequence, None)
