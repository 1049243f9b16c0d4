"""Trains a drafter until time or steps are over, or nothing is gained any more; can be killed and started again."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.convert.blocks import (
    Blocks,
    BlockSizes,
    block_of_step,
    blocks_ahead,
    draw_blocks,
    narrowed,
    pack_documents,
)
from tidar_core.convert.checkpoint import Progress, resume_training, save_training
from tidar_core.convert.crew import ALONE, Crew
from tidar_core.convert.drafter import rank_of, trainable
from tidar_core.convert.ending import end_put_off, unseen
from tidar_core.convert.forward import Clean, FrozenBase, run_clean, run_masks, run_slot_head
from tidar_core.convert.held_out import Abandoned, HeldOut, HeldOutResult, measure_held_out
from tidar_core.convert.losses import LossConfig, draft_loss
from tidar_core.convert.pace import Pace, SavePace
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.vocabulary import Columns, Vocabulary
from tidar_core.layout import WithinBlock
from tidar_core.model.weights import AdapterWeights, map_tensors, named_tensors
from tidar_core.transfer import enough_memory

MEASURE_SECONDS, MEASURE_SHARE = 60.0, 0.05  # see `Pace`
SLOT_HEAD_FASTER = 2.5  # its learning rate, as a multiple of the adapter's
ALONE_SHARE = 0.125  # of the blocks train without the slot head, which chooses among candidates found without it
ROWS_A_STEP = {"cpu": 1536, "cuda": 32768}
ROWS_A_PASS = {"cpu": 2048, "cuda": 32768}
SAVED_NAMES = {"final_share": "final_rate"}  # in checkpoints of any version, which are compared by name, and in records


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a drafter is trained. block: slots of a proposal; block_sizes: how many of them a step's blocks have.
    slot_head: width of the head that corrects a slot by the token before it, 0 for none. anchors: blocks behind each
    document, at most.

    rows_a_step: mask rows that each worker adds to an optimizer step, about. rows_a_pass: mask rows whose activations
    are in memory at once; a step with more takes several passes. Both 0 for what suits the device. learning_rate: the
    highest; it rises over `warmup` steps and falls by a cosine to `final_share` of itself. patience: measurements
    without gain before training ends; those before `SETTLED` do not count, since at a high rate a drafter may stand
    still and gain in the end. vocabulary: tokens that the loss always sees (`vocabulary.py`), 0 for all of them.
    measure_every: steps between measurements, 0 where the time decides (`pace.py`).
    """

    block: int = 8
    block_sizes: BlockSizes = "whole"
    slot_head: int = 256
    within_block: WithinBlock = "bidirectional"
    loss: LossConfig = field(default_factory=LossConfig)
    anchors: int = 64
    rows_a_step: int = 0
    rows_a_pass: int = 0
    learning_rate: float = 1.5e-3
    warmup: int = 30
    final_share: float = 0.03
    clip: float = 1.0
    vocabulary: int = 8192
    patience: int = 8
    measure_every: int = 0
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What a drafter's record tells of its training, by the names that files have."""
        settings = _without(asdict(self), "patience", "measure_every", "rows_a_pass")
        return {SAVED_NAMES.get(name, name): value for name, value in settings.items()}

    def fixed(self) -> dict[str, Any]:
        """What must not change when a training goes on: all but what an error may advise the user to lower."""
        return _without(self.settings(), "learning_rate", "rows_a_step")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a training begins from, by fingerprints. base: the base's weights. start: the adapter that it goes on from,
    "none" for a new one."""

    base: str = ""
    start: str = "none"


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a drafter learns from, and what it is measured on. vocabulary: the tokens that the loss sees."""

    sampler: Sampler
    vocabulary: Vocabulary
    held_out: HeldOut


@dataclass(frozen=True, slots=True)
class Budget:
    """When training ends: after so many steps, or seconds (0: no such limit), runs before this one counted."""

    steps: int = 0
    seconds: float = 0.0

    def used(self, progress: Progress) -> float:
        """The share of the budget that is used up, 0 to 1."""
        shares = [progress.step / self.steps] if self.steps else []
        if self.seconds:
            shares.append(progress.seconds / self.seconds)
        return min(1.0, max(shares, default=1.0))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step: its loss, the gradient's norm before clipping, this worker's rows of it, its seconds."""

    progress: Progress
    loss: float
    norm: float
    mask_rows: int
    clean_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Who follows a training. step: called after each step. measured: after each measurement, with the result, the
    adapter, and whether it is the best so far and worth keeping. line: takes lines for the user. kept: called where a
    training goes on, so that the caller can say what the drafter it has is worth (`Progress.knows`)."""

    step: Callable[[StepReport], None] = lambda report: None
    measured: Callable[[HeldOutResult, AdapterWeights, Progress, bool], None] = lambda *found: None
    line: Callable[[str], None] = lambda line: None
    kept: Callable[[Progress], None] = lambda progress: None


