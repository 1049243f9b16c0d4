"""Full TiDAR: one set of weights learns both roles (TiDAR, arXiv 2511.08923, section 3).

A document goes through the model as [x | MASK …], twice as long as it is. The first half reads causally and learns the
next token. The second half is cut into blocks; the masks of a block see the first half before it and one another, and
learn the tokens of their own positions. The loss is (α · AR + diffusion) / (1 + α). All masks are masked: there is no
noise schedule. transformers runs the model, so that every architecture it can train is trained as it should be.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import ConfigError, DTypeName
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.trainer import StepReport
from tidar_core.layout import WithinBlock

ALPHA = 1.0  # how much the autoregressive half counts (paper, section 3)
SAVED_NAMES = {"final_learning_rate": "final_rate"}  # in checkpoints of any version, which are compared by name


@dataclass(frozen=True, slots=True)
class FullConfig:
    """block: slots a proposal. learning_rate falls by a cosine to final_learning_rate over the budget, as in the paper.
    tokens_a_step: of documents whose gradients make one optimizer step. dtype: of its products on a GPU; weights, and
    all on a CPU, are fp32. patience: measurements without gain before training ends."""

    block: int = 8
    within_block: WithinBlock = "bidirectional"
    learning_rate: float = 1e-5
    final_learning_rate: float = 3e-6
    tokens_a_step: int = 4096
    longest: int = 1024
    clip: float = 1.0
    seed: int = 0
    dtype: DTypeName = "bfloat16"
    patience: int = 8

    def settings(self) -> dict[str, Any]:
        """What the record of the weights tells of their training, by the names that files have."""
        settings = {SAVED_NAMES.get(name, name): value for name, value in asdict(self).items() if name != "patience"}
        return {"mode": "full", "alpha": ALPHA, **settings}

    def fixed(self) -> dict[str, Any]:
        """What must not change when a training goes on: all but what a user may lower where it fails or is slow, what
        follows from the model, and how exact products are."""
        free = ("learning_rate", "tokens_a_step", "longest", "dtype")
        return {name: value for name, value in self.settings().items() if name not in free}


@dataclass(frozen=True, slots=True)
class Doubled:
    """A document as the model sees it. tokens, positions: int64 [2 n]. visible: bool [2 n, 2 n], row sees column.
    starts: where its blocks begin, 0 … n - 1."""

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    starts: tuple[int, ...]


def doubled(tokens: np.ndarray, mask: int, block: int, offset: int, within_block: WithinBlock) -> Doubled:
    """[x | MASK …] with whole blocks from place `offset` on; the places before it are a shorter block."""
    n = len(tokens)
    place = torch.arange(n)
    starts = torch.where(place < offset, 0, (place - offset) // block * block + offset)
    causal = place[:, None] >= place[None, :]
    before = starts[:, None] > place[None, :]
    together = starts[:, None] == starts[None, :]
    if within_block == "causal":
        together &= causal
    visible = torch.cat((torch.cat((causal, torch.zeros(n, n, dtype=torch.bool)), 1), torch.cat((before, together), 1)))
    x = torch.from_numpy(tokens.astype(np.int64))
    return Doubled(torch.cat((x, torch.full((n,), mask))), place.repeat(2), visible, tuple(starts.unique().tolist()))


def document_logits(model: Any, document: Doubled) -> tuple[Tensor, Tensor]:
    """Scores of the next token [n, vocab] and of each mask's own token [n, vocab]."""
    device = model.device
    out = model(
        input_ids=document.tokens[None].to(device),
        position_ids=document.positions[None].to(device),
        attention_mask=_visible(model.config, document, device),
        use_cache=False,
    ).logits[0]
    return out[: len(out) // 2], out[len(out) // 2 :]


def _visible(config: Any, document: Doubled, device: torch.device) -> Tensor | dict[str, Tensor]:
    """What a row sees, bool [1, 1, 2 n, 2 n]; one such mask for each kind of layer where some layers have a window. As
    in the engine, the window never hides a mask's own block."""
    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    visible, positions = document.visible, document.positions
    if window is None or kinds == {"full_attention"}:
        return visible[None, None].to(device)
    near = positions[:, None] - positions < window
    near[:, len(positions) // 2 :] = True
    windowed = (visible & near)[None, None].to(device)
    if not kinds:  # all layers are of one kind
        return windowed
    return {"full_attention": visible[None, None].to(device), "sliding_attention": windowed}


def joint_loss(next_scores: Tensor, mask_scores: Tensor, tokens: Tensor, wanted: Tensor, alpha: float) -> Tensor:
    """(α · AR + diffusion) / (1 + α), summed over the wanted tokens. next_scores, mask_scores: [n, vocab]. wanted: bool
    [n], the tokens to learn; the first is left out, since nothing comes before it."""
    wanted = wanted.clone()
    wanted[0] = False
    rows = wanted.nonzero().squeeze(1)
    autoregressive = F.cross_entropy(next_scores[rows - 1].float(), tokens[rows], reduction="sum")
    diffusion = F.cross_entropy(mask_scores[rows].float(), tokens[rows], reduction="sum")
    return (alpha * autoregressive + diffusion) / (1 + alpha)


@dataclass(frozen=True, slots=True)
class FullDrafts:
    """What drafts are worth. A draft holds where its mask says what the model's own next-token half says there.

    tokens_per_step: one, and the drafts behind a block's first mask that hold in a row, the mean over blocks one behind
    the other. holds: how often slot s holds where those before it do, for s = 1, 2, …; 0 where these never did.
    """

    tokens_per_step: float
    holds: tuple[float, ...]


def judged_blocks(own: np.ndarray, block: int) -> list[int]:
    """Where in a document the blocks begin that are measured: those whose tokens are all its own (bool [n])."""
    return [start for start in range(1, len(own) - block + 1, block) if own[start : start + block].all()]


@torch.no_grad()
def measure_full(
    model: Any, documents: Sequence[tuple[np.ndarray, np.ndarray]], mask: int, config: FullConfig
) -> FullDrafts:
    """What the model's drafts are worth on given documents (tokens, own)."""
    lengths: list[int] = []  # of the runs of drafts that hold
    for tokens, own in documents:
        document = doubled(tokens, mask, config.block, 1, config.within_block)
        following, masked = (scores.argmax(-1).cpu() for scores in document_logits(model, document))
        agrees = masked[1:] == following[:-1]
        for start in judged_blocks(own, config.block):
            holds = agrees[start : start + config.block - 1].long().cumprod(0)
            lengths.append(int(holds.sum()))
    reached = [sum(length >= slot for length in lengths) for slot in range(config.block)]
    shares = tuple(after / before if before else 0.0 for before, after in pairwise(reached))
    return FullDrafts(1.0 + sum(lengths) / max(1, len(lengths)), shares)


def digest_of_weights(model: Any) -> str:
    """A short hash of a model that was just loaded, so that it is known by its weights and not by its folder's name: 16
    hex digits, over one row of each of its parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter[len(parameter) // 2].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class FullTraining:
    """The model that is trained, its optimizer, and where in the training they are. sampler: counts the tokens to learn
    in a document, without its first. settings: what must be the same in a checkpoint that it goes on from."""

    def __init__(self, model: Any, mask: int, config: FullConfig, sampler: Sampler):
        self.model, self.mask, self.config, self.sampler = model, mask, config, sampler
        self.progress = Progress()
        self.settings = {"base": digest_of_weights(model)} | config.fixed()
        self.names, self.tensors = zip(*model.named_parameters(), strict=True)
        self.optimizer = torch.optim.AdamW(
            self.tensors, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, used: float) -> StepReport:
        """One optimizer step over the next documents. used: the share of the budget that is used up. Its loss is the
        mean of a token; its rows are the tokens that were learnt.

        Raises ConfigError where the loss or its gradient is not a number.
        """
        began, config, progress = time.monotonic(), self.config, self.progress
        draw = self.sampler.draw(progress)
        chosen = self.sampler.next_documents(progress, config.tokens_a_step)
        total, loss = sum(int(own[1:].sum()) for _, own in chosen), 0.0
        kind = self.model.device.type
        bf16 = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" and config.dtype == "bfloat16")
        for tokens, own in chosen:
            offset = int(draw.integers(1, config.block + 1))
            document = doubled(tokens, self.mask, config.block, offset, config.within_block)
            with bf16:
                following, masked = document_logits(self.model, document)
            targets = torch.from_numpy(tokens.astype(np.int64)).to(self.model.device)
            part = joint_loss(following, masked, targets, torch.from_numpy(own).to(targets.device), ALPHA) / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.tensors, config.clip)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise ConfigError(
                f"the loss is not a number at step {progress.step}: training stopped, the last good checkpoint is "
                "kept; start again with a lower --learning-rate"
            )
        cosine = 0.5 * (1 + math.cos(math.pi * used))
        for group in self.optimizer.param_groups:
            final = min(config.final_learning_rate, config.learning_rate)
            group["lr"] = final + (config.learning_rate - final) * cosine
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - began
        progress.step, progress.seconds = progress.step + 1, progress.seconds + seconds
        progress.rows += sum(len(tokens) for tokens, _ in chosen)
        return StepReport(progress, loss, float(norm), total, total, seconds)
