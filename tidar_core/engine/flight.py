"""Steps that follow each other on a device: the next one is planned and launched while one runs.

A plan names rows; what they hold may be known to the device alone. A step that flies is decided there: its true tokens
are compared with its drafts, and the proposal that came true is looked up, by a few operations on small tensors
(`tidar_core.kernels.succession`). The step behind it begins from what they say, so that the host plans it, launches it,
and only then waits for the first one's answers. It fits its plan to them afterwards (`settled`): what it commits is
what it would have committed one step at a time.

The plan of a step that is not looked at yet is one for the most that may happen: positions and pages as if all drafts
held, rows for as many drafts as there may be. Drafts that did not come are -1 and never hold.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.batch import Batch, step_size
from tidar_core.engine.drafting import pick_drafts
from tidar_core.engine.penalties_ahead import as_changed, penalised_ahead
from tidar_core.engine.row_layout import RowLayout, numbered
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.engine.step_cost import IntArray, StepCost, StepSize
from tidar_core.kernels.columns import COMMITTED, DRAFTS, FIRST_ROW, FIRST_SCORE
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.kernels.succession import Carried
from tidar_core.layout import Shape
from tidar_core.request import SamplingParams, Sequence
from tidar_core.sampling.penalties import keep_allowed
from tidar_core.sampling.token_rule import Rules, TokenRule
from tidar_core.transfer import on_device, sent

THE_BEST = TokenRule(SamplingParams(max_tokens=1, temperature=0.0), 0)
"""Of a score that nothing changes any more: the same wherever it stands, and whoever asks."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How the tokens of a step are picked from scores that bias and penalties have changed already. It stays the same
    from step to step while the same sequences lay the same rows. changing: whether any sequence changes scores. greedy:
    whether all take the best token, which no position changes. verify, slots: the rules of the verify rows and of the
    slots of one proposal of each plan, as if all tokens stood at position 0."""

    layout: RowLayout
    params: tuple[SamplingParams, ...]
    changing: bool
    greedy: bool
    verify: Rules
    slots: Rules


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and is not over. launched: when, on the monotonic clock; untypical: `Runner.untypical`
    at that time. rows: how many true tokens each plan gets. On the device: truths, int64, the true tokens of all plans,
    and state, what the step leaves to the next (`kernels.succession`). fetched: int64, truths and then state, on its
    way to the host until `ready`."""

    plans: tuple[SequencePlan, ...]
    asked: Asked
    size: StepSize
    rows: tuple[int, ...]
    truths: Tensor
    state: Tensor
    fetched: Tensor
    ready: torch.cuda.Event | None
    launched: float
    untypical: int

    def land(self) -> tuple[list[list[int]], list[list[int]]]:
        """Waits for the step. Returns the true tokens of each plan, and its drafts in hand (-1 where there is none)."""
        if self.ready is not None:
            self.ready.synchronize()
        values, ends = self.fetched.tolist(), list(accumulate(self.rows))
        truths = [values[end - count : end] for end, count in zip(ends, self.rows, strict=True)]
        width = self.state.shape[1]
        states = range(ends[-1], ends[-1] + width * len(self.plans), width)
        return truths, [values[start + DRAFTS : start + width] for start in states]


def may_fly(sequence: Sequence, block_length: int) -> bool:
    """Whether a sequence's tokens can be decided on the device: nothing that the host finds out between two steps is
    needed for them."""
    params = sequence.request.params
    return (
        is_free(sequence, block_length)
        and params.logprobs is None
        and not sequence.reads_prompt
        and params.draft_trust == 1.0
        and not params.bad_words
        and sequence.generated >= params.min_tokens
    )


def is_free(sequence: Sequence, block_length: int) -> bool:
    """Whether the sequence's constraint, if it has one, allows any token in the step that is launched now and in the
    next one."""
    return sequence.constraint is None or sequence.constraint.free >= 2 * max(1, block_length)


def settled(plan: SequencePlan) -> SequencePlan:
    """The plan of a step in flight once the one before it is over: its rows as they turned out to be.

    With fewer drafts than there might have been, the first proposal is for the most that can come out.
    """
    sequence, shape = plan.sequence, plan.shape
    anchor = (sequence.tokens[-1],)
    if not shape.drafts and not shape.proposals:
        return SequencePlan(sequence, sequence.computed, anchor, (), shape, plan.emits)
    drafts = tuple(sequence.drafts[: shape.drafts])
    came, idle = _with_drafts(shape, len(drafts))
    return SequencePlan(sequence, sequence.computed, anchor, drafts, came, plan.emits, idle)


@lru_cache(maxsize=1024)
def _with_drafts(shape: Shape, drafts: int) -> tuple[Shape, tuple[int, int]]:
    """The shape as it turned out where only `drafts` drafts came, and how many verify and mask rows ran in vain."""
    reach = drafts + 1
    if shape.proposals:
        nearest, *others = shape.proposals
        proposals = (min(nearest, reach), *(outcome for outcome in others if outcome <= reach))
        came = Shape(drafts, proposals, shape.block)
    else:
        came = Shape(drafts)
    return came, (shape.drafts - drafts, shape.mask_rows - came.mask_rows)


