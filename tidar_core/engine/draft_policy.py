"""How much to draft: what a step costs here, how often drafts hold, and the shape that is worth most.

A sequence is in one of two states: drafts in hand, or none. With drafts it runs a chosen shape (n, P, b); the
outcome a comes out with probability P(a), and if a is in P the next step has drafts again; if not, one step
(0, {1}, b) emits one token and drafts anew. The long-run tokens per second of that cycle is compared over a few
shapes and with plain autoregression, at the size that the batch has now. Rows are priced for the batch as a whole:
where not all sequences are worth their rows, those whose drafts hold best draft and the others decode plainly. Where
steps overlap, a step is planned before it is known whether there are drafts: each has all rows of the shape.

Rows of prompts come and go, so what is best is judged for the steps without them, at the size that the batch will have
when the prompts are through; in a step beside them drafts have to be worth what they add to that very step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from tidar_core.engine.acceptance_rates import FADING, SEQUENCE_MEMORY, AcceptanceRates, outcome_probabilities
from tidar_core.engine.step_cost import NO_TIE, FloatArray, IntArray, StepCost, StepSize, curve_at
from tidar_core.layout import PLAIN, Shape, full_shape
from tidar_core.request import DraftMode

PRIOR_ACCEPTANCE = 0.55  # where a drafter does not say how often its drafts hold
PLAIN_FADING = 0.998  # weight that an observation of plain steps keeps through a step that drafts
FRESH = 40  # steps for which it is not doubted
BIAS_MEMORY = 0.95  # of how long real steps take
BIAS_MOST = 3.0  # times what is known: no more counts of a step that others held up
MOVED = 0.05  # by which one kind of steps became dearer than the other, and what was chosen before is old
FULL_ROWS = 1 << 14  # of all sequences that draft fully, in one step, at most
CHOICE_LIFE = 16, 4  # steps for which a choice is kept before it is computed anew, and more for each sequence
OTHER_GRAIN, CONTEXT_GRAIN = 64, 256  # loads that differ by less share a choice


class SequenceView(NamedTuple):
    """What the policy may know of a sequence: its draft mode, drafts in hand, its limit on b, the tokens that its
    rows attend to, how often its drafts are accepted, and whether they have a say in its text."""

    mode: DraftMode
    drafts_in_hand: int
    block_limit: int
    context: int = 0
    acceptance_rates: AcceptanceRates | None = None
    trusts_drafts: bool = False


@lru_cache(maxsize=64)
def _sizes(block_limit: int) -> tuple[tuple[int, int], ...]:
    """The pairs (b, n) that are compared."""
    blocks = [block for block in (2, 3, 4, 6, 8, 12, 16) if block < block_limit]
    return tuple((block, drafts) for block in (*blocks, block_limit) if block > 1 for drafts in range(1, block))


def candidate_shapes(acceptance: Sequence[float], block_limit: int) -> Iterator[tuple[Shape, list[float]]]:
    """Shapes worth comparing, each with its P(a): for every (b, n) the k likeliest outcomes, k = 1 … n+1.

    acceptance: P(draft i holds | drafts 1 … i-1 hold) for i = 1, 2, …, here and below.
    """
    for block, drafts in _sizes(block_limit):
        chances = outcome_probabilities(acceptance, drafts)
        ranked = sorted(range(1, drafts + 2), key=lambda outcome: -chances[outcome - 1])
        for count in range(1, drafts + 2):
            yield Shape(drafts, tuple(sorted(ranked[:count])), block), chances


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries beside the drafts: `sequences` that choose, `other_rows` that are there anyway, and the
    context. overlap_steps: each step is planned while the one before runs, with all rows of the shape whether there are
    drafts in hand or not."""

    sequences: int
    other_rows: int = 0
    context: int = 0
    overlap_steps: bool = False


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """`shape` for `drafting` sequences, plain decoding for the others. rate: the batch's tokens per second. renewal:
    tokens that drafts in hand are worth to a sequence, since it need not spend a step on new ones."""

    shape: Shape = field(default_factory=Shape)
    drafting: int = 0
    rate: float = field(default=0.0, compare=False)
    renewal: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """A choice, the step that it was made for, and how much dearer than plain steps those with mask rows then were."""

    choice: DraftChoice
    step: int
    dearer: float


