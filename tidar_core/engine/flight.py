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
from itertools import accumulate

import torch
from torch import Tensor

from tidar_core.engine.batch import Batch, build_batch, draft_rows, step_size
from tidar_core.engine.drafting import pick_drafts
from tidar_core.engine.runner import Runner
from tidar_core.engine.said_ahead import as_changed, changes_scores, with_what_was_said
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.engine.step_cost import StepCost, StepSize
from tidar_core.kernels.succession import Carried
from tidar_core.layout import Shape
from tidar_core.request import Sequence
from tidar_core.sampling import TokenRule
from tidar_core.transfer import on_device, sent


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched at `launched`, when the runner had `captured` so many sizes. rows: how many true tokens
    each plan gets. truths: int64, all of these, and state: what the step leaves to the next, on the device. told:
    int64, on its way to the host until `ready`: the true tokens of all plans, then the state."""

    plans: tuple[SequencePlan, ...]
    size: StepSize
    rows: tuple[int, ...]
    truths: Tensor
    state: Tensor
    told: Tensor
    ready: torch.cuda.Event | None
    launched: float
    captured: int

    def land(self) -> tuple[list[list[int]], list[list[int]]]:
        """Waits for it. The true tokens and the drafts in hand of each plan."""
        if self.ready is not None:
            self.ready.synchronize()
        values, ends = self.told.tolist(), list(accumulate(self.rows))
        truths = [values[end - count : end] for end, count in zip(ends, self.rows, strict=True)]
        width = self.state.shape[1]
        states = range(ends[-1], ends[-1] + width * len(self.plans), width)
        return truths, [values[start + 2 : start + width] for start in states]


def may_fly(sequence: Sequence) -> bool:
    """Whether a sequence's tokens need nothing that the host finds out between two steps."""
    params = sequence.request.params
    return (
        sequence.constraint is None
        and params.logprobs is None
        and not sequence.reads_prompt
        and params.draft_trust == 1.0
        and sequence.generated >= params.min_tokens
    )


def settled(plan: SequencePlan) -> SequencePlan:
    """The plan of a step in flight once the one before it is over: its rows as they turned out to be.

    With fewer drafts than there might have been, the first proposal is for the most that can come out.
    """
    sequence, shape = plan.sequence, plan.shape
    anchor = (sequence.tokens[-1],)
    if not shape.drafts and not shape.proposals:
        return SequencePlan(sequence, sequence.computed, anchor, (), shape, plan.emits)
    drafts = tuple(sequence.drafts[: shape.drafts])
    reach = len(drafts) + 1
    if shape.proposals:
        nearest, *others = shape.proposals
        proposals = (min(nearest, reach), *(outcome for outcome in others if outcome <= reach))
        shape = Shape(len(drafts), proposals, shape.block)
    else:
        shape = Shape(len(drafts))
    idle = plan.shape.drafts - shape.drafts, plan.shape.mask_rows - shape.mask_rows
    return SequencePlan(sequence, sequence.computed, anchor, drafts, shape, plan.emits, idle)


@torch.inference_mode()
def launch(
    runner: Runner,
    plans: Items[SequencePlan],
    cost: StepCost,
    behind: tuple[Flight, Items[int]] | None,
) -> Flight:
    """Launches a step of plans that all emit. behind: the step before, where that is not over, and which of its plans
    each of these goes on from."""
    launched, captured, device = time.monotonic(), runner.captured, runner.device
    batch = build_batch(plans, runner.cache.page_size, runner.padded, runner.form)
    state = _state(plans, runner.block_length, device) if behind is None else behind[0].state
    sources = range(len(plans)) if behind is None else behind[1]
    source = on_device([*sources, *[len(state) - 1] * (batch.size.sequences - len(plans))], device, torch.int32)
    carried = None if behind is None else Carried(state, source, sent(nearest_outcomes(plans, batch), device))
    hidden = runner.forward(batch, carried)

    size, ops = step_size(plans, batch), runner.ops
    verify = [row for rows in batch.emit_rows for row in rows]
    at_once = size.slots > 0 and cost.at_once(size.verify, size.picked, size.slots)
    scores = runner.scores(hidden, [*verify, *_slot_rows(plans, batch)] if at_once else verify)
    rules = [rule for plan in plans for rule in _rules(plan, len(plan.drafts) + 1)]
    verified = scores[: len(verify)]
    if any(changes_scores(plan.sequence.request.params) for plan in plans):
        own = state[source[: len(plans)].long()].long()
        verified = with_what_was_said(verified, plans, _under_way(behind, own), own[:, 2:])
    truths = ops.pick(verified, rules, _shift(rules, state, source, [*map(len, batch.emit_rows)]))

    drafting = [plan for plan in plans if plan.shape.proposals]
    counts = [plan.shape.block - 1 for plan in drafting]
    table = sent(plan_table(plans, batch, len(verify)), device)
    decided = ops.decide(truths, table, state, source[: len(plans)], sum(counts), len(drafting))
    if drafting:
        chosen = scores[decided.scores] if at_once else runner.scores(hidden, decided.rows)
        rules = [rule for plan, count in zip(drafting, counts, strict=True) for rule in _rules(plan, count)]
        slots = [plan.shape.block - 1 if plan.shape.proposals else 0 for plan in plans]
        shift = _shift(rules, state, source, slots, decided.state)
        picks = pick_drafts(runner, hidden[decided.rows], chosen, rules, decided.anchors, counts, shift=shift)
        ops.renew(decided, table, picks)
    told, ready = _fetched(torch.cat((truths, decided.state.flatten())))
    rows = tuple(len(rows) for rows in batch.emit_rows)
    return Flight(tuple(plans), size, rows, truths, decided.state, told, ready, launched, captured)


