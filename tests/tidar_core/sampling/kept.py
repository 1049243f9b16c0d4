"""What the token rule keeps of scores, by the parts of which it picks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidar_core.sampling import picking
from tidar_core.sampling.token_rule import Kind, TokenRule
from tidar_core.transfer import on_device


def kept_scores(logits: Tensor, rules: Sequence[TokenRule]) -> Tensor:
    """The scores that the noise is added to: fp32 [rows, vocab], z inside S and -inf outside.

    The softmax of a row is the distribution that its token is drawn from. A greedy row keeps the one token it
    picks; a row that gets `NO_TOKEN` keeps nothing. Arguments are those of `pick_tokens`.
    """
    logits = picking.adjusted(logits, rules)
    kept = torch.full(logits.shape, -torch.inf, dtype=torch.float32, device=logits.device)
    for way, rows in picking._ways(rules, logits.shape[-1]).items():
        index = on_device(rows, logits.device)
        own = [rules[row] for row in rows]
        if way.kind is Kind.GREEDY:
            picks = picking._pick_greedy(logits, index)
            index, picks = index[picks >= 0], picks[picks >= 0]
            kept[index, picks] = logits[index, picks].float()
        elif way.kind is Kind.WHOLE:
            scaled = picking._scaled(logits, own, index)
            kept[index] = scaled.masked_fill_(~scaled.amax(-1, keepdim=True).isfinite(), -torch.inf)
        else:
            for found in picking._candidates(picking._scaled(logits, own, index), own, way):
                inside = found.kept & found.scores[:, :1].isfinite()
                whole = torch.full((len(found.rows), logits.shape[-1]), -torch.inf, device=logits.device)
                kept[index[found.rows]] = whole.scatter_(-1, found.ids, found.scores.masked_fill(~inside, -torch.inf))
    return kept
