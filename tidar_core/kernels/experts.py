"""A mixture of experts in plain torch: which experts a row goes through, and what they make of it.

A row's experts, shares and results depend on that row alone: rows are gathered by expert, multiplied by products that
give a row the same bits among any others, and a row's results are added in the order of its experts, best first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Activation, Experts

LEAST_SUM = 1e-20  # of scores that shares are divided by
SURE = 100.0  # whose sigmoid is 1, as that of all above it


@dataclass(frozen=True, slots=True)
class Routed:
    """Where rows go: experts, int64 [rows, chosen], the best first; shares, fp32 [rows, chosen], by which their results
    are multiplied; shared, fp32 [rows, 1], the same of the MLP for all rows, None where its result is added whole."""

    experts: Tensor
    shares: Tensor
    shared: Tensor | None


def choose(logits: Tensor, bias: Tensor | None, experts: Experts) -> Routed:
    """The best experts of each row; of equal ones the first. logits: fp32 [rows, router rows]: one column an expert,
    then that of the shared MLP's share, then padding (`weights.LayerWeights`)."""
    own = logits[:, : experts.count]
    scores = _sigmoid(own) if experts.scores == "sigmoid" else own.softmax(dim=-1)
    ranked = (scores if bias is None else scores + bias).sort(dim=-1, descending=True, stable=True).indices
    best = ranked[:, : experts.chosen]
    shares = scores.gather(1, best)
    if experts.renormalised:
        shares = shares / shares.sum(dim=-1, keepdim=True).clamp_min(LEAST_SUM)
    if experts.scale != 1:
        shares = shares * experts.scale
    return Routed(best, shares, _sigmoid(logits[:, experts.count, None]) if experts.shared_gated else None)


def _sigmoid(logits: Tensor) -> Tensor:
    """By a softmax of two: torch's own sigmoid computes what is left over at the end of a thread's part in another way,
    and so gives a number other bits among other rows."""
    finite = logits.clamp_max(SURE)
    return torch.stack((finite, torch.zeros_like(finite)), dim=-1).softmax(dim=-1)[..., 0]


def mix_by_turns(
    linear: Callable[[Tensor, Tensor], Tensor], gate: Callable[[Tensor, Activation], Tensor], row_multiple: int
) -> Callable[[Tensor, Routed, Tensor, Tensor, Activation], Tensor]:
    """`Ops.mix_experts`, one expert after the other. linear(x, weight): x weightᵀ, only called with multiples of
    row_multiple rows. Differentiable in x and the shares where `linear` and `gate` are."""

    def mix_experts(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, activation: Activation) -> Tensor:
        rows, chosen = routed.experts.shape
        if rows == 0:
            return x
        entries = routed.experts.flatten()
        by_expert = entries.argsort(stable=True)
        counts = entries.bincount(minlength=len(gate_up)).tolist()
        results = []
        for expert, mine in enumerate(by_expert.split(counts)):
            if len(mine) == 0:
                continue
            own = F.pad(x[mine // chosen], (0, 0, 0, -len(mine) % row_multiple))
            results.append(linear(gate(linear(own, gate_up[expert]), activation), down[expert])[: len(mine)])
        found = torch.cat(results)[by_expert.argsort()].view(rows, chosen, -1)
        total = routed.shares[:, 0, None] * found[:, 0].float()
        for place in range(1, chosen):
            total = total + routed.shares[:, place, None] * found[:, place].float()
        return total.to(x.dtype)

    return mix_experts
