"""The drafts of a proposal that came true: one token a slot, given the token before it where there is a slot head."""

from bisect import bisect_left
from collections.abc import Sequence as Items
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.kernels.rules import RuleNumbers, rule_numbers
from tidar_core.model.slot_head import CANDIDATES, drafts_of, next_state, rescored
from tidar_core.model.weights import SlotHead
from tidar_core.sampling.token_rule import TokenRule, any_adjusts, of_all
from tidar_core.transfer import on_device

GRAPHED = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # proposals of one graph; launching counts for little where there are more


@torch.inference_mode()
def pick_drafts(runner: Runner, slots: GuessedSlots, *, alone: bool = False) -> Tensor:
    """The drafts of slots, int64 [slots], by the slot head where there is one. alone: each slot by its own scores,
    without the slot head."""
    head = None if runner.adapter is None else runner.adapter.slot_head
    if head is None or runner.vocabulary is None or alone:
        return runner.ops.pick(slots.logits, slots.rules, slots.shift)
    if runner.ops.draft_slots is not None:
        picks = runner.ops.draft_slots(head, runner.weights.embedding, runner.vocabulary, slots)
        if picks is not None:
            return picks
    way = _slot_by_slot if of_all(slots.rules, any_adjusts) else _side_by_side
    return way(runner, head, runner.vocabulary, slots)


def _side_by_side(runner: Runner, head: SlotHead, vocabulary: Tensor, slots: GuessedSlots) -> Tensor:
    """Drafts all proposals as if they had one length, so that sizes alone decide what is launched; as one CUDA graph
    where there are graphs."""
    counts, words, device = slots.counts, runner.weights.embedding, runner.device
    longest = max(counts)
    graphs = None if len(counts) > GRAPHED[-1] else runner.graphs
    size = len(counts) if graphs is None else GRAPHED[bisect_left(GRAPHED, len(counts))]
    index = _filled_up(tuple(counts), size, device)
    vocab = slots.logits.shape[1]
    best = slots.logits.topk(min(CANDIDATES, vocab))
    shaped = [each[index].view(longest, size, -1) for each in (slots.hidden, best.values, best.indices)]
    numbers = of_all(slots.rules, _numbers_by_slot, vocab, tuple(counts), size, device)
    if slots.shift is not None:
        numbers = numbers.moved(slots.shift[index].view(longest, size))
    first = torch.cat((slots.anchors, slots.anchors[:1].expand(size - len(counts))))

    def drafts(
        hidden: Tensor, scores: Tensor, candidates: Tensor, first: Tensor, reals: Tensor, whole: Tensor
    ) -> Tensor:
        def pick(slot: int, anew: Tensor, some: Tensor) -> Tensor:
            return runner.ops.pick_listed(anew, some, RuleNumbers(reals[slot], whole[slot]))

        return drafts_of(head, words, vocabulary, hidden, scores, candidates, first, pick)

    given = (*shaped, first, numbers.reals, numbers.whole)
    drafted = drafts(*given) if graphs is None else graphs.run(("slots", size, longest), device, drafts, *given)
    if min(counts) == longest:
        side_by_side = drafted[: len(counts)].flatten()
        return side_by_side if graphs is None else side_by_side.clone()  # a graph's result does not last
    return torch.cat([proposal[:count] for proposal, count in zip(drafted, counts, strict=False)])


@lru_cache(maxsize=8)
def _filled_up(counts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """The slots of `size` proposals of the greatest length, slot by slot, int64, out of those of these counts. Filled
    up with slots that are drafted anyway: behind a shorter proposal its last, behind all proposals the first."""
    starts = [*accumulate(counts[:-1], initial=0), *[0] * (size - len(counts))]
    lengths = [*counts, *[counts[0]] * (size - len(counts))]
    rows = [
        start + min(slot, length - 1)
        for slot in range(max(counts))
        for start, length in zip(starts, lengths, strict=True)
    ]
    return on_device(rows, device)


def _numbers_by_slot(
    rules: Items[TokenRule], vocab: int, counts: tuple[int, ...], size: int, device: torch.device
) -> RuleNumbers:
    """Those of the slots that `_filled_up` names: reals [slots, 3, proposals], whole [slots, 5, proposals]."""
    numbers, index = rule_numbers(rules, vocab, device), _filled_up(counts, size, device)
    by_slot = (each[:, index].view(len(each), -1, size).transpose(0, 1) for each in (numbers.reals, numbers.whole))
    return RuleNumbers(*(each.contiguous() for each in by_slot))


def _slot_by_slot(runner: Runner, head: SlotHead, vocabulary: Tensor, slots: GuessedSlots) -> Tensor:
    logits, rules, counts, shift = slots.logits, slots.rules, slots.counts, slots.shift
    device = logits.device
    starts = list(accumulate(counts, initial=0))
    scores, candidates = logits.topk(min(CANDIDATES, logits.shape[1]))
    picks = torch.empty(len(rules), dtype=torch.int64, device=device)
    before = slots.anchors
    state: Tensor | None = None
    going = list(range(len(counts)))
    for slot in range(max(counts)):
        left = [place for place, proposal in enumerate(going) if counts[proposal] > slot]
        if len(left) < len(going):
            going = [going[place] for place in left]
            kept = on_device(left, device)
            before, state = before[kept], None if state is None else state[kept]
        at = [starts[proposal] + slot for proposal in going]
        rows = on_device(at, device)
        state = next_state(head, slots.hidden[rows], runner.weights.embedding[before], state)
        chosen = candidates[rows]
        anew = rescored(scores[rows], chosen, F.linear(state, head.out), vocabulary).to(logits.dtype)
        logits[rows[:, None], chosen] = anew
        alone = torch.full_like(logits[: len(at)], -torch.inf).scatter_(-1, chosen, anew)
        picks[rows] = runner.ops.pick(alone, [rules[row] for row in at], None if shift is None else shift[rows])
        before = picks[rows].clamp(min=0)  # a row without a finite score drafts nothing that could hold
    return picks


@torch.inference_mode()
def with_draft_scores(plans: Items[SequencePlan], logits: Tensor) -> Tensor:
    """The verify rows' scores with those of the drafter mixed in where a draft stands and its request trusts it (paper,
    section 3: beta AR + (1 - beta) diffusion). logits: [rows, vocab], left as they are."""
    mixed, row = logits, 0
    for plan in plans:
        draft_scores, trust = plan.sequence.draft_scores, plan.sequence.request.params.draft_trust
        if plan.emits and draft_scores is not None and plan.drafts:
            if mixed is logits:
                mixed = logits.clone()
            own = mixed[row : row + len(plan.drafts)]
            never = own == -torch.inf  # times a trust of 0 that would be no number
            own.mul_(trust).add_(draft_scores[: len(plan.drafts)], alpha=1.0 - trust)
            own.masked_fill_(never, -torch.inf)
        row += len(plan.drafts) + 1 if plan.emits else 0
    return mixed
