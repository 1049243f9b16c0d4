"""`tidar convert --mode full`: from a checkpoint and a text to full TiDAR weights that serve themselves.

The folder that comes out is a checkpoint in transformers' layout with `tidar.json` beside it (`model.contract`).
The whole model with its optimizer has to fit the device: 16 bytes a parameter and the activations of one document. A
checkpoint takes 12 bytes a parameter more of the host's memory while it is written, and as many again where the device
is a GPU.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError
from tidar_core.convert.checkpoint import SETTLED, Progress, resume_training, save_training
from tidar_core.convert.full import FullConfig, FullDrafts, FullTraining, judged_blocks, measure_full
from tidar_core.convert.full_folder import kept_tokens_per_step, part_of, remove, replace_folder
from tidar_core.convert.options import Screen
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.shards import Corpus, cannot_write, digest_of, system_error
from tidar_core.convert.trainer import CHECKPOINT_SECONDS, Budget
from tidar_core.model.configuration import load_config
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter
from tidar_core.model.dense import dense_model
from tidar_core.model.loading import check_tensors
from tidar_core.model.sources import ModelSource

MASK_TOKEN = "<|mask|>"
HELD_OUT_DOCUMENTS = 24
MEASURE_SHARE = 0.1  # of the time, at most
LEAST_TOKENS = 16


def train_full(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    config: FullConfig,
    budget: Budget,
    patience: int,
    device: torch.device,
    out: Path,
    work: Path,
    screen: Screen,
) -> Progress:
    """Trains from the checkpoint, or from where an earlier run stopped; the best model so far is in `out`.

    Raises ConfigError where there is nothing to learn from, where weights are missing, where the loss is not a number
    and on a full disk.
    """
    learnt, held = corpus.split()
    taught = {index: taught_by(*corpus.document(index), config.longest) for index in learnt.tolist()}
    sampler = Sampler(corpus.document, taught, config.longest, config.seed)
    judged = [
        (tokens[: config.longest], own[: config.longest])
        for tokens, own in (corpus.document(int(index)) for index in held[:HELD_OUT_DOCUMENTS])
        if judged_blocks(own[: config.longest], config.block)
    ]
    if not len(sampler) or not judged:
        raise ConfigError("the data are too few documents to learn from and be measured on: give more --text")
    check_tensors(source, load_config(source))  # transformers would make up what is missing
    model = dense_model(source, torch.float32, attn_implementation="sdpa")
    mask = add_mask(model, tokenizer)
    training = FullTraining(model.to(device), mask, config, sampler)
    resume(training, work, out, screen)
    progress, measured_at, measuring, saved = training.progress, -1.0, 0.0, time.monotonic()
    # Of a text all is its own: what was measured of it before that was told apart holds.
    parts = [(tokens,) if own[1:].all() else (tokens, own) for tokens, own in judged]
    progress.measured_on(digest_of(column for part in parts for column in part))
    progress.goes_on(budget.used(progress))
    while True:
        used, kept = budget.used(progress), False
        if used >= 1.0 or measured_at < 0 or progress.seconds - measured_at > max(30.0, measuring / MEASURE_SHARE):
            began, before = time.monotonic(), progress.seconds
            found, best = measure(training, judged, screen, counts=measured_at >= 0 and used >= SETTLED)
            if kept := best and progress.step > 0:  # first: of a model in `out` that no checkpoint has nothing goes on
                saved = save(training, work)
            if best or not (out / CONTRACT_FILE).exists():
                write_model(training, out, tokenizer, source, found, len(judged))
            measuring = time.monotonic() - began - (progress.seconds - before)  # what the checkpoint took is counted
            progress.seconds += measuring
            measured_at = progress.seconds
        over = used >= 1.0 or progress.stale >= patience
        if over and not kept:
            saved = save(training, work)
        if over:
            return progress
        screen.trained(training.step(used), budget.used(progress), None)
        if time.monotonic() - saved >= CHECKPOINT_SECONDS:
            saved = save(training, work)


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


def measure(
    training: FullTraining,
    documents: list[tuple[np.ndarray, np.ndarray]],
    screen: Screen,
    counts: bool = True,
) -> tuple[FullDrafts, bool]:
    """What drafts are worth on held-out documents, and whether this is the best model so far.

    counts: whether a measurement without gain brings the training's end nearer; the first of a run does not, nor those
    before the learning rate falls.
    """
    progress = training.progress
    training.model.eval()
    found = measure_full(training.model, documents, training.mask, training.config)
    training.model.train()
    best = found.tokens_per_step > progress.best  # for one as good as the best a whole model is not written again
    progress.take(found.tokens_per_step, counts)
    screen.line(
        f"step {progress.step:,}: {found.tokens_per_step:.3f} tokens per step on {len(documents)} held-out documents"
        f"{', kept' if best else ''}"
    )
    return found, best


def state_dtype(config: Path, dtype: str) -> None:
    """Writes into a config.json what the weights beside it are in: transformers writes what they are trained in."""
    stated = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**stated, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def write_model(
    training: FullTraining,
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    source: ModelSource,
    drafts: FullDrafts,
    documents: int,
) -> None:
    """The checkpoint in bf16, its contract and a card; the folder is replaced as a whole (`full_folder`).

    Raises ConfigError where it cannot be written.
    """
    config, progress = training.config, training.progress
    record = {
        "base": source.name,
        "steps": progress.step,
        "tokens_per_step": round(drafts.tokens_per_step, 4),
        "held_out_documents": documents,
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
        # Not its state: that names a tied head beside the embedding, and in another dtype these are two tensors.
        named = zip(training.names, training.tensors, strict=True)
        weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in named}
        # By these experts are chosen: no gradient reaches them, and in some models they are no parameters.
        state = training.model.state_dict().items()
        weights |= {name: tensor for name, tensor in state if name.endswith("e_score_correction_bias")}
        training.model.save_pretrained(part, state_dict=weights)
        state_dtype(part / "config.json", "bfloat16")
        tokenizer.save_pretrained(part)
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


def resume(training: FullTraining, work: Path, out: Path, screen: Screen) -> None:
    """From the last checkpoint in `work`, where there is one."""
    found = resume_training(work, training.settings, training.names, training.tensors, training.optimizer, screen.line)
    if found is not None:
        found.knows(kept_tokens_per_step(out))
        training.progress = found


def save(training: FullTraining, work: Path) -> float:
    """Writes a checkpoint, whose time counts: it has all of the model and its moments. Gives the moment that it was
    done."""
    began = time.monotonic()
    save_training(work, training.settings, training.progress, training.names, training.tensors, training.optimizer)
    done = time.monotonic()
    training.progress.seconds += done - began
    return done