def check_rows(config: TrainConfig) -> None:
    """Raise ConfigError where a step has no room for one block."""
    if 0 < config.rows_a_step < config.block:
        raise ConfigError(f"--rows {config.rows_a_step} is less than one block of {config.block} slots")


def check_documents(learnt: Sampler, held_out: HeldOut, crew: Crew) -> None:
    """Raises ConfigError where the documents are too few to learn from, or to be measured on."""
    if len(learnt) < crew.size or not held_out.documents:
        raise ConfigError(
            "the data are too few documents to learn from and be measured on: raise --minutes or --own-tokens, or give "
            "more --text"
        )


def train_drafter(
    base: FrozenBase,
    start: AdapterWeights,
    data: TrainingData,
    config: TrainConfig,
    budget: Budget,
    directory: Path,
    watch: Watch,
    crew: Crew = ALONE,
    origin: Origin = Origin(),
) -> Progress:
    """Trains from `start`, or from the last checkpoint in `directory` where there is one, of the same origin.

    All workers of a crew call it with the same arguments, except `watch`, which is called for this worker alone. They
    take the same steps and end at the same one. A worker that is alone saves between two steps before a signal ends it.

    Raises ConfigError where there is nothing to train on, where the loss is not a number (the last checkpoint stays),
    where the disk is full, where the checkpoint was made with other settings, and where a worker sees another one.
    """
    check_documents(data.sampler, data.held_out, crew)
    training = _Training(base, start, config, directory, watch, crew, origin)
    progress = training.progress
    judged_on = crew.agree_digest(data.held_out.digest)
    if progress.step:
        watch.kept(progress)
        progress.best = crew.agree(progress.best)
    progress.compare_on(judged_on)
    progress.goes_on(budget.used(progress))
    sizes = blocks_ahead(config.block_sizes, config.block, budget.used(progress))
    with enough_memory("it does not hold what proves the kernels, free some of it"):
        base.attends.prepare(base.config, base.weights, sizes, config.within_block)
    pace = Pace(MEASURE_SECONDS, MEASURE_SHARE, config.measure_every)
    with end_put_off(crew.size == 1) as asked:  # others would wait for a worker that leaves between two steps
        with unseen(asked):
            while not asked():
                over = budget.used(progress) >= 1.0
                if over or pace.due(progress):
                    began = time.monotonic()
                    try:
                        training.measure(data.held_out, judged_on, pace.counts(budget.used(progress)), asked)
                    except Abandoned:
                        break
                    seconds = crew.agree(time.monotonic() - began)
                    pace.measured(progress, seconds, typical=pace.looked)  # a GPU's first compiles what the others find
                if over or progress.stale >= config.patience or asked():
                    break
                training.step(data, budget.used(progress))
                if not asked() and training.saves.due(time.monotonic()):
                    training.saving += training.save()
        training.save()
    return progress


