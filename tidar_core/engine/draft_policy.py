"""How much to draft: what a step costs here, how often drafts hold, and the shape that is worth most.

A sequence is in one of two states: drafts in hand, or none. With drafts it runs a chosen shape (n, P, b); the
outcome a comes out with probability P(a), and if a is in P the next step has drafts again; if not, one step
(0, {1}, b) emits one token and drafts anew. The long-run tokens per second of that cycle is compared over a few
shapes and with plain autoregression, at the size that the batch has now.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from tidar_core.layout import Shape, full_shape
from tidar_core.request import DraftMode

PRIOR_HOLDS = 0.55
PRIOR_WEIGHT = 10.0
MEMORY = 0.995  # weight that an observation keeps when the next one comes
CHOICE_LIFE = 16  # steps for which a choice is kept before it is computed anew


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured seconds at a few row counts (ascending); interpolated between, extended linearly beyond.

    trunk: all layers. head: scores and the token rule. adapter: what mask rows cost beside the trunk.
    """

    rows: tuple[int, ...]
    trunk: tuple[float, ...]
    head: tuple[float, ...]
    adapter: tuple[float, ...]

    def seconds(self, verify: float, mask: float, picked: float) -> float:
        """A step of `verify` verify rows, `mask` mask rows and `picked` drafts picked for the next step."""
        cost = self._at(self.trunk, verify + mask) + self._at(self.head, verify)
        return cost + self._at(self.adapter, mask) + self._at(self.head, picked) if mask else cost

    def trunk_seconds(self, rows: float) -> float:
        """All layers of so many rows of whichever kind, without the adapter."""
        return self._at(self.trunk, rows)

    def _at(self, curve: tuple[float, ...], rows: float) -> float:
        if rows <= self.rows[0]:
            return curve[0]
        if len(self.rows) == 1:
            return curve[0] * rows / self.rows[0]
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)
        return curve[right - 1] + share * (curve[right] - curve[right - 1])


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the policy may know of a sequence: its draft mode, drafts in hand, and its limit on b."""

    mode: DraftMode
    drafts_in_hand: int
    block_limit: int


class Acceptance:
    """How often draft i holds when those before it did: smoothed over a prior, recent steps weigh most."""

    def __init__(self, drafts: int):
        self._tried = [0.0] * drafts
        self._held = [0.0] * drafts

    def observe(self, verified: int, held: int) -> None:
        """One step verified `verified` drafts, of which the first `held` held."""
        for draft in range(min(verified, held + 1)):
            self._tried[draft] = self._tried[draft] * MEMORY + 1.0
            self._held[draft] = self._held[draft] * MEMORY + (draft < held)

    def fade(self) -> None:
        """A step without drafts: what was learnt counts a little less, so that drafting gets a new chance."""
        self._tried = [count * MEMORY for count in self._tried]
        self._held = [count * MEMORY for count in self._held]

    def holds(self) -> tuple[float, ...]:
        """P(draft i holds | drafts 1 … i-1 hold), for i = 1, 2, …"""
        return tuple(
            (held + PRIOR_HOLDS * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            for held, tried in zip(self._held, self._tried, strict=True)
        )


def outcome_probabilities(holds: Sequence[float], drafts: int) -> list[float]:
    """P(a) for a = 1 … n+1, where n = `drafts` drafts are verified."""
    survive = list(accumulate(holds[:drafts], mul, initial=1.0))
    return [survive[i] * (1.0 - holds[i]) for i in range(drafts)] + [survive[drafts]]


@lru_cache(maxsize=64)
def _sizes(block_limit: int) -> tuple[tuple[int, int], ...]:
    """The pairs (b, n) that are compared."""
    blocks = [block for block in (2, 3, 4, 6, 8, 12, 16) if block < block_limit]
    return tuple((block, drafts) for block in (*blocks, block_limit) if block > 1 for drafts in range(1, block))


def candidate_shapes(holds: Sequence[float], block_limit: int) -> Iterator[tuple[Shape, list[float]]]:
    """Shapes worth comparing, each with its P(a): for every (b, n) the k likeliest outcomes, k = 1 … n+1."""
    for block, drafts in _sizes(block_limit):
        chances = outcome_probabilities(holds, drafts)
        ranked = sorted(range(1, drafts + 2), key=lambda outcome: -chances[outcome - 1])
        for count in range(1, drafts + 2):
            yield Shape(drafts, tuple(sorted(ranked[:count])), block), chances


class DraftPolicy:
    """Chooses the shape of every sequence, step by step. Texts never depend on it."""

    def __init__(self, block_length: int, cost: StepCost):
        self.block_length = block_length
        self.acceptance = Acceptance(max(0, block_length - 1))
        self._cost = cost
        self._choices: dict[tuple[int, int, int], tuple[int, Shape]] = {}
        self._step = 0

    def choose(self, views: Sequence[SequenceView], known_rows: int) -> list[Shape]:
        """A shape for each sequence, for drafts in hand or none; the caller fits it to the sequence's limits.

        known_rows: verify rows of prefill chunks in the same step.
        """
        self._step += 1
        automatic = sum(view.mode == "auto" for view in views)
        shapes = [self._shape(view, automatic, known_rows) for view in views]
        if not any(shape.drafts for shape in shapes):
            self.acceptance.fade()
        return shapes

    def _shape(self, view: SequenceView, automatic: int, known_rows: int) -> Shape:
        limit = min(view.block_limit, self.block_length)
        if limit < 2 or view.mode == "off":
            return Shape()
        if view.mode == "full":
            return full_shape(limit, view.drafts_in_hand)
        best = self._best(limit, automatic, known_rows)
        return best if view.drafts_in_hand or not best.proposals else Shape(0, (1,), best.block)

    def _best(self, block_limit: int, sequences: int, known_rows: int) -> Shape:
        key = (block_limit, sequences, known_rows)
        chosen = self._choices.get(key)
        if chosen is None or self._step - chosen[0] >= CHOICE_LIFE:
            if len(self._choices) > 1024:
                self._choices.clear()
            chosen = (self._step, best_shape(self._cost, self.acceptance.holds(), block_limit, sequences, known_rows))
            self._choices[key] = chosen
        return chosen[1]


def best_shape(cost: StepCost, holds: Sequence[float], block_limit: int, sequences: int, known_rows: int) -> Shape:
    """The shape with the most tokens per second where `sequences` alike run it; `Shape()` for plain decoding."""
    best, best_rate = Shape(), 1.0 / cost.seconds(known_rows + sequences, 0, 0)
    for shape, chances in candidate_shapes(holds, block_limit):
        miss = 1.0 - sum(chances[outcome - 1] for outcome in shape.proposals)
        tokens = sum(outcome * chance for outcome, chance in enumerate(chances, 1)) + miss
        picked = sequences * (shape.block - 1)
        drafting = cost.seconds(known_rows + sequences * shape.verify_rows, sequences * shape.mask_rows, picked)
        renewing = cost.seconds(known_rows + sequences, sequences * shape.block, picked)
        rate = tokens / (drafting + miss * renewing)
        if rate > best_rate:
            best, best_rate = shape, rate
    return best
