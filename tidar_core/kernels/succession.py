"""What a step leaves to the next one, in plain torch: for steps that are launched before the host knows the last.

The state of a batch is int32 [plans + 1, DRAFTS + width], a row a sequence, with the columns of `columns.py`: how many
tokens its last step committed, its anchor, and the drafts in hand, -1 behind the last; width is block length - 1. The
last row is all zero: padding follows it. `carry` moves the rows of a batch on to where a state says, `decide` derives
the next state from the step's true tokens, `renew` puts new drafts into it. The arithmetic is that of
`tidar_core.layout`: `count_committed`, `drafts_left`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.kernels.columns import ANCHOR, BLOCK, COMMITTED, DRAFTS, FIRST_SLOT, OUTCOMES

if TYPE_CHECKING:
    from tidar_core.kernels.ops import StepRows


@dataclass(frozen=True, slots=True)
class Decided:
    """What a step decided. state: as above. came: int32 [plans], which of a plan's proposals came true, -1 for none.
    rows, scores: int64 [slots], for slots 1 … b-1 of that proposal (of the first one where none came true) their rows
    of the step and their rows of the scores. anchors: int64 [drafting], the new anchors of the plans that draft, none
    below 0."""

    state: Tensor
    came: Tensor
    rows: Tensor
    scores: Tensor
    anchors: Tensor


@dataclass(frozen=True, slots=True)
class Carried:
    """What completes the numbers of a batch that count from the step before. state: what that step left. source: int32
    [sequences], the row of `state` for each row of the page table. nearest: int32 [mask], the outcome that a plan's
    first proposal was laid for, on its mask rows; 0 on all others."""

    state: Tensor
    source: Tensor
    nearest: Tensor


def carry(rows: "StepRows", tokens: Tensor, repeats: Tensor, carried: Carried, page_size: int) -> None:
    """Moves the rows of a batch on, in place. tokens: int32 [verify], places in the state (0 the anchor, i draft i)
    that are replaced by the tokens there. A first proposal for an outcome beyond the drafts in hand becomes one for the
    furthest outcome that can come. repeats: int32 [mask], the verify rows that mask rows repeat, -1 for none."""
    verify, owner = len(tokens), rows.sequence.long()
    states = carried.state[carried.source[owner].long()]
    ahead = states[:, COMMITTED].clone()
    in_hand = (states[verify:, DRAFTS:] >= 0).sum(1)
    fewer = (in_hand + 1 - carried.nearest).clamp(max=0)
    ahead[verify:] += fewer
    repeats.copy_(torch.where(repeats >= 0, repeats + fewer, repeats))
    rows.positions.add_(ahead)
    rows.context_end.add_(ahead)
    tokens.copy_(states[:verify].gather(1, tokens[:, None].long() + ANCHOR).squeeze(1).clamp(min=0))
    at = rows.positions[:verify].long()
    rows.write_slots.copy_(rows.page_table[owner[:verify], at // page_size] * page_size + at % page_size)


def decide(truths: Tensor, table: Tensor, state: Tensor, source: Tensor, slots: int, drafting: int) -> Decided:
    """The next state, and which proposals came true. truths: int64, the true tokens of the verify rows of all plans.
    table: the plans, with the columns of `columns.py`. state: what the step before left; source: int32 [plans], each
    plan's row of it. slots, drafting: how many slots there are, and how many plans that draft."""
    width = state.shape[1] - DRAFTS
    hand, place = state[source.long(), DRAFTS:].long(), torch.arange(width + 1, device=state.device)
    first, most, slot_start, block, row, score, number = table[:, :OUTCOMES].long().unbind(1)
    in_hand = (hand >= 0).sum(1)
    verified = torch.minimum(most, in_hand)
    truth = truths[(first[:, None] + place).clamp(max=len(truths) - 1)]
    holds = (truth[:, :-1] == hand) & (place[:-1] < verified[:, None])
    committed = 1 + holds.long().cumprod(1).sum(1)
    anchor = truth.gather(1, committed[:, None] - 1)
    following = F.pad(hand, (0, len(place)), value=-1).gather(1, verified[:, None] + place)
    stays = (committed[:, None] == verified[:, None] + 1) & (following[:, :1] >= 0) & (following[:, :1] == anchor)
    left = following[:, 1:].masked_fill(~stays, -1)
    after = F.pad(torch.cat((committed[:, None], anchor, left), 1), (0, 0, 0, 1)).int()

    nearest, others = table[:, OUTCOMES : OUTCOMES + 1], table[:, OUTCOMES + 1 :]
    outcomes = torch.cat((torch.minimum(nearest, in_hand[:, None] + 1), others), 1)
    true = (outcomes == committed[:, None]) & (block[:, None] > 0)
    came = torch.where(true.any(1), true.long().argmax(1), -1) if true.shape[1] else torch.full_like(committed, -1)
    plan = torch.repeat_interleave((block - 1).clamp(min=0), output_size=slots)
    slot, proposal = torch.arange(slots, device=plan.device) - slot_start[plan], came.clamp(min=0)[plan]
    rows = row[plan] + proposal * block[plan] + slot
    scores = score[plan] + proposal * (block[plan] - 1) + slot
    anchors = anchor.new_zeros(drafting + 1)
    anchors[torch.where(block > 0, number, drafting)] = anchor[:, 0].clamp(min=0)
    return Decided(after, came.int(), rows, scores, anchors[:drafting])


def renew(decided: Decided, table: Tensor, picks: Tensor) -> None:
    """Puts new drafts into the state of plans whose proposal came true, up to the first that could not be picked.
    picks: int64 [slots]."""
    slot_start, block = table[:, FIRST_SLOT].long(), table[:, BLOCK].long()
    place = torch.arange(decided.state.shape[1] - DRAFTS, device=picks.device)
    new = picks[(slot_start[:, None] + place).clamp(max=len(picks) - 1)]
    new = new.masked_fill(place >= block[:, None] - 1, -1)
    new = new.masked_fill((new >= 0).long().cumprod(1) == 0, -1)
    hand = decided.state[:-1, DRAFTS:]
    hand.copy_(torch.where(decided.came[:, None] >= 0, new.int(), hand))