def most_full(block: int, rows: int) -> int:
    """How many sequences may all draft fully, with so many slots a proposal, in one step of so many rows."""
    return max(1, rows // max(1, block + block * block))


class DraftPolicy:
    """Chooses the shape of every sequence, step by step. Texts never depend on it.

    expected_acceptance: P(draft i holds | drafts 1 … i-1 hold) for i = 1, 2, …, as the drafter's training measured it;
    the last one stands for all beyond. overlap_steps: as in `Load`. full_rows: of all sequences that draft fully, in
    one step.
    """

    def __init__(
        self,
        block_length: int,
        cost: StepCost,
        expected_acceptance: Sequence[float] = (),
        overlap_steps: bool = False,
        full_rows: int = FULL_ROWS,
    ):
        self.block_length = block_length
        self._full_rows = full_rows
        self.cost = cost
        self._overlap_steps = overlap_steps
        known = tuple(expected_acceptance) or (PRIOR_ACCEPTANCE,)
        self._expected_acceptance = (*known, *known[-1:] * block_length)[: max(0, block_length - 1)]
        self._all = AcceptanceRates(self._expected_acceptance)
        self._choices: dict[tuple[int, Load], KeptChoice] = {}
        self._step = 0
        self._without_drafts = FRESH

    def new_acceptance_rates(self) -> AcceptanceRates:
        """Those of a sequence that begins: the rates of all sequences are their prior."""
        return AcceptanceRates(self._expected_acceptance, SEQUENCE_MEMORY, whole=self._all)

    def choose(self, views: Sequence[SequenceView], prompt_rows: int, coming: int = 0) -> list[Shape]:
        """A shape for each sequence, for drafts in hand or none; the caller fits it to the sequence's limits.

        prompt_rows: verify rows of prefill chunks in the same step. coming: sequences that are not through their
        prompts, and will decode beside these.
        """
        self._step += 1
        shapes = self._full(views)
        free = [index for index, view in enumerate(views) if view.mode == "auto" and self._limit(view) > 1]
        if free:
            others = len(views) - len(free) + sum(shape.drafts + shape.mask_rows for shape in shapes if shape.block)
            chosen = self._automatic([views[i] for i in free], others, prompt_rows, coming)
            for index, shape in zip(free, chosen, strict=True):
                shapes[index] = shape
        if not any(shape.drafts for shape in shapes):
            self._all.fade()
        for index in free:
            own = views[index].acceptance_rates
            if own is not None and not shapes[index].block:
                own.fade()
        return shapes

    def took(self, size: StepSize, seconds: float) -> None:
        """Learn from a real step of this size that took `seconds`. The curves alone do not tell: they were measured
        without all that goes on around a step.

        Plain steps and steps with mask rows each have a factor on the curves. While no step with mask rows comes, a
        change in the plain factor changes theirs as well, and theirs fades towards it, so that drafts get a new
        chance. While steps with mask rows come, a plain factor above 1 fades towards 1.
        """
        if size.unscored or not size.verify:
            return
        plain, drafting = self.cost.plain, self.cost.drafting
        known = drafting if size.mask else plain
        took = min(seconds / (self.cost.seconds(size) / known), BIAS_MOST * max(plain, drafting))
        now = BIAS_MEMORY * known + (1 - BIAS_MEMORY) * took
        self._without_drafts = 0 if size.mask else self._without_drafts + 1
        if size.mask:
            likely = min(plain, 1.0)
            plain, drafting = likely + PLAIN_FADING * (plain - likely), now
        elif self._without_drafts > FRESH:
            plain, drafting = now, now * (1 + FADING * (drafting / plain - 1))
        else:
            plain = now
        self.cost = replace(self.cost, plain=plain, drafting=drafting)

    def _limit(self, view: SequenceView) -> int:
        return min(view.block_limit, self.block_length)

    def _full(self, views: Sequence[SequenceView]) -> list[Shape]:
        """Everything for those that ask for it, as far as there are rows: others decode plainly in this step. Never
        those whose text depends on their drafts."""
        shapes, left = [PLAIN] * len(views), self._full_rows
        asking = [index for index, view in enumerate(views) if view.mode == "full" and self._limit(view) > 1]
        for index in sorted(asking, key=lambda index: not views[index].trusts_drafts):
            shape = full_shape(self._limit(views[index]), views[index].drafts_in_hand)
            rows = shape.verify_rows + shape.mask_rows
            if rows <= left or views[index].trusts_drafts:
                shapes[index] = shape
                left -= rows
        return shapes

    def _automatic(self, views: Sequence[SequenceView], others: int, prompt_rows: int, coming: int) -> list[Shape]:
        """Shapes of the sequences that leave it to the policy: the best ones draft, as many as are worth it."""
        context = sum(view.context for view in views) // len(views)
        sequences = _coarse(len(views) + coming)
        load = Load(sequences, _rounded(others, OTHER_GRAIN), _rounded(context, CONTEXT_GRAIN), self._overlap_steps)
        choice = self._best(views, load)
        if not choice.drafting:
            return [PLAIN] * len(views)
        count = -(-choice.drafting * len(views) // load.sequences)
        drafting = set(range(len(views)))
        if count < len(views):  # drafts in hand were paid for already
            promises = [(view.drafts_in_hand > 0, _promise(self._acceptance(view))) for view in views]
            ranked = sorted(drafting, key=promises.__getitem__, reverse=True)
            drafting = set(ranked[:count])
        shapes = [
            _within(choice.shape, self._limit(view), view.drafts_in_hand > 0) if i in drafting else PLAIN
            for i, view in enumerate(views)
        ]
        if prompt_rows and not self._worth_beside(others + prompt_rows, views, shapes, choice, context):
            return [PLAIN] * len(views)
        return shapes

    def _worth_beside(
        self, other_rows: int, views: Sequence[SequenceView], shapes: Sequence[Shape], choice: DraftChoice, context: int
    ) -> bool:
        """Whether these shapes bring more than the time that they add to a step beside `other_rows`."""
        gain = 0.0
        for view, shape in zip(views, shapes, strict=True):
            chances = outcome_probabilities(self._acceptance(view), shape.drafts)
            gain += sum(outcome * chance for outcome, chance in enumerate(chances, 1)) - 1.0
            gain += choice.renewal * sum(chances[outcome - 1] for outcome in shape.proposals)
        size = StepSize(other_rows, len(views), sequences=len(views), context=context)
        slots = sum(len(shape.proposals) * (shape.block - 1) for shape in shapes if shape.block)
        drafted = replace(
            size,
            verify=sum(shape.verify_rows for shape in shapes),
            mask=sum(shape.mask_rows for shape in shapes),
            slots=slots,
            picked=slots,
        )
        return gain > choice.rate * (self.cost.seconds(drafted) - self.cost.seconds(size))

    def _acceptance(self, view: SequenceView) -> tuple[float, ...]:
        return (view.acceptance_rates or self._all).rates()

    def _best(self, views: Sequence[SequenceView], load: Load) -> DraftChoice:
        limit = min(max(view.block_limit for view in views), self.block_length)
        key, dearer = (limit, load), self.cost.drafting / self.cost.plain
        kept = self._choices.get(key)
        life = CHOICE_LIFE[0] + CHOICE_LIFE[1] * load.sequences
        if kept is None or self._step - kept.step >= life or abs(dearer / kept.dearer - 1) > MOVED:
            if len(self._choices) > 1024:
                self._choices.clear()
            known = [self._acceptance(view) for view in views]
            known += [self._all.rates()] * (load.sequences - len(views))
            ranked = sorted(known, key=_promise, reverse=True)
            kept = KeptChoice(best_choice(self.cost, ranked, limit, load), self._step, dearer)
            self._choices[key] = kept
        return kept.choice


@lru_cache(maxsize=256)
def _within(shape: Shape, limit: int, in_hand: bool) -> Shape:
    """The shape within the limit on b that a request may have set; without drafts in hand, new ones first."""
    block = min(shape.block, limit)
    drafts = min(shape.drafts, block - 1)
    proposals = tuple(outcome for outcome in shape.proposals if outcome <= drafts + 1)
    return Shape(drafts, proposals, block) if in_hand else Shape(0, (1,), block)


def _rounded(count: int, grain: int) -> int:
    return (count + grain // 2) // grain * grain


def _coarse(sequences: int) -> int:
    """No fewer, to four binary digits: a batch that loses one after the other would ask for a choice each step."""
    grain = 1 << max(0, sequences.bit_length() - 4)
    return -(-sequences // grain) * grain


def _promise(acceptance: Sequence[float]) -> float:
    """Drafts that are expected to hold in a row."""
    return sum(accumulate(acceptance, mul))


def best_choice(cost: StepCost, ranked: Sequence[Sequence[float]], block_limit: int, load: Load) -> DraftChoice:
    """The most tokens per second: how many of the sequences draft, and in which shape.

    ranked: the acceptance of each sequence, the most promising first.
    """
    alone = StepSize(load.other_rows, load.sequences, sequences=load.sequences, context=load.context)
    best, best_rate = DraftChoice(), load.sequences / cost.seconds(alone)
    drafting = load.sequences
    while drafting:
        acceptance = [sum(column) / drafting for column in zip(*ranked[:drafting], strict=True)]
        shape, rate, renewing = best_shape(cost, acceptance, block_limit, load, drafting)
        if rate > best_rate:
            renewal = max(0.0, (rate * renewing - load.sequences) / drafting)
            best, best_rate = DraftChoice(shape, drafting, rate, renewal), rate
        drafting //= 2
    return best


def best_shape(
    cost: StepCost, acceptance: Sequence[float], block_limit: int, load: Load, drafting: int
) -> tuple[Shape, float, float]:
    """The one of `candidate_shapes` that gives most tokens per second, how many, and the seconds of a step that only
    brings it new drafts. All are priced at once, since a busy engine asks often.

    `drafting` sequences run a shape while they have drafts in hand, with one step (0, {1}, b) after each miss; where
    steps overlap that one has all rows of the shape.
    """
    drafts, blocks, counts = _candidates(block_limit)
    longest = int(drafts.max())
    hits, tokens = np.zeros((longest + 1, longest + 2)), np.zeros(longest + 1)
    chances = [np.array(outcome_probabilities(acceptance, n)) for n in range(longest + 1)]
    for n in range(1, longest + 1):
        hits[n, 1 : n + 2] = np.sort(chances[n])[::-1].cumsum()
        tokens[n] = chances[n] @ np.arange(1, n + 2)
    hit: FloatArray = hits[drafts, counts].clip(0.0, 1.0)
    in_hand: FloatArray = 1.0 / (2.0 - hit)
    one, sure = np.ones_like(drafts), np.ones_like(hit)
    if load.overlap_steps:
        seconds = renewing = _step_seconds(cost, load, drafting, drafts, blocks, counts, sure)
    else:
        renewing = _step_seconds(cost, load, drafting, 0 * one, blocks, one, sure)
        seconds = in_hand * _step_seconds(cost, load, drafting, drafts, blocks, counts, hit)
        seconds += (1.0 - in_hand) * renewing
    per_sequence = in_hand * tokens[drafts] + 1.0 - in_hand
    rates = (drafting * per_sequence + load.sequences - drafting) / seconds
    found = int(rates.argmax())
    likeliest = np.argsort(-chances[drafts[found]], kind="stable")[: counts[found]] + 1
    shape = Shape(int(drafts[found]), tuple(sorted(likeliest.tolist())), int(blocks[found]))
    return shape, float(rates[found]), float(renewing[found])


@lru_cache(maxsize=64)
def _candidates(block_limit: int) -> tuple[IntArray, IntArray, IntArray]:
    """n, b and the number of outcomes of every candidate."""
    sizes = [(n, b, count) for b, n in _sizes(block_limit) for count in range(1, n + 2)]
    found = np.array(sizes).T
    found.setflags(write=False)
    drafts, blocks, counts = found
    return drafts, blocks, counts


def _step_seconds(
    cost: StepCost, load: Load, drafting: int, drafts: IntArray, blocks: IntArray, counts: IntArray, hit: FloatArray
) -> FloatArray:
    """Seconds of steps in which `drafting` sequences run each of many shapes, all with mask rows; a sequence finds its
    outcome among the proposals with probability `hit`."""
    # `StepCost.seconds` over arrays: one by one the shapes take eight times as long, and by way of arrays a single step
    # seven times. test_all_shapes_at_once_are_priced_as_one_by_one holds the two together.
    any_hit = 1.0 - (1.0 - hit) ** drafting
    verify, mask = load.sequences + drafting * drafts, drafting * counts * blocks
    slots = drafting * (blocks - 1)
    picked = slots * np.divide(hit, any_hit, out=np.zeros_like(hit), where=any_hit > 0)
    rows = load.other_rows + verify + mask
    trunk = curve_at(cost.rows, cost.trunk, rows)
    attention: FloatArray = load.context * (load.sequences * cost.reading + rows * cost.attending)
    first, second = curve_at(cost.rows, cost.head, verify), curve_at(cost.rows, cost.head, picked)
    second[picked == 0] = 0.0
    once = curve_at(cost.rows, cost.head, verify + slots * counts)
    head = np.where(once < NO_TIE * (first + second), once, first + any_hit * second)
    seconds: FloatArray = cost.drafting * (trunk + attention + curve_at(cost.rows, cost.adapter, mask) + head)
    return seconds
