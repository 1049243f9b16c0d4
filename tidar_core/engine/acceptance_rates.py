"""How often drafts are accepted: what is expected at first, and what was seen since."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

PRIOR_WEIGHT = 10.0
MEMORY, SEQUENCE_MEMORY = 0.995, 0.97  # weight that an observation keeps when the next one comes: of all, of one
FADING = 0.995  # weight that it keeps through a step without drafts


class AcceptanceRates:
    """How often draft i holds where those before it did: smoothed over a prior, recent steps weigh most.

    expected: the rate of each draft before any was seen. memory: the weight that an observation keeps when the next one
    comes. whole: the rates of all sequences, which those of one sequence are a part of: it learns what this one
    observes, and its rates are the prior in place of `expected`.
    """

    def __init__(self, expected: Sequence[float], memory: float = MEMORY, whole: "AcceptanceRates | None" = None):
        self._expected = tuple(expected)
        self._tried = [0.0] * len(self._expected)
        self._accepted = [0.0] * len(self._expected)
        self._memory = memory
        self._whole = whole
        self._idle = 0  # steps whose fading is still to be counted
        self._known: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # the prior, and the rates over it

    def observe(self, verified: int, accepted: int) -> None:
        """One step verified `verified` drafts, of which the first `accepted` held."""
        self._settle()
        self._known = None
        for draft in range(min(verified, accepted + 1)):
            self._tried[draft] = self._tried[draft] * self._memory + 1.0
            self._accepted[draft] = self._accepted[draft] * self._memory + (draft < accepted)
        if self._whole is not None:
            self._whole.observe(verified, accepted)

    def fade(self) -> None:
        """A step without drafts: what was learnt counts a little less, so that drafting gets a new chance."""
        self._idle += 1
        self._known = None

    def rates(self) -> tuple[float, ...]:
        """P(draft i holds | drafts 1 … i-1 hold), for i = 1, 2, …"""
        prior = self._expected if self._whole is None else self._whole.rates()
        if self._known is None or self._known[0] is not prior:
            self._settle()
            counts = zip(self._accepted, self._tried, prior, strict=True)
            rates = [(held + expected * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT) for held, tried, expected in counts]
            self._known = prior, tuple(rates)
        return self._known[1]

    def _settle(self) -> None:
        if self._idle:
            left = FADING**self._idle
            self._tried = [count * left for count in self._tried]
            self._accepted = [count * left for count in self._accepted]
            self._idle = 0


def outcome_probabilities(acceptance: Sequence[float], drafts: int) -> list[float]:
    """P(a) for a = 1 … n+1, where n = `drafts` drafts are verified. acceptance: P(draft i holds | drafts 1 … i-1 hold)
    for i = 1, 2, …"""
    survive = list(accumulate(acceptance[:drafts], mul, initial=1.0))
    return [survive[i] * (1.0 - acceptance[i]) for i in range(drafts)] + [survive[drafts]]
