"""Picks tokens by their rules, in plain torch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tidar_core.request import SamplingParams
from tidar_core.sampling.penalties import penalised
from tidar_core.sampling.philox import NoiseKey, gumbel_all, gumbel_at
from tidar_core.sampling.token_rule import NO_TOKEN, Kind, TokenRule, any_adjusts, heat, kind_of, of_all, top_p_cut
from tidar_core.transfer import on_device, sent

_MASS_BITS = 44  # a token's mass is exp(z - max z) in units of 2**-44
MAX_VOCAB = (1 << 19) - 1  # keeps a row's mass below 2**63
_WIDTHS = (64, 1024)  # candidates looked at first and second; then all
_TIES = 8  # room for ties behind the k-th candidate (bf16 logits tie often)


def pick_tokens(logits: Tensor, rules: Sequence[TokenRule], shift: Tensor | None = None) -> Tensor:
    """Pick the token of each row.

    logits: [rows, vocab], bf16, fp16 or fp32 (computed in fp32), left as they are; -inf excludes a token.
    rules: one a row. shift: int64 [rows], what the rules' positions lack, where only the device knows that yet.
    Returns int64 [rows], on the device of the logits.

    A row that has NaN or +inf in it, or nothing finite, gets `NO_TOKEN` (-1) and disturbs no other.
    """
    logits = adjusted(logits, rules)
    picks = torch.full((len(rules),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    for way, rows in _ways(rules, logits.shape[-1]).items():
        index = on_device(rows, logits.device)
        own = [rules[row] for row in rows]
        if way.kind is Kind.GREEDY:
            picks[index] = _pick_greedy(logits, index)
        elif way.kind is Kind.WHOLE:
            picks[index] = _pick_whole(_scaled(logits, own, index), _noise_key(own, index, shift))
        else:
            key = _noise_key(own, index, shift)
            for found in _candidates(_scaled(logits, own, index), own, way):
                picks[index[found.rows]] = _pick_among(found, key.rows(found.rows), logits.shape[-1])
    return picks


class _Way(NamedTuple):
    """How rows that are computed together are picked. widths: how many candidates are tried, one number after the
    other."""

    kind: Kind
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Limits:
    """What bounds S, for each row: [rows, 1] each. `cut` is fp32(1 - top_p), negative where top-p is off."""

    top_k: Tensor | None
    cut: Tensor
    min_p: Tensor
    mass: Tensor | None  # of the whole row, int64, where top-p reads the whole row

    def rows(self, index: Tensor) -> "_Limits":
        top_k = None if self.top_k is None else self.top_k[index]
        mass = None if self.mass is None else self.mass[index]
        return _Limits(top_k, self.cut[index], self.min_p[index], mass)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The best tokens of some rows, with all of S among them.

    rows: int64 [n], which of the group's rows. ids, scores, kept: [n, width], by descending score and then
    ascending id; kept: inside S.
    """

    rows: Tensor
    ids: Tensor
    scores: Tensor
    kept: Tensor


def adjusted(logits: Tensor, rules: Sequence[TokenRule]) -> Tensor:
    """The logits [rows, vocab], with grammar, bias, penalties and banned ids on the rows that ask for them: a copy in
    fp32 if there are any. Raises ValueError where there is not one rule a row, or the vocabulary is too large."""
    if logits.dim() != 2 or logits.shape[0] != len(rules):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(rules)} rules")
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {logits.shape[1]} tokens is not between 1 and {MAX_VOCAB}")
    if not of_all(rules, any_adjusts):
        return logits
    rows = [row for row, rule in enumerate(rules) if rule.adjusts]
    scores = logits.float() if logits.dtype is not torch.float32 else logits.clone()
    _keep_allowed(scores, rules)
    for row in rows:
        penalised(scores[row], rules[row].params, rules[row].history)
    _ban(scores, rules)
    return scores