@torch.inference_mode()
def launch(
    runner: Runner,
    plans: Items[SequencePlan],
    cost: StepCost,
    behind: tuple[Flight, Items[int]] | None,
) -> Flight:
    """Launches a step of plans that all emit. behind: the step before where it is not over, and for each plan the index
    of the plan there that it follows."""
    launched, untypical, device = time.monotonic(), runner.untypical, runner.device
    batch = runner.batch(plans)
    state = _state(plans, runner.block_length, device) if behind is None else behind[0].state
    sources = range(len(plans)) if behind is None else behind[1]
    from_rows = np.full(batch.size.sequences, len(state) - 1, dtype=np.int32)
    from_rows[: len(plans)] = sources
    source = sent(torch.from_numpy(from_rows), device)
    carried = None if behind is None else Carried(state, source, sent(nearest_outcomes(batch), device))
    hidden = runner.forward(batch, carried)

    size, ops, layout = step_size(plans, batch), runner.ops, batch.layout
    answers, guesses = layout.answers, layout.guesses
    at_once = cost.at_once(size)
    scores = runner.scores(hidden, _scored_rows(batch, at_once, device))
    asked = _asked(plans, layout, None if behind is None else behind[0].asked)
    verified = scores[: len(layout.answer_rows)]
    if asked.changing:
        own = state[source[: len(plans)].long()].long()
        verified = penalised_ahead(verified, plans, _under_way(behind, own), own[:, DRAFTS:])
    truths = ops.pick(verified, asked.verify, None if asked.greedy else _positions(plans, answers, state, source))

    lengths = guesses[guesses > 0].tolist()
    table, drafting = sent(plan_table(batch, len(layout.answer_rows)), device), len(lengths)
    decided = ops.decide(truths, table, state, source[: len(plans)], int(size.picked), drafting)
    if drafting:
        chosen = scores[decided.scores] if at_once else runner.scores(hidden, decided.rows)
        keep_allowed(chosen, asked.params, guesses.tolist())
        shift = None if asked.greedy else _positions(plans, guesses, state, source, decided.state)
        slots = GuessedSlots(hidden[decided.rows], chosen, asked.slots, decided.anchors, lengths, shift)
        ops.renew(decided, table, pick_drafts(runner, slots))
    fetched, ready = _fetched(torch.cat((truths, decided.state.flatten())))
    return Flight(
        tuple(plans), asked, size, tuple(answers.tolist()), truths, decided.state, fetched, ready, launched, untypical
    )


def _state(plans: Items[SequencePlan], block_length: int, device: torch.device) -> Tensor:
    """The state of sequences whose last step is over (`kernels.succession`)."""
    width = max(0, block_length - 1)
    states = [[0, plan.known[-1], *plan.sequence.drafts, *[-1] * (width - len(plan.sequence.drafts))] for plan in plans]
    return on_device([*states, [0] * (DRAFTS + width)], device, torch.int32)


def _under_way(behind: tuple[Flight, Items[int]] | None, state: Tensor) -> Tensor:
    """The tokens that the step before commits, -1 behind the last: int64 [plans, most]. state: [plans, DRAFTS +
    width]."""
    if behind is None:
        return state[:, :0]
    flight, sources = behind
    starts = list(accumulate(flight.rows, initial=0))
    place = torch.arange(max(flight.rows), device=state.device)
    at = on_device([starts[source] for source in sources], state.device)[:, None] + place
    tokens = flight.truths[at.clamp(max=len(flight.truths) - 1)]
    return tokens.masked_fill(place >= state[:, COMMITTED, None], -1)


def _asked(plans: Items[SequencePlan], layout: RowLayout, before: Asked | None) -> Asked:
    """before: those of the last step, which are given back where they still hold."""
    params = tuple([plan.sequence.request.params for plan in plans])
    if before is not None and before.layout is layout and before.params == params:
        return before
    rules = [_rule(one) for one in params]
    verify, slots = (
        Rules(rule for rule, count in zip(rules, counts.tolist(), strict=True) for _ in range(count))
        for counts in (layout.answers, layout.guesses)
    )
    changing = any(one.changes_scores for one in params)
    return Asked(layout, params, changing, all(one.temperature == 0 for one in params), verify, slots)


def _rule(params: SamplingParams) -> TokenRule:
    if params.temperature == 0:
        return THE_BEST
    return TokenRule(as_changed(params) if params.changes_scores else params, 0)


def _positions(
    plans: Items[SequencePlan], counts: IntArray, state: Tensor, source: Tensor, after: Tensor | None = None
) -> Tensor:
    """The positions of `counts[i]` tokens of plan i, int64 [sum of counts]. They follow the plan's last known token and
    what the step before committed; with `after`, the state that this step leaves, also what this step commits."""
    committed = state[source[: len(counts)].long(), COMMITTED].long()
    if after is not None:
        committed = committed + after[:-1, COMMITTED]
    owner, place = numbered(counts)
    first = np.array([plan.position + 1 for plan in plans])
    owners, positions = sent(torch.from_numpy(np.stack((owner, first[owner] + place))), state.device)
    return committed[owners] + positions


def _scored_rows(batch: Batch, at_once: bool, device: torch.device) -> range | Tensor:
    """The verify rows whose answers are wanted, and with `at_once` those of all slots behind them."""
    layout = batch.layout
    if not at_once and not layout.size.unscored:
        return range(len(layout.answer_rows))
    guess_rows = batch.size.verify + layout.guess_rows if at_once else layout.guess_rows[:0]
    rows = np.concatenate((layout.answer_rows, guess_rows))
    return sent(torch.from_numpy(rows), device)


def nearest_outcomes(batch: Batch) -> Tensor:
    """`Carried.nearest`."""
    nearest = np.zeros(batch.size.mask, dtype=np.int32)
    nearest[: len(batch.layout.nearest)] = batch.layout.nearest
    return torch.from_numpy(nearest)


def plan_table(batch: Batch, scored: int) -> Tensor:
    """The plans as `tidar_core.kernels.succession` reads them. scored: how many scores come before those of slots."""
    table = batch.layout.table.copy()
    table[:, FIRST_ROW] += batch.size.verify
    table[:, FIRST_SCORE] += scored
    return torch.from_numpy(table)


def _fetched(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy in the host's memory, complete once the event has come; the tensor itself where it is there already."""
    if values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return there, ready