def _state(plans: Items[SequencePlan], block_length: int, device: torch.device) -> Tensor:
    """Where sequences stand whose last step is over."""
    width = max(0, block_length - 1)
    states = [[0, plan.known[-1], *plan.sequence.drafts, *[-1] * (width - len(plan.sequence.drafts))] for plan in plans]
    return on_device([*states, [0] * (2 + width)], device, torch.int32)


def _under_way(behind: tuple[Flight, Items[int]] | None, state: Tensor) -> Tensor:
    """The tokens that the step before commits, -1 behind the last: int64 [plans, most]. state: [plans, 2 + width]."""
    if behind is None:
        return state[:, :0]
    flight, sources = behind
    starts = list(accumulate(flight.rows, initial=0))
    place = torch.arange(max(flight.rows), device=state.device)
    at = on_device([starts[source] for source in sources], state.device)[:, None] + place
    tokens = flight.truths[at.clamp(max=len(flight.truths) - 1)]
    return tokens.masked_fill(place >= state[:, :1], -1)


def _rules(plan: SequencePlan, count: int) -> list[TokenRule]:
    """Of so many tokens behind the last known one, as if that stood where the plan counts from, and once scores are
    changed."""
    params = plan.sequence.request.params
    if changes_scores(params):
        params = as_changed(params)
    if params.temperature == 0:
        return [TokenRule(params, 0)] * count  # the best is the best wherever it stands
    return [TokenRule(params, plan.position + 1 + place) for place in range(count)]


def _shift(
    rules: Items[TokenRule], state: Tensor, source: Tensor, counts: list[int], after: Tensor | None = None
) -> Tensor | None:
    """What the positions of rules lack, `counts[i]` of them for plan i: what the step before committed, and behind this
    one, which left `after`, what it did too. int64, or None where no rule looks at its position."""
    if all(rule.params.temperature == 0 for rule in rules):
        return None
    committed = state[source[: len(counts)].long(), 0].long()
    if after is not None:
        committed = committed + after[:-1, 0]
    owner = [place for place, count in enumerate(counts) for _ in range(count)]
    return committed[on_device(owner, state.device)]


def nearest_outcomes(plans: Items[SequencePlan], batch: Batch) -> Tensor:
    """`Carried.nearest`."""
    nearest = torch.zeros(batch.size.mask, dtype=torch.int32)
    for plan, first in zip(plans, batch.first_mask_rows, strict=True):
        if plan.shape.proposals:
            start = first - batch.size.verify
            nearest[start : start + plan.shape.block] = plan.shape.proposals[0]
    return nearest


def _slot_rows(plans: Items[SequencePlan], batch: Batch) -> list[int]:
    """The rows of slots 1 … b-1 of all proposals."""
    return [
        row
        for plan, first in zip(plans, batch.first_mask_rows, strict=True)
        for place in range(len(plan.shape.proposals))
        for row in draft_rows(plan.shape, first, place)
    ]


def plan_table(plans: Items[SequencePlan], batch: Batch, scored: int) -> Tensor:
    """The plans as `tidar_core.kernels.succession` reads them. scored: how many scores come before those of slots."""
    most = max(len(plan.shape.proposals) for plan in plans)
    table, truths, slots, drafting = [], 0, 0, 0
    for plan, first in zip(plans, batch.first_mask_rows, strict=True):
        outcomes, block = plan.shape.proposals, plan.shape.block if plan.shape.proposals else 0
        laid = (truths, len(plan.drafts), slots, block, first + 1, scored, drafting)
        table.append((*laid, *outcomes, *[0] * (most - len(outcomes))))
        truths += len(plan.drafts) + 1
        if block:
            slots, scored, drafting = slots + block - 1, scored + len(outcomes) * (block - 1), drafting + 1
    return torch.tensor(table, dtype=torch.int32)


def _fetched(told: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The same in the host's memory once the event has come; at once where that is where it is."""
    if told.device.type != "cuda":
        return told, None
    there = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
    there.copy_(told, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return there, ready
