"""What a draft is judged by: its distance from the base's distribution, and how much each slot counts.

For a mask row with the draft distribution q, where the base says p, the loss is a mixture of KL(p ‖ q) and the total
variation ½ Σ |p − q|. Greedy drafts hold where the two agree on the best token, sampled ones at least as often as
(1 − TV)/(1 + TV) (see `tidar_core.sampling`).

Logits over a vocabulary are the largest tensors of training by far. So loss and gradient are computed together, some
rows at a time: the gradient with respect to the logits is known in closed form, is carried through the head at once,
and no more than those rows' logits is ever held. The head itself is frozen and gets no gradient.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tidar_core.convert.vocabulary import Columns

SlotWeighting = Literal["decay", "product"]
NEGLIGIBLE = 1e-3  # slots that weigh less are not computed
LOGITS_AT_ONCE = {"cpu": 6 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, slots=True)
class LossConfig:
    """kl_share: of KL in the mixture, the rest is total variation.

    weighting: "decay" weighs slot s ≥ 1 by exp(-(s - 1) / decay), "product" by how likely it is to be reached: the
    product of 1 - TV over the slots 1 … s-1 of its own block. Slot 0, which guesses what the base says at the same
    time, weighs `first_slot` in either.
    """

    kl_share: float = 1.0
    weighting: SlotWeighting = "decay"
    decay: float = 4.0
    first_slot: float = 0.3

    def profile(self, block: int) -> Tensor:
        """Weights of the slots, fp32 [block]; for "product" those of a block whose slots all hold."""
        behind = torch.arange(block - 1, dtype=torch.float32)
        weights = torch.exp(-behind / self.decay) if self.weighting == "decay" else torch.ones(block - 1)
        return torch.cat((torch.tensor([self.first_slot]), weights))


def draft_loss(
    drafted: Tensor,
    columns: Columns,
    clean: Tensor,
    target_rows: Tensor,
    trained: Tensor,
    config: LossConfig,
    normaliser: float,
    rows_at_once: int = 0,
) -> Tensor:
    """The loss of some blocks of mask rows, and its gradient with respect to `drafted`.

    drafted: final hidden states of the mask rows [blocks * block, hidden], block by block. columns: the part of the
    vocabulary that counts. clean: final hidden states of the base's rows [rows, hidden], without gradient.
    target_rows: int64 [blocks, block], the row of `clean` that each slot should agree with. trained: bool
    [blocks, block], slots that have a target. normaliser: what the weighted sum is divided by, the same for all parts
    of a step.
    rows_at_once: rows whose logits are held at a time; 0 for what suits the device.
    """
    at_once = rows_at_once or max(16, LOGITS_AT_ONCE.get(drafted.device.type, 64 << 20) // len(columns.head))
    return _DraftLoss.apply(drafted, columns, clean, target_rows, trained, config, normaliser, at_once)


class _DraftLoss(torch.autograd.Function):
    """Weighted distance in the forward pass, with the gradient kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        columns: Columns,
        clean: Tensor,
        target_rows: Tensor,
        trained: Tensor,
        config: LossConfig,
        normaliser: float,
        rows_at_once: int,
    ) -> Tensor:
        blocks, block = target_rows.shape
        profile = config.profile(block).to(drafted.device)
        wanted = trained & (profile >= NEGLIGIBLE)
        gradient = torch.zeros_like(drafted)
        distance, overlap, weights = drafted.new_zeros((3, blocks, block), dtype=torch.float32)
        buffers = _Buffers(drafted, columns, rows_at_once + block)
        step = max(1, rows_at_once // block)
        for first in range(0, blocks, step):
            part = slice(first, first + step)
            rows = wanted[part].flatten().nonzero().squeeze(1)
            if not len(rows):
                continue
            found = _judge_rows(drafted, columns, clean, rows + first * block, target_rows, config.kl_share, buffers)
            distance[part].view(-1).index_copy_(0, rows, found.distance)
            overlap[part].view(-1).index_copy_(0, rows, found.overlap)
            weights[part] = _weights(overlap[part], wanted[part], profile, config.weighting)
            scale = weights[part].flatten()[rows] / normaliser
            gradient.index_copy_(0, rows + first * block, found.gradient * scale.to(drafted.dtype)[:, None])
        ctx.save_for_backward(gradient)
        return (distance * weights).sum() / normaliser

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return (gradient * slope.to(gradient.dtype), *[None] * 7)


def _weights(overlap: Tensor, wanted: Tensor, profile: Tensor, weighting: SlotWeighting) -> Tensor:
    """[blocks, block]: the profile, for "product" times the overlaps of the slots 1 … s-1 before."""
    weights = profile.expand_as(overlap).clone()
    if weighting == "product" and overlap.shape[1] > 2:
        weights[:, 2:] *= overlap[:, 1:-1].cumprod(dim=1)
    return weights.masked_fill_(~wanted, 0.0)


@dataclass(frozen=True, slots=True)
class _Rows:
    distance: Tensor
    overlap: Tensor
    gradient: Tensor


class _Buffers:
    """Four [rows, columns] tensors that all parts of a step share."""

    def __init__(self, drafted: Tensor, columns: Columns, rows: int):
        self._tensors = [drafted.new_empty(rows, len(columns.head)) for _ in range(4)]

    def __call__(self, index: int, rows: int) -> Tensor:
        return self._tensors[index][:rows]


def _judge_rows(
    drafted: Tensor,
    columns: Columns,
    clean: Tensor,
    rows: Tensor,
    target_rows: Tensor,
    kl_share: float,
    buffers: _Buffers,
) -> _Rows:
    """The unweighted distance of `rows`, and its gradient with respect to their hidden states."""
    targets, mine = target_rows.flatten()[rows].unique(return_inverse=True)
    count = len(rows)
    log_q, log_p = buffers(0, count), buffers(1, len(targets))
    p, spare = buffers(2, count), buffers(3, count)
    torch.log_softmax(_logits(drafted[rows], columns, spare), -1, out=log_q)
    torch.log_softmax(_logits(clean[targets], columns, spare[: len(targets)]), -1, out=log_p)
    p_once = torch.exp(log_p, out=spare[: len(targets)])
    torch.index_select(p_once, 0, mine, out=p)

    distance = torch.zeros(count, dtype=torch.float32, device=rows.device)
    if kl_share > 0:
        entropy = log_p.mul_(p_once).sum(-1, dtype=torch.float32)
        distance += kl_share * (entropy[mine] - torch.mul(p, log_q, out=spare).sum(-1, dtype=torch.float32))
    q = log_q.exp_()
    difference = torch.sub(q, p, out=p)
    variation = 0.5 * torch.abs(difference, out=spare).sum(-1, dtype=torch.float32)
    if kl_share < 1:
        distance += (1 - kl_share) * variation
        # d TV / d logits = q (g - Σ q g) with g = ½ sign(q - p)
        signs = torch.sign(difference, out=spare).mul_(0.5 * (1 - kl_share))
        mean = torch.mul(q, signs, out=buffers(1, count)).sum(-1, keepdim=True, dtype=torch.float32)
        slope = signs.sub_(mean.to(signs.dtype)).mul_(q)
        difference = slope.add_(difference, alpha=kl_share)
    return _Rows(distance, 1 - variation, difference @ columns.head)


def _logits(hidden: Tensor, columns: Columns, out: Tensor) -> Tensor:
    if columns.raised is None:
        return torch.mm(hidden, columns.head.t(), out=out)
    return torch.addmm(columns.raised, hidden, columns.head.t(), out=out)
