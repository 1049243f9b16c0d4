"""Who runs in the next step, with which rows and pages, and what the step's answers change."""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from tidar_core.engine.draft_policy import DraftPolicy, SequenceView
from tidar_core.engine.ending import ends_of, settle
from tidar_core.engine.pages import PagePool
from tidar_core.engine.step_budget import StepBudget, rows_behind
from tidar_core.engine.step_cost import StepSize
from tidar_core.engine.turns import Turns
from tidar_core.layout import PLAIN, Shape, count_committed, drafts_left, fit_shape
from tidar_core.prefixes import first_key, mark_pages, page_keys
from tidar_core.request import FinishReason, Sequence, StepOutput, StepTrace, page_numbers

if TYPE_CHECKING:
    from torch import Tensor


class SequencePlan(NamedTuple):
    """The rows of one sequence in one step.

    start: the cursor. known: tokens from there on whose place is settled: a prefill chunk, or the anchor alone.
    drafts: those verified behind them. shape: how many, and the proposals, counted from p = the position of the
    last known token. emits: the chunk reaches the last token of the sequence, so that the step decides new ones.
    idle: rows of both kinds that ran beside these for drafts that did not come.
    """

    sequence: Sequence
    start: int
    known: tuple[int, ...]
    drafts: tuple[int, ...]
    shape: Shape
    emits: bool
    idle: tuple[int, int] = (0, 0)

    @property
    def position(self) -> int:
        """p of the step: where the last known token stands."""
        return self.start + len(self.known) - 1

    @property
    def verify_rows(self) -> int:
        """Rows of known tokens and drafts."""
        return len(self.known) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class Limits:
    """max_running sequences at once; known_rows known tokens a step; positions below max_positions. prompt_seconds of a
    step, by measured cost, for reading prompts: infinite where rows alone limit that."""

    max_running: int
    known_rows: int
    max_positions: int
    page_size: int
    eos_ids: frozenset[int]
    prompt_seconds: float


@dataclass(frozen=True, slots=True)
class _Refused:
    """The sequence that was the last to find too few pages, how many pages it could have had, and the key of the first
    page of its prefix that nobody had computed: others may have done so by now."""

    sequence: Sequence | None
    room: int
    missed: bytes | None


