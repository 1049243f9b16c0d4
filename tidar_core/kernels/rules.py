"""Token rules as numbers, for the kernels that pick tokens, and the rule over a few candidates by such numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidar_core.sampling.philox import WORD, NoiseKey, gumbel_at
from tidar_core.sampling.picking import MAX_VOCAB, fixed_point
from tidar_core.sampling.token_rule import NO_TOKEN, TokenRule, heat, kept_by_rank, of_all, top_p_cut
from tidar_core.transfer import sent


@dataclass(frozen=True, slots=True)
class RuleNumbers:
    """The rules of some rows as numbers, for scores that are adjusted already (`tidar_core.sampling.picking.adjusted`).

    reals: fp32 [3, rows]: temperature (0 picks the best), `top_p_cut`, min_p. whole: int32 [5, rows]: the bits of the
    seed's low and high word, of position and choice as `tidar_core.sampling.philox` has them, and top_k (0 keeps all).
    """

    reals: Tensor
    whole: Tensor

    def moved(self, shift: Tensor) -> "RuleNumbers":
        """The rules of the same rows `shift` positions further on, int64 [rows]."""
        whole = self.whole.clone()
        whole[..., 2, :] += shift
        return RuleNumbers(self.reals, whole)


def all_zero(rows: int, device: torch.device) -> RuleNumbers:
    """The numbers of rows that pick the best token."""
    return RuleNumbers(torch.zeros(3, rows, device=device), torch.zeros(5, rows, dtype=torch.int32, device=device))


def rule_numbers(
    rules: Sequence[TokenRule], vocab: int, device: torch.device, shift: Tensor | None = None
) -> RuleNumbers:
    """The rules' numbers on `device`. shift: int64 [rows], added to the positions, where only the device knows them."""
    numbers = of_all(rules, _numbers, vocab, device)
    return numbers if shift is None else numbers.moved(shift)


def _numbers(rules: Sequence[TokenRule], vocab: int, device: torch.device) -> RuleNumbers:
    kinds = list({id(rule.params): rule.params for rule in rules}.values())  # the rows of a sequence share theirs
    places = {id(one): place for place, one in enumerate(kinds)}
    kind = [places[id(rule.params)] for rule in rules]
    reals = [[heat(one) for one in kinds], [top_p_cut(one) for one in kinds], [one.min_p for one in kinds]]
    whole = [
        [one.seed & WORD for one in kinds],
        [one.seed >> 32 & WORD for one in kinds],
        [0] * len(kinds),
        [one.choice & WORD for one in kinds],
        [kept_by_rank(one, vocab) for one in kinds],
    ]
    # taken, not indexed: kernels read what lies side by side, which an index would lay the other way
    words = np.take(np.array(whole, dtype=np.int64), kind, axis=1)
    words[2] = [rule.position & WORD for rule in rules]
    numbers = np.take(np.array(reals, dtype=np.float32), kind, axis=1)
    return RuleNumbers(sent(torch.from_numpy(numbers), device), sent(torch.from_numpy(words.astype(np.int32)), device))


def pick_listed(scores: Tensor, candidates: Tensor, numbers: RuleNumbers) -> Tensor:
    """The token rule over a few candidates alone: int64 [rows], `NO_TOKEN` as in `picking.pick_tokens`.

    scores: fp32 [rows, n]; candidates: their ids, int64 [rows, n]. Sizes alone decide what is launched.
    """
    heats, cut, min_p = numbers.reals.unsqueeze(-1)
    *words, top_k = numbers.whole.long().unsqueeze(-1)
    samples = heats > 0
    z = torch.where(samples, scores / torch.where(samples, heats, 1.0), scores)
    best = z.amax(-1, keepdim=True)
    above = z[:, None, :] > z[:, :, None]  # [row, one, other]: the other stands before the one
    before = above | ((z[:, None, :] == z[:, :, None]) & (candidates[:, None, :] < candidates[:, :, None]))
    kept = (z > -torch.inf) & ((top_k == 0) | (above.sum(-1) < top_k))
    weights = (z - best).exp()
    mass = fixed_point(weights).masked_fill_(~kept, 0)
    total = mass.sum(-1, keepdim=True)
    share = ((total - (before * mass[:, None, :]).sum(-1)).double() / total.double()).float()
    kept &= (share > cut) & (weights >= min_p)
    key = NoiseKey(*(word & WORD for word in words))
    noisy = torch.where(samples, z + gumbel_at(key, candidates), z).masked_fill_(~kept, -torch.inf)
    noisy = torch.where(samples | (before.sum(-1) == 0), noisy, -torch.inf)
    most = noisy.amax(-1, keepdim=True)
    picks = candidates.masked_fill(noisy != most, MAX_VOCAB).amin(-1)
    return picks.masked_fill_(~(best.isfinite() & most.isfinite()).squeeze(-1), NO_TOKEN)
