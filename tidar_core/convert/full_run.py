"""`tidar convert --mode full`: from a checkpoint and a text to full TiDAR weights that serve themselves.

The folder that comes out is a checkpoint in transformers' layout with `tidar.json` beside it (`model.contract`).
The whole model with its optimizer has to fit the device: 16 bytes a parameter and the activations of one document. A
checkpoint, for which the gradients are gone, takes 12 bytes a parameter more of the host's memory while it is written,
and as many again where the device is a GPU.
"""

import json
import math
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError
from tidar_core.convert.base import Base
from tidar_core.convert.checkpoint import Progress, resume_training, save_training
from tidar_core.convert.ending import end_put_off, unseen
from tidar_core.convert.files import cannot_write, system_error
from tidar_core.convert.full import FullConfig, FullDrafts, FullTraining, judged_blocks, measure_full
from tidar_core.convert.full_folder import kept_tokens_per_step, part_of, remove, replace_folder
from tidar_core.convert.options import Screen
from tidar_core.convert.pace import Pace, SavePace
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.shards import Corpus, digest_of
from tidar_core.convert.trainer import Budget
from tidar_core.memory import GIB, free_memory_and_swap
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter
from tidar_core.model.dense import dense_model

MASK_TOKEN = "<|mask|>"
HELD_OUT_DOCUMENTS = 24
MEASURE_SECONDS, MEASURE_SHARE = 30.0, 0.1  # see `Pace`; to write the best model is part of measuring
LEAST_TOKENS = 16
# Of a parameter: it, its gradient and two moments in fp32; all but the gradient, copied for the checkpoint.
BYTES_IN_TRAINING, BYTES_ON_THE_HOST = 16, 24


@dataclass(frozen=True, slots=True)
class FullRun:
    """One run of a full training. judged: the held-out documents (tokens, own) that it is measured on. out: the folder
    that has the best model so far; work: the one with the checkpoints, and saves when they are due."""

    base: Base
    training: FullTraining
    judged: list[tuple[np.ndarray, np.ndarray]]
    out: Path
    work: Path
    screen: Screen
    saves: SavePace = field(default_factory=lambda: SavePace(time.monotonic()))

    @property
    def judged_on(self) -> str:
        """Stands for the documents that are measured on: other documents, or parts of them, give another."""
        # Earlier versions digested tokens alone: what they measured on documents that are learnt from as a whole holds.
        parts = [(tokens,) if own[1:].all() else (tokens, own) for tokens, own in self.judged]
        return digest_of(column for part in parts for column in part)


def train_full(
    base: Base, corpus: Corpus, config: FullConfig, budget: Budget, out: Path, work: Path, screen: Screen
) -> Progress:
    """Trains from the checkpoint, or from where an earlier run stopped; the best model so far is in `out`.

    Raises ConfigError where there is nothing to learn from, where weights are missing, where the loss is not a number
    and on a full disk.
    """
    run = begin(base, corpus, config, out, work, screen)
    training, progress = run.training, run.training.progress
    progress.goes_on(budget.used(progress))
    pace = Pace(MEASURE_SECONDS, MEASURE_SHARE, measured_at=-math.inf)  # so that each run begins with a measurement
    kept = False
    with end_put_off() as asked:
        with unseen(asked):
            while not asked():
                used = budget.used(progress)
                if used >= 1.0 or pace.due(progress):
                    kept = look(run, pace, used)
                if used >= 1.0 or progress.stale >= config.patience or asked():
                    break
                kept = False
                screen.trained(training.step(used), budget.used(progress), None)
                if not asked() and run.saves.due(time.monotonic()):
                    save(run)
        if not kept:
            save(run)
    return progress


def check_memory(base: Base, parameters: int) -> None:
    """Raises ConfigError where so many parameters plainly cannot be trained: the system would end this process hours
    later. The host's free swap counts as memory; activations are not counted."""
    places: list[tuple[str, int, int]] = []
    if base.device.type == "cuda":
        places.append(("the GPU's memory", BYTES_IN_TRAINING, torch.cuda.mem_get_info(base.device)[0]))
    if not psutil.MACOS:  # which lends as much of its disk as is needed
        places.append(("memory", BYTES_ON_THE_HOST, free_memory_and_swap()))
    for place, each, free in places:
        if parameters * each > free:
            raise ConfigError(
                f"to train all {parameters:,} weights of {base.source.name} takes {parameters * each / GIB:.1f} GiB of "
                f"{place}, and {free / GIB:.1f} GiB are free: free some, or take a smaller model"
            )


def begin(base: Base, corpus: Corpus, config: FullConfig, out: Path, work: Path, screen: Screen) -> FullRun:
    """What a run needs, where the last one stopped. Raises ConfigError as `train_full`."""
    learnt, held_out = corpus.split()
    taught = {index: taught_by(*corpus.document(index), config.longest) for index in learnt.tolist()}
    sampler = Sampler(corpus.document, taught, config.longest, config.seed)
    judged = [
        (tokens[: config.longest], own[: config.longest])
        for tokens, own in (corpus.document(int(index)) for index in held_out[:HELD_OUT_DOCUMENTS])
        if judged_blocks(own[: config.longest], config.block)
    ]
    if not len(sampler) or not judged:
        raise ConfigError("the data are too few documents to learn from and be measured on: give more --text")
    model = dense_model(base.source, torch.float32, attn_implementation="sdpa")
    mask = add_mask(model, base.tokenizer)
    run = FullRun(base, FullTraining(model.to(base.device), mask, config, sampler), judged, out, work, screen)
    resume(run)
    run.training.progress.compare_on(run.judged_on)
    return run