class _Training:
    """The drafter that is trained, its optimizer, and where in the training they are."""

    def __init__(
        self,
        base: FrozenBase,
        start: AdapterWeights,
        config: TrainConfig,
        directory: Path,
        watch: Watch,
        crew: Crew,
        origin: Origin,
    ):
        self.base, self.config, self.directory, self.watch, self.crew = base, config, directory, watch, crew
        self.adapter = trainable(start)
        self.saves = SavePace(time.monotonic())
        self.saving = 0.0  # seconds that this worker took over checkpoints, for the next step to count
        named = list(named_tensors(self.adapter))
        names, tensors = zip(*named, strict=True)
        self.names: list[str] = list(names)
        self.tensors: list[Tensor] = list(tensors)
        own = [tensor for name, tensor in named if not name.startswith("slot_head.")]
        head = [tensor for name, tensor in named if name.startswith("slot_head.")]
        groups = [{"params": own, "faster": 1.0}] + [{"params": head, "faster": SLOT_HEAD_FASTER}] * bool(head)
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.settings = asdict(origin) | {"rank": rank_of(self.adapter)} | config.fixed()
        device = base.device.type
        self.rows_a_step = config.rows_a_step or ROWS_A_STEP.get(device, 1024)
        self.rows_a_pass = config.rows_a_pass or ROWS_A_PASS.get(device, 1024)
        found = resume_training(directory, self.settings, self.names, self.tensors, self.optimizer, watch.line)
        self.progress = found or Progress()
        if crew.agree(self.progress.step) != self.progress.step:
            raise ConfigError(f"{directory} is not the same for all workers: put it where every node sees it")

    def save(self) -> float:
        """Writes a checkpoint, where this worker is the one that writes; gives the seconds it took."""
        began = time.monotonic()
        if self.crew.leads:
            save_training(self.directory, self.settings, self.progress, self.names, self.tensors, self.optimizer)
        return self.saves.saved(began, time.monotonic())

    def measure(self, held_out: HeldOut, judged_on: str, counts: bool, abandon: Callable[[], bool]) -> None:
        """Measures tokens per step on held-out documents, and hands the drafter to the caller. judged_on: the digest of
        those documents, one for all workers; counts: see `Pace`. Raises Abandoned soon after `abandon` has become true:
        a large model takes minutes."""
        drafter = map_tensors(self.adapter, lambda tensor: tensor.detach().to(self.base.dtype))
        with enough_memory("it does not hold the held-out documents that are measured on, free some of it"):
            result = measure_held_out(
                self.base, drafter, held_out, self.config.block, self.config.within_block, abandon
            )
        progress = self.progress
        found = self.crew.agree(result.tokens_per_step)
        best = found >= progress.best  # one as good as the best has learnt more, and a drafter is quickly written
        progress.take(found, judged_on, counts)
        # Saved before the caller keeps it: a run that went on from an older checkpoint could replace it by a worse one.
        if best:
            self.save()
        self.watch.measured(result, map_tensors(self.adapter, lambda tensor: tensor.detach()), progress, best)

    def step(self, data: TrainingData, used: float) -> None:
        """One optimizer step. All workers draw the same blocks, each computes its part of them, and the gradients are
        added up. Raises ConfigError where the loss or its gradient is not a number, and where memory is too small."""
        began, config, base, progress, crew = time.monotonic(), self.config, self.base, self.progress, self.crew
        draw = data.sampler.draw(progress)
        block = block_of_step(config.block_sizes, config.block, used, draw)
        wanted = crew.size * self.rows_a_step // block
        pack = pack_documents(data.sampler.next_documents(progress, wanted, config.anchors), base.device)
        drawn = draw_blocks(pack, config.anchors, block, base.config.max_positions, draw)
        columns = data.vocabulary.draw(pack.tokens, draw)
        first, last = crew.part(len(drawn))
        alone = torch.from_numpy(draw.random(len(drawn))[first:last] < ALONE_SHARE).to(base.device)
        normaliser = len(drawn) * float(config.loss.profile(block).sum())
        pack, blocks = narrowed(pack, drawn.part(first, last))
        with enough_memory(f"it does not hold what a step reads, lower --rows (now {self.rows_a_step})"):
            clean = run_clean(base, pack)
        loss = self._learn(clean, blocks, columns, alone, normaliser)
        crew.add_up([loss, *(tensor.grad for tensor in self.tensors if tensor.grad is not None)])
        norm = torch.nn.utils.clip_grad_norm_(self.tensors, config.clip)
        if not math.isfinite(float(norm)) or not math.isfinite(float(loss)):
            raise ConfigError(
                f"the loss is not a number at step {progress.step}: training stopped, the last good checkpoint and "
                "adapter are kept; start again with a lower --learning-rate"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = group["faster"] * learning_rate(config, progress.step, used)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = crew.agree(time.monotonic() - began)
        progress.step += 1
        progress.seconds += seconds + crew.agree(self.saving)
        self.saving = 0.0
        progress.rows += len(drawn.positions)
        self.watch.step(
            StepReport(progress, float(loss), float(norm), len(blocks.positions), len(pack.tokens), seconds)
        )

    def _learn(self, clean: Clean, blocks: Blocks, columns: Columns, alone: Tensor, normaliser: float) -> Tensor:
        """The loss of these blocks; their gradients are left in the tensors. Where memory is too small, this step and
        all later ones take fewer rows at once. Raises ConfigError where it does not hold a single block."""
        while True:
            try:
                return self._pass_by_pass(clean, blocks, columns, alone, normaliser)
            except torch.OutOfMemoryError:
                if self.rows_a_pass <= blocks.block:
                    raise ConfigError(
                        "the GPU's memory is full, even with one block at a time: free some of it"
                    ) from None
            # Behind the handler: in it the error would keep alive all that was computed.
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            self.rows_a_pass = max(blocks.block, min(self.rows_a_pass, len(blocks.positions)) // 2)
            self.watch.line(f"the GPU's memory is full: {self.rows_a_pass} mask rows at once from here on")

    def _pass_by_pass(self, clean: Clean, blocks: Blocks, columns: Columns, alone: Tensor, normaliser: float) -> Tensor:
        """The loss of these blocks, `rows_a_pass` at a time; their gradients are left in the tensors."""
        base, config = self.base, self.config
        loss = torch.zeros((), device=base.device)
        at_once = max(1, self.rows_a_pass // blocks.block)
        for first in range(0, len(blocks), at_once):
            part = blocks.part(first, min(first + at_once, len(blocks)))
            drafter = map_tensors(self.adapter, lambda tensor: tensor.to(base.dtype))
            drafted = run_masks(base, drafter, clean, part, config.within_block)
            drafted = run_slot_head(base, drafter, clean, part, drafted, alone[first : first + len(part)])
            wanted = part.target_rows, part.trained
            found = draft_loss(drafted, columns, clean.hidden, *wanted, config.loss, normaliser)
            found.backward()  # type: ignore[no-untyped-call]
            loss += found.detach()
        return loss


def learning_rate(config: TrainConfig, step: int, used: float) -> float:
    """Linear warm-up, then a cosine over the budget down to `final_share` of the highest."""
    cosine = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * used))
    return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup)) * cosine


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
