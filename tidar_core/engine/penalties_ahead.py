"""Bias and penalties for a step that is launched before the host knows the tokens of the one before it.

The host counts the tokens up to the last step that it has looked at (`tidar_core.sampling.penalties.Ledger`). Only the
device knows what the step under way commits and the drafts in hand behind it: these are counted there, and every row is
changed as `penalised` would change it, bit for bit.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from tidar_core.engine.scheduler import SequencePlan
from tidar_core.request import SamplingParams
from tidar_core.sampling.penalties import NO_HISTORY, refused
from tidar_core.transfer import on_device, sent

ROWS_AT_ONCE = 64  # of the vocabulary's width: a row has several such beside it while it is changed


@lru_cache(maxsize=256)
def as_changed(params: SamplingParams) -> SamplingParams:
    """The parameters without bias, penalties and allowed tokens: for scores that these have changed already."""
    return replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        allowed_token_ids=(),
    )


def penalised_ahead(scores: Tensor, plans: Items[SequencePlan], under_way: Tensor, in_hand: Tensor) -> Tensor:
    """The scores of the verify rows of all plans, some of which change theirs, with bias and penalties: fp32
    [rows, vocab], a copy.

    under_way: int64 [plans, n], the tokens that the step before each plan commits, as far as it is not over, -1 behind
    the last. in_hand: int64 [plans, most], the drafts that follow them, -1 behind the last.
    """
    chosen = [place for place, plan in enumerate(plans) if plan.sequence.request.params.changes_scores]
    device, vocab = scores.device, scores.shape[1]
    starts = list(accumulate((len(plan.drafts) + 1 for plan in plans), initial=0))
    own = [
        (starts[place] + drafts, drafts, whose)
        for whose, place in enumerate(chosen)
        for drafts in range(len(plans[place].drafts) + 1)
    ]
    rows, ahead, owner = on_device(list(zip(*own, strict=True)), device)
    which = on_device(chosen, device)
    none = vocab  # a token that stands for none has a column of its own

    seen, times = _counted([plans[place] for place in chosen], vocab, device)
    committed = under_way[which]
    times.scatter_add_(1, _or_none(committed, none), torch.ones_like(committed, dtype=torch.float32))
    drafts = in_hand[which][owner]
    drafts = drafts.masked_fill(torch.arange(drafts.shape[1], device=device) >= ahead[:, None], -1)

    params = [plans[place].sequence.request.params for place in chosen]
    penalties = [[one.repetition_penalty, one.frequency_penalty, one.presence_penalty] for one in params]
    factors, biases = on_device(penalties, device, torch.float32), _biases(params, vocab, device)
    never = _refused(params, vocab, device)
    changed = scores.float() if scores.dtype is not torch.float32 else scores.clone()
    for start in range(0, len(own), ROWS_AT_ONCE):
        run = slice(start, start + ROWS_AT_ONCE)
        whose, drafted = owner[run], _or_none(drafts[run], none)
        often = times[whose].scatter_add_(1, drafted, torch.ones_like(drafted, dtype=torch.float32))
        before, often = (seen[whose] | (often > 0))[:, :vocab], often[:, :vocab]
        factor, frequency, presence = factors[whose].T.unsqueeze(-1)
        x = changed[rows[run]]
        if never is not None:
            x = x.masked_fill(never[whose], -torch.inf)
        x = x + biases[whose]
        x = torch.where(before, torch.where(x > 0, x / factor, x * factor), x)
        changed[rows[run]] = x - (frequency * often + presence * (often > 0))
    return changed


def _or_none(tokens: Tensor, none: int) -> Tensor:
    return tokens.masked_fill(tokens < 0, none)


def _counted(plans: Items[SequencePlan], vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the host has counted: which tokens occur in prompt or answer, bool, and how often each occurs in the answer,
    fp32; both [plans, vocab + 1]."""
    histories = []
    for plan in plans:
        ledger = plan.sequence.ledger
        if ledger is not None:
            ledger.follow(plan.sequence.tokens)
        histories.append(NO_HISTORY if ledger is None else ledger.history())
    most = max(len(history.tokens) for history in histories)
    tokens, counts = torch.full((len(plans), most), vocab), torch.zeros(len(plans), most)
    for row, history in enumerate(histories):
        tokens[row, : len(history.tokens)], counts[row, : len(history.tokens)] = history.tokens, history.times
    place = sent(tokens, device)
    times = torch.zeros(len(plans), vocab + 1, device=device).scatter_add_(1, place, sent(counts, device))
    return torch.zeros_like(times, dtype=torch.bool).scatter_(1, place, True), times


def _refused(params: Items[SamplingParams], vocab: int, device: torch.device) -> Tensor | None:
    """Which tokens are not allowed, bool [plans, vocab]; None where all are."""
    if not any(one.allowed_token_ids for one in params):
        return None
    all_are = torch.zeros(vocab, dtype=torch.bool, device=device)
    masks = [refused(one.allowed_token_ids, vocab, device) if one.allowed_token_ids else all_are for one in params]
    return torch.stack(masks)


def _biases(params: Items[SamplingParams], vocab: int, device: torch.device) -> Tensor:
    """[plans, vocab]."""
    biases = torch.zeros(len(params), vocab, device=device)
    pairs = [(row, token, bias) for row, one in enumerate(params) for token, bias in one.logit_bias]
    if pairs:
        rows, tokens, values = zip(*pairs, strict=True)
        where = on_device([rows, tokens], device)
        biases.index_put_((where[0], where[1]), on_device(values, device, torch.float32))
    return biases