def look(run: FullRun, pace: Pace, used: float) -> bool:
    """Measures the model and keeps the best: first a checkpoint of it, then the model itself in `out`, since from a
    model in `out` that no checkpoint has nothing could go on. used: the share of the budget.

    Gives whether the checkpoint was written.
    """
    progress = run.training.progress
    began, before = time.monotonic(), progress.seconds
    drafts, best = measure(run, pace.counts(used))
    kept = best and progress.step > 0
    if kept:
        save(run)
    if best or not (run.out / CONTRACT_FILE).exists():
        write_model(run, drafts)
    pace.measured(progress, time.monotonic() - began, counted=progress.seconds - before)
    return kept


def taught_by(tokens: np.ndarray, own: np.ndarray, longest: int) -> int:
    """Tokens to learn behind the first of a document; none where that is too short."""
    return int(own[1:longest].sum()) if len(tokens) >= LEAST_TOKENS else 0


def add_mask(model: Any, tokenizer: PreTrainedTokenizerFast) -> int:
    """The mask's id: a new special token, in a row of the embedding that no token has yet where there is one."""
    tokenizer.add_tokens([MASK_TOKEN], special_tokens=True)
    mask = int(tokenizer.get_vocab()[MASK_TOKEN])
    if mask >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(mask + 1, pad_to_multiple_of=64)
    return mask


def measure(run: FullRun, counts: bool) -> tuple[FullDrafts, bool]:
    """What drafts are worth on held-out documents, and whether this is the best model so far. counts: see `Pace`."""
    training, progress = run.training, run.training.progress
    training.model.eval()
    found = measure_full(training.model, run.judged, training.mask, training.config)
    training.model.train()
    best = found.tokens_per_step > progress.best  # for one as good as the best a whole model is not written again
    progress.take(found.tokens_per_step, run.judged_on, counts)
    run.screen.line(
        f"step {progress.step:,}: {found.tokens_per_step:.3f} tokens per step on {len(run.judged)} held-out documents"
        f"{', kept' if best else ''}"
    )
    return found, best


def state_dtype(config: Path, dtype: str) -> None:
    """Writes the weights' dtype into the config.json beside them: transformers writes the one they are trained in."""
    stated = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**stated, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def write_model(run: FullRun, drafts: FullDrafts) -> None:
    """The checkpoint in bf16, its contract and a card; the folder is replaced as a whole (`full_folder`).

    Raises ConfigError where it cannot be written.
    """
    training, out = run.training, run.out
    config, progress = training.config, training.progress
    record = {
        "base": run.base.source.name,
        "steps": progress.step,
        "tokens_per_step": round(drafts.tokens_per_step, 4),
        "held_out_documents": len(run.judged),
        **config.settings(),
    }
    contract = OwnDrafter(
        mask_token_id=training.mask,
        block_length=config.block,
        within_block=config.within_block,
        holds=tuple(round(share, 3) for share in drafts.holds),
        training=record,
    )
    part = part_of(out)
    try:
        remove(part)
        part.mkdir(parents=True)
        (part / CONTRACT_FILE).write_text(contract.model_dump_json(indent=2) + "\n", encoding="utf-8")
        # By its parameters: its state has a tied head beside the embedding, and as bf16 copies these are two tensors.
        named = zip(training.names, training.tensors, strict=True)
        weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in named}
        # What experts are chosen by gets no gradient, and is no parameter in some models.
        state = training.model.state_dict().items()
        weights |= {name: tensor for name, tensor in state if name.endswith("e_score_correction_bias")}
        training.model.save_pretrained(part, state_dict=weights)
        state_dtype(part / "config.json", "bfloat16")
        run.base.tokenizer.save_pretrained(part)
        (part / "README.md").write_text(_card(out.name, record), encoding="utf-8")
        replace_folder(out)
    except Exception as error:  # the tokenizer's library raises nothing more exact
        remove(part)
        if isinstance(error, OSError | SafetensorError) or system_error(error) is not None:
            raise cannot_write(out, error) from None
        raise


def _card(name: str, record: dict[str, Any]) -> str:
    return (
        f"# {name}\n\nFull TiDAR weights made from {record['base']}: one set of weights verifies and drafts (arXiv "
        f"2511.08923). It is another model than its base: texts differ.\n\n"
        f"Measured: {record['tokens_per_step']} tokens per step (greedy, block {record['block']}, "
        f"{record['held_out_documents']} held-out documents, {record['steps']} optimizer steps): a mean over "
        "blocks one behind the other. Decoding begins a block where a draft failed, and may gain less.\n\n"
        f"    {shlex.join(['tidar', 'up', '--model', name])}\n\n"
        f"`{CONTRACT_FILE}` names the mask token and the block length.\n"
    )


def resume(run: FullRun) -> None:
    """Goes on from the last checkpoint in `work`, where there is one."""
    training = run.training
    found = resume_training(
        run.work, training.settings, training.names, training.tensors, training.optimizer, run.screen.line
    )
    if found is not None:
        found.knows(kept_tokens_per_step(run.out))
        training.progress = found


def save(run: FullRun) -> None:
    """Writes a checkpoint of the whole model and its moments. The seconds it took count as training."""
    began, training = time.monotonic(), run.training
    save_training(run.work, training.settings, training.progress, training.names, training.tensors, training.optimizer)
    training.progress.seconds += run.saves.saved(began, time.monotonic())