def _keep_allowed(scores: Tensor, rules: Sequence[TokenRule]) -> None:
    """Excludes what a row's rule does not allow, in place."""
    masks = {row: rule.allowed for row, rule in enumerate(rules) if rule.allowed is not None}
    if masks:
        packed = np.stack(list(masks.values()))
        index = torch.tensor(list(masks), device=scores.device)
        if scores.device.type == "cpu":
            refused = torch.from_numpy(np.unpackbits(packed, 1, scores.shape[1], "little") == 0)
        else:  # unpacked they would be eight times as much to send: 78 MB for 512 rows of 152,000 tokens
            refused = unpacked(sent(torch.from_numpy(packed), scores.device), scores.shape[1]) == 0
        scores[index] = scores[index].masked_fill_(refused, -torch.inf)


def unpacked(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row of bytes, the lowest of a byte first: uint8 [rows, bytes] -> [rows, count]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(1)[:, :count]


def _ways(rules: Sequence[TokenRule], vocab: int) -> dict[_Way, list[int]]:
    ways: dict[_Way, list[int]] = defaultdict(list)
    for row, rule in enumerate(rules):
        ways[_way(rule.params, vocab)].append(row)
    return ways


def _way(params: SamplingParams, vocab: int) -> _Way:
    kind = kind_of(params, vocab)
    if kind in (Kind.GREEDY, Kind.WHOLE):
        return _Way(kind)
    needed = params.top_k + _TIES if kind is Kind.RANKED else 1
    return _Way(kind, (*(width for width in _WIDTHS if needed <= width <= vocab // 8), vocab))


def _pick_greedy(logits: Tensor, index: Tensor) -> Tensor:
    """argmax of each row; it takes the first of equals, and NaN before any number."""
    scores = _take(logits, index).float()
    picks = scores.argmax(-1)
    best = scores.gather(-1, picks.unsqueeze(-1)).squeeze(-1)
    return picks.masked_fill_(~best.isfinite(), NO_TOKEN)


def _pick_whole(scaled: Tensor, key: NoiseKey) -> Tensor:
    """The pick of rows where S is the whole vocabulary."""
    picks = []
    for rows in _chunks(scaled):
        noisy = gumbel_all(key.rows(rows), scaled.shape[-1]).add_(scaled[rows])
        best = noisy.argmax(-1)
        fine = noisy.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite()
        picks.append(best.masked_fill_(~fine, NO_TOKEN))
    return torch.cat(picks)


def _pick_among(found: _Candidates, key: NoiseKey, vocab: int) -> Tensor:
    """The pick of rows whose S lies among candidates; the lowest id on a tie, as argmax over all would have it."""
    if 4 * found.ids.shape[-1] < vocab:
        noise = gumbel_at(key, found.ids)
    else:
        noise = torch.cat(
            [gumbel_all(key.rows(rows), vocab).gather(-1, found.ids[rows]) for rows in _chunks(found.ids)]
        )
    noisy = noise.add_(found.scores).masked_fill_(~found.kept, -torch.inf)
    best = found.ids.masked_fill(noisy != noisy.amax(-1, keepdim=True), vocab).amin(-1)
    return best.masked_fill_(~found.scores[:, 0].isfinite(), NO_TOKEN)


def _candidates(scaled: Tensor, rules: Sequence[TokenRule], way: _Way) -> Iterator[_Candidates]:
    """Find S for every row: among a few best tokens, and for rows that keep more among more."""
    limits = _limits(scaled, rules, way)
    rows = torch.arange(len(rules), device=scaled.device)
    for width in way.widths:
        ids, scores = _best(_take(scaled, rows), width)
        kept, border = _keep(scores, limits.rows(rows))
        # Ties of the border may lie beyond the last candidate; -inf never counts.
        last = scores[:, -1:]
        beyond = ((border <= last) & (last > -torch.inf)).squeeze(-1)
        if width == scaled.shape[-1]:
            beyond.fill_(False)
        yield _Candidates(rows[~beyond], ids[~beyond], scores[~beyond], kept[~beyond])
        rows = rows[beyond]
        if not len(rows):
            return


def _best(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ids and scores of each row's best `width` tokens, by descending score, then ascending id.

    Ties at the end of the list are cut anywhere. Adding 0.0 turns -0.0 into 0.0, which some sorts tell apart.
    """
    if width == scores.shape[-1]:
        scores, ids = (scores + 0.0).sort(dim=-1, descending=True, stable=True)
        return ids, scores
    scores, ids = scores.topk(width)
    ids, order = ids.sort(-1)
    scores, order = (scores.gather(-1, order) + 0.0).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), scores


def _keep(scores: Tensor, limits: _Limits) -> tuple[Tensor, Tensor]:
    """Which candidates are inside S, bool [rows, width], and the lowest score that had to be seen, [rows, 1].

    As transformers' warpers do it: top-k keeps what is no less than the k-th score; top-p removes the lowest as
    long as their probability together is at most 1 - top_p (here the lower of two ids is the better one, there it is
    left open); min-p removes what is less probable than min_p times the best.
    """
    weights = (scores - scores[:, :1]).exp()
    kept = scores > -torch.inf
    border = None
    if limits.top_k is not None:
        border = scores.gather(-1, limits.top_k - 1)
        kept &= scores >= border
    mass = fixed_point(weights).masked_fill_(~kept, 0)
    total = mass.sum(-1, keepdim=True) if limits.mass is None else limits.mass
    better = mass.cumsum(-1) - mass
    share = ((total - better).double() / total.double()).float()
    kept &= share > limits.cut
    kept &= weights >= limits.min_p
    if border is None:
        border = scores.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    return kept, border


def _limits(scaled: Tensor, rules: Sequence[TokenRule], way: _Way) -> _Limits:
    params = [rule.params for rule in rules]
    cuts = [top_p_cut(one) for one in params]
    floats = on_device([cuts, [one.min_p for one in params]], scaled.device, torch.float32)
    cut, min_p = floats.unsqueeze(-1)
    if way.kind is Kind.RANKED:
        top_k = on_device([one.top_k for one in params], scaled.device).unsqueeze(-1)
        return _Limits(top_k, cut, min_p, None)
    return _Limits(None, cut, min_p, _whole_mass(scaled) if max(cuts) >= 0 else None)


def _whole_mass(scaled: Tensor) -> Tensor:
    """The mass of all tokens of each row: int64 [rows, 1]."""
    parts = (scaled[rows] - scaled[rows].amax(-1, keepdim=True) for rows in _chunks(scaled))
    return torch.cat([fixed_point(part.exp_()).sum(-1, keepdim=True) for part in parts])


def fixed_point(weights: Tensor) -> Tensor:
    """Masses, int64, of exp(z - max z), fp32."""
    return (weights * 2.0**_MASS_BITS).to(torch.int64)


def _scaled(logits: Tensor, rules: Sequence[TokenRule], index: Tensor) -> Tensor:
    """z = x / T in fp32, a tensor of its own."""
    divisor = on_device([heat(rule.params) for rule in rules], logits.device, torch.float32).unsqueeze(-1)
    return _take(logits, index).float() / divisor


def _ban(scores: Tensor, rules: Sequence[TokenRule]) -> None:
    """Excludes each row's banned ids, in place."""
    vocab = scores.shape[-1]
    rows_by_ban: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # mostly the same for many rows
    for row, rule in enumerate(rules):
        if rule.banned:
            rows_by_ban[rule.banned].append(row)
    for banned, rows in rows_by_ban.items():
        tokens = on_device([token for token in banned if 0 <= token < vocab], scores.device, torch.int64)
        scores[on_device(rows, scores.device).unsqueeze(-1), tokens] = -torch.inf


def _noise_key(rules: Sequence[TokenRule], index: Tensor, shift: Tensor | None) -> NoiseKey:
    params = [rule.params for rule in rules]
    positions = [rule.position for rule in rules]
    key = NoiseKey.build([one.seed for one in params], positions, [one.choice for one in params], index.device)
    return key if shift is None else replace(key, position=key.position + shift[index].unsqueeze(-1))


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """The indexed rows; all of them, in ascending order, are not copied."""
    return rows if len(index) == len(rows) else rows[index]


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Cut [rows, width] into runs of rows, so that temporaries over the vocabulary take megabytes, not gigabytes."""
    elements = 1 << 20 if rows.device.type == "cpu" else 1 << 24
    step = max(1, elements // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))