class Scheduler:
    """Continuous batching: requests join and leave between steps, prompts are computed in chunks beside decoding.

    When pages run short the least urgent sequence, of several the one that was admitted last, gives its own back and
    starts over from its tokens. One that waits has its place taken from a less urgent one in the same way. Those with
    slow grammars take turns (`turns.py`).
    """

    def __init__(self, pool: PagePool, policy: DraftPolicy, limits: Limits):
        self.pool = pool
        self.policy = policy
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        """In the order in which they were admitted."""
        self.preemptions = 0
        """How often a sequence gave its place back."""
        self.begun: list[tuple[str, float]] = []
        """Requests that ran for the first time since this was last emptied, and when, on the monotonic clock."""
        self._refused = _Refused(None, 0, None)
        self._turns = Turns()

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the waiting line."""
        if sequence.request.params.draft_trust >= 1.0:  # else drafts hold that are wrong: that tells nothing of others
            sequence.acceptance_rates = self.policy.new_acceptance_rates()
        sequence.ends = ends_of(sequence, self.limits.eos_ids)
        self._queue(sequence)

    def has(self, request_id: str) -> bool:
        """Whether a request of this id runs or waits."""
        return any(s.request.request_id == request_id for queue in (self.running, self.waiting) for s in queue)

    def remove(self, request_id: str) -> bool:
        """Takes a request out, wherever it is, and frees its pages; False if it is not here."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request.request_id == request_id:
                if sequence in self.running:
                    del self.running[sequence]
                else:
                    self.waiting.remove(sequence)
                self._release(sequence)
                return True
        return False

    def plan(self) -> list[SequencePlan]:
        """The rows of the next step, those of urgent sequences first. Reserves their pages; may preempt and admit."""
        idle = self._turns.sitting_out(self.running, self._plain_seconds, time.monotonic())
        decoding = [sequence for sequence in self.running if sequence not in idle and sequence.uncomputed == 1]
        most = self.limits.known_rows
        budget = StepBudget(most, decoding, rows_behind(self.policy.cost, self.limits.prompt_seconds, most))
        for sequence in sorted(self.running, key=_priority):
            self._admit(budget, before=_priority(sequence))
            if sequence not in self.running or sequence in idle:
                continue  # preempted for one before it, or not its turn
            count = min(sequence.uncomputed, budget.room(sequence))
            if 0 < count < sequence.uncomputed and budget.is_slow(sequence):
                count = budget.leave(sequence, count, self.running, self._coming())
            if count > 0 and self._reserve(sequence, count, budget):
                budget.put(sequence, count)
        self._admit(budget)
        return self._shaped(list(budget.counts.items()), len(idle & self.running.keys()))

    def _coming(self) -> list[Sequence]:
        """Those that wait and may come in now, even if nothing of theirs is cached; in their order."""
        places = max(1, self.limits.max_running - len(self.running))
        return list(takewhile(self._fits, islice(self.waiting, places)))

    def _plain_seconds(self, count: int) -> float:
        """Seconds of a step in which `count` sequences have one row each."""
        return self.policy.cost.seconds(StepSize(0, count, sequences=count))

    def _admit(self, budget: StepBudget, before: int | None = None) -> None:
        """Lets in those that wait, as far as there is room; with `before` only those more urgent than that."""
        while self.waiting and (before is None or _priority(self.waiting[0]) < before):
            sequence = self.waiting[0]
            room = budget.room(sequence)
            if room <= 0 or (self._full() and not self._yielding(sequence)):
                return
            cached = sequence.cached
            self._reuse(sequence)
            if not self._make_way(sequence, budget):
                missed = next(iter(sequence.prefix_keys[len(sequence.page_keys) :]), None)
                self._release(sequence)
                sequence.cached = cached
                self._refused = _Refused(sequence, self._room(sequence), missed)
                return
            behind_cached = max(1, budget.room(sequence))  # fewer than before: there a row takes longer
            count = min(sequence.uncomputed, room, behind_cached)
            self.waiting.remove(sequence)
            self.running[sequence] = None
            if cached is None:
                self.begun.append((sequence.request.request_id, time.monotonic()))
            self._reserve(sequence, count, budget)
            budget.put(sequence, count)

    def plan_ahead(self, under_way: Items[SequencePlan]) -> tuple[list[SequencePlan], list[int]] | None:
        """The plans of the step behind one that is not over, and for each the index of the plan that it follows. None
        where the step has to be waited for.

        Positions count from where the plans under way stand, since only the device will know how far they get. Tokens
        are named by their place in the state (0 the anchor, i draft i). Rows and pages are for the most that may come.
        """
        places = {plan.sequence: place for place, plan in enumerate(under_way)}
        if not all(sequence in places for sequence in self.running):
            return None
        if self._may_admit():
            return None
        going = [sequence for sequence in self.running if sequence.remaining(self.limits.max_positions) > 1]
        if not going:
            return None
        sources = [places[sequence] for sequence in going]
        before = [under_way[source] for source in sources]
        in_hand = [_drafts_to_come(plan) for plan in before]
        views = [self._view(sequence, drafts) for sequence, drafts in zip(going, in_hand, strict=True)]
        shapes = self.policy.choose(views, prompt_rows=0)
        plans, missing, page_size = [], [], self.limits.page_size
        for sequence, plan, drafts_in_hand, wanted in zip(going, before, in_hand, shapes, strict=True):
            position, committed = plan.position, len(plan.drafts) + 1
            shape = wanted if wanted is PLAIN else self._fitted(wanted, sequence, drafts_in_hand, committed)
            drafts = tuple(range(1, shape.drafts + 1)) if shape.drafts else ()
            plans.append(SequencePlan(sequence, position, (0,), drafts, shape, True))
            more = -(-(position + committed + 1 + shape.drafts) // page_size) - len(sequence.pages)
            if more > 0:
                missing.append((sequence, more))
        if sum(more for _, more in missing) > self.pool.available:
            return None
        for sequence, more in missing:
            sequence.pages.extend(self.pool.take(more))
        return plans, sources

    def commit(
        self, plans: Items[SequencePlan], truths: Items[Items[int]], retry_without_drafts: bool = False
    ) -> list[StepOutput]:
        """Commits what the plans computed and returns what they emit. truths[i]: the true tokens behind plan i's last
        known token and behind each of its drafts. retry_without_drafts: one that could not be picked behind drafts
        (below 0) is asked for once more without them; not where a step behind has been launched as if it were the
        next."""
        now = time.monotonic()
        return [
            output
            for plan, answers in zip(plans, truths, strict=True)
            if (output := self._commit_one(plan, answers, now, retry_without_drafts)) is not None
        ]

    def take_drafts(self, sequence: Sequence, drafts: Items[int], scores: "Tensor | None" = None) -> None:
        """Takes new drafts, up to the first that could not be picked (below 0). scores: [drafts, vocab], the drafter's
        scores, where they have a say in the text."""
        sequence.drafts, sequence.draft_scores = [], scores
        for token in drafts:
            if token < 0:
                break
            sequence.drafts.append(token)

    def _shaped(self, chosen: list[tuple[Sequence, int]], idle: int) -> list[SequencePlan]:
        """The plans of the chosen sequences, with the policy's shape where a chunk reaches the last known token. idle:
        how many sequences sit out."""
        emitting = [(s, count) for s, count in chosen if s.computed + count == len(s.tokens)]
        prompt_rows = sum(count for _, count in chosen) - len(emitting)
        waiting = min(len(self.waiting), self.limits.max_running - len(self.running))
        coming = len(self.running) - idle - len(emitting) + waiting
        wanted = iter(self.policy.choose([self._view(s, len(s.drafts)) for s, _ in emitting], prompt_rows, coming))
        plans = []
        for sequence, count in chosen:
            known = tuple(sequence.tokens[sequence.computed : sequence.computed + count])
            emits = sequence.computed + count == len(sequence.tokens)
            shape = self._fitted(next(wanted), sequence, len(sequence.drafts)) if emits else PLAIN
            drafts = tuple(sequence.drafts[: shape.drafts])
            plans.append(SequencePlan(sequence, sequence.computed, known, drafts, shape, emits))
        return plans

    def _fitted(self, wanted: Shape, sequence: Sequence, drafts_in_hand: int, coming: int = 0) -> Shape:
        """The part of a shape that a sequence can use. coming: how many tokens the step before it may still commit."""
        most = self.limits.max_positions
        return fit_shape(
            wanted,
            drafts_in_hand=drafts_in_hand,
            remaining=max(1, sequence.remaining(most) - coming),
            position=len(sequence.tokens) - 1 + coming,
            max_positions=most,
        )

    def _view(self, sequence: Sequence, drafts_in_hand: int) -> SequenceView:
        params, constraint = sequence.request.params, sequence.constraint
        guesses = constraint is None or constraint.guesses or params.draft_trust < 1.0
        return SequenceView(
            params.drafting if guesses else "off",
            drafts_in_hand,
            params.block or self.policy.block_length,
            len(sequence.tokens),
            sequence.acceptance_rates,
            params.draft_trust < 1.0,
        )

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        """Pages that `count` known tokens need beyond those owned, any drafts behind them included."""
        end = min(sequence.computed + count + len(sequence.drafts), self.limits.max_positions)
        return -(-end // self.limits.page_size) - len(sequence.pages)

    def _reserve(self, sequence: Sequence, count: int, budget: StepBudget) -> bool:
        """Pages for `count` known tokens; preempts the least urgent. False if that was the sequence itself."""
        missing = self._pages_missing(sequence, count)
        if missing <= 0:
            return True
        while missing > self.pool.available:
            victim = self._least_urgent()
            self._preempt(victim, budget)
            if victim is sequence:
                return False
        sequence.pages.extend(self.pool.take(missing))
        return True

    def _preempt(self, sequence: Sequence, budget: StepBudget) -> None:
        budget.drop(sequence)
        del self.running[sequence]
        self._release(sequence)
        self._queue(sequence)
        self.preemptions += 1

    def _queue(self, sequence: Sequence) -> None:
        """Into the waiting line, before all that are less urgent or have waited less."""
        self.waiting.insert(bisect_right(self.waiting, _turn(sequence), key=_turn), sequence)

    def _least_urgent(self) -> Sequence:
        """Of those that run; of several the one that was admitted last."""
        return max(reversed(self.running), key=_priority)

    def _make_way(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Whether there is room for all of a waiting sequence; preempts less urgent ones where that makes the room."""
        missing, promised = self._pages_missing(sequence, sequence.uncomputed), self._promised(sequence)
        if missing > self._room(sequence):
            return False
        while self._full() or missing + promised > self.pool.available:
            self._preempt(self._least_urgent(), budget)
        return True

    def _room(self, sequence: Sequence) -> int:
        """Pages that a waiting sequence may have, those that come free where all less urgent ones give way included."""
        freed = self.pool.freed_by(other.pages for other in self._yielding(sequence))
        return self.pool.available + freed - self._promised(sequence)

    def _promised(self, sequence: Sequence) -> int:
        """Pages for the rest of those running prompts that do not give way to a waiting sequence. Where reading is not
        limited by time they have them by now: one that lacks rows for its rest leaves none."""
        if math.isinf(self.limits.prompt_seconds):
            return 0
        reading = [each for each in self.running if each.uncomputed > 1 and _priority(each) <= _priority(sequence)]
        return sum(max(0, self._pages_missing(each, each.uncomputed)) for each in reading)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may come in, whatever of it is cached."""
        if self._full() and not self._yielding(sequence):
            return False
        return self._pages_missing(sequence, sequence.uncomputed) <= self._room(sequence)

    def _may_admit(self) -> bool:
        """Whether somebody who waits may come in with the next step."""
        if not self.waiting:
            return False
        first, refused = self.waiting[0], self._refused
        if self._full() and not self._yielding(first):
            return False
        if first is not refused.sequence or self._room(first) > refused.room:
            return True
        return refused.missed is not None and self.pool.knows(refused.missed)

    def _full(self) -> bool:
        return len(self.running) >= self.limits.max_running

    def _yielding(self, sequence: Sequence) -> list[Sequence]:
        """Those that run and are less urgent."""
        return [other for other in self.running if _priority(other) > _priority(sequence)]

    def _reuse(self, sequence: Sequence) -> None:
        """Takes the pages of a prefix that was computed before; at least one token is left to compute."""
        if sequence.reads_prompt:
            sequence.cached = 0
            return
        size, tokens = self.limits.page_size, sequence.tokens
        if len(sequence.prefix_keys) != (len(tokens) - 1) // size:  # a request may wait here for many steps
            sequence.prefix_keys = list(page_keys(tokens[:-1], size, first_key(sequence.request.cache_salt)))
        sequence.pages = page_numbers(self.pool.take_known(sequence.prefix_keys))
        sequence.page_keys = sequence.prefix_keys[: len(sequence.pages)]
        sequence.computed = len(sequence.pages) * size
        if sequence.cached is None:
            sequence.cached = sequence.computed

    def _publish(self, sequence: Sequence) -> None:
        """Lets others find the pages that this step completed."""
        size, known = self.limits.page_size, len(sequence.page_keys)
        if sequence.computed // size == known:
            return
        before = sequence.page_keys[-1] if known else first_key(sequence.request.cache_salt)
        new = list(page_keys(sequence.tokens[known * size : sequence.computed], size, before))
        for place, (page, key) in enumerate(zip(sequence.pages[known:], new, strict=False), known):
            self.pool.publish(page, key, mark=mark_pages(place))
        sequence.page_keys += new

    def _release(self, sequence: Sequence) -> None:
        """Gives all pages back; what the sequence holds then are its tokens alone."""
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.page_keys, sequence.computed = page_numbers(), [], 0
        sequence.drafts, sequence.draft_scores = [], None

    def _commit_one(
        self, plan: SequencePlan, truths: Items[int], now: float, retry_without_drafts: bool
    ) -> StepOutput | None:
        sequence, shape, drafts = plan.sequence, plan.shape, plan.drafts
        if not plan.emits:
            sequence.computed += len(plan.known)
            self._publish(sequence)
            return None
        committed = count_committed(drafts, truths) if drafts else 1
        if retry_without_drafts and committed > 1 and truths[committed - 1] < 0:
            committed -= 1
        first = len(sequence.tokens) == sequence.prompt_length
        sequence.decode_steps += not first
        kept, finish = settle(sequence, list(truths[:committed]), self.limits.max_positions)
        sequence.computed += len(plan.known) + committed - 1
        sequence.tokens += kept
        if finish is None or finish.reason is not FinishReason.ERROR:
            self._publish(sequence)
        if sequence.drafts:
            sequence.drafts = drafts_left(sequence.drafts, shape.drafts, committed, truths[committed - 1])
        sequence.draft_scores = None
        if shape.drafts and sequence.acceptance_rates is not None:
            sequence.acceptance_rates.observe(shape.drafts, committed - 1)
        if finish is not None:
            del self.running[sequence]
            self._release(sequence)
        accepted, anchor = (committed - 1, kept[-1]) if len(kept) == committed else (len(kept), None)
        used = committed if committed in shape.proposals else None
        verify_rows, mask_rows = plan.verify_rows + plan.idle[0], shape.mask_rows + plan.idle[1]
        cached = (sequence.cached or 0) if first else 0
        trace = StepTrace(  # by place: by name it takes twice as long, and there is one a sequence and step
            sequence.decode_steps, now - sequence.arrived, drafts, accepted, anchor,
            shape.block, shape.proposals, used, verify_rows, mask_rows, cached,
        )  # fmt: skip
        read = tuple(sequence.prompt_logprobs) if first else ()
        return StepOutput(sequence.request.request_id, tuple(kept), trace, finish, (), read)


def _drafts_to_come(plan: SequencePlan) -> int:
    """The most drafts that a sequence may have in hand behind a step."""
    if plan.shape.proposals:
        return plan.shape.block - 1
    in_hand = len(plan.sequence.drafts)
    return max(0, in_hand - len(plan.drafts) - 1) if in_hand else 0


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority


def _turn(sequence: Sequence) -> tuple[int, float]:
    return sequence.request.priority, sequence.arrived - sequence.request.waited
