"""How often drafts hold: what is expected of them at first, and what was seen since."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

PRIOR_WEIGHT = 10.0
MEMORY, SEQUENCE_MEMORY = 0.995, 0.97  # weight that an observation keeps when the next one comes: of all, of one
FADING = 0.995  # weight that it keeps through a step without drafts


class HeldDrafts:
    """How often draft i holds when those before it did: smoothed over a prior, recent steps weigh most.

    expected: of each draft, before any was seen. memory: what an observation still weighs when the next one comes.
    whole: the books that this one's are a part of, as a sequence's are of all; they stand in for `expected`.
    """

    def __init__(self, expected: Sequence[float], memory: float = MEMORY, whole: "HeldDrafts | None" = None):
        self._expected = tuple(expected)
        self._tried = [0.0] * len(self._expected)
        self._held = [0.0] * len(self._expected)
        self._memory = memory
        self._whole = whole
        self._idle = 0  # steps whose fading is still to be counted
        self._known: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # what `holds` said, over which prior

    def observe(self, verified: int, held: int) -> None:
        """One step verified `verified` drafts, of which the first `held` held."""
        self._settle()
        self._known = None
        for draft in range(min(verified, held + 1)):
            self._tried[draft] = self._tried[draft] * self._memory + 1.0
            self._held[draft] = self._held[draft] * self._memory + (draft < held)
        if self._whole is not None:
            self._whole.observe(verified, held)

    def fade(self) -> None:
        """A step without drafts: what was learnt counts a little less, so that drafting gets a new chance."""
        self._idle += 1
        self._known = None

    def holds(self) -> tuple[float, ...]:
        """P(draft i holds | drafts 1 … i-1 hold), for i = 1, 2, …"""
        prior = self._expected if self._whole is None else self._whole.holds()
        if self._known is None or self._known[0] is not prior:
            self._settle()
            books = zip(self._held, self._tried, prior, strict=True)
            holds = [(held + expected * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT) for held, tried, expected in books]
            self._known = prior, tuple(holds)
        return self._known[1]

    def _settle(self) -> None:
        if self._idle:
            left = FADING**self._idle
            self._tried = [count * left for count in self._tried]
            self._held = [count * left for count in self._held]
            self._idle = 0


def outcome_probabilities(holds: Sequence[float], drafts: int) -> list[float]:
    """P(a) for a = 1 … n+1, where n = `drafts` drafts are verified."""
    survive = list(accumulate(holds[:drafts], mul, initial=1.0))
    return [survive[i] * (1.0 - holds[i]) for i in range(drafts)] + [survive[drafts]]
