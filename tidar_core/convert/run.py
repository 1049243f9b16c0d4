"""`tidar convert`, from a checkpoint to a folder: gather its own words, train a drafter, write what came out.

Beside the folder that comes out lies `<out>.work`: `data` has the token shards, `training` the trainer's checkpoints.
The same command started again goes on from there. While it runs no other may use the folder or gather into its data.
"""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tidar_core.config import ConfigError
from tidar_core.convert.base import Base, in_fp32, load_base_weights, read_base
from tidar_core.convert.card import (
    check_folder,
    counts_of,
    kept_tokens_per_step,
    made_from,
    trained_steps,
    write_folder,
)
from tidar_core.convert.checkpoint import Progress, has_checkpoint
from tidar_core.convert.crew import ALONE, Crew
from tidar_core.convert.forward import frozen_base
from tidar_core.convert.full import FullConfig
from tidar_core.convert.full_folder import check_replaceable, full_steps, take_back
from tidar_core.convert.full_run import check_memory, train_full
from tidar_core.convert.gathering import gather
from tidar_core.convert.given import check_text
from tidar_core.convert.held_out import HeldOutResult, choose_windows, documents_to_measure
from tidar_core.convert.lock import alone_in
from tidar_core.convert.options import ConvertOptions, Screen, Train
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus, ShardStore, digest_of, read_header
from tidar_core.convert.speed import device_name, fast_dtype, measure_peak, work_per_row
from tidar_core.convert.spent import left_for_training
from tidar_core.convert.start import begin, check_start
from tidar_core.convert.trainer import (
    Budget,
    Origin,
    StepReport,
    TrainingData,
    Watch,
    check_documents,
    train_drafter,
)
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.model.adapter import WEIGHTS_FILE, shape_of
from tidar_core.model.dense import check_dense
from tidar_core.model.footprint import numbers_a_token
from tidar_core.model.sources import find_model
from tidar_core.model.weights import AdapterWeights
from tidar_core.transfer import choose_device, enough_memory


def train_gathered(options: ConvertOptions, spent: float, screen: Screen, crew: Crew = ALONE) -> Progress:
    """Trains a drafter on the documents that `convert` has gathered in `spent` seconds, and writes what came out.

    The workers of a crew each call it; the first writes, and tells the screen. Raises ConfigError, in one line, for
    what the user can mend.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    base = read_base(find_model(options.model), choose_device(options.device))
    corpus = ShardStore(options.shards, read_header(options.shards)).read().corpus
    _check_known(options, base, corpus)
    learnt, held_out = corpus.split()
    longest, block = base.config.max_positions, options.train.block
    anchors = anchor_counts(corpus, learnt.tolist(), block, longest)
    sampler = Sampler(corpus.document, anchors, longest, options.train.seed)
    most = documents_to_measure(base.device, numbers_a_token(base.source, base.config))
    windows = choose_windows(corpus, held_out.tolist(), block, longest, most)
    check_documents(sampler, windows, crew)  # before the weights are read, which may take minutes
    identity, weights = load_base_weights(base, options.dtype, screen)
    if crew.agree(fast_dtype(base.device, weights.embedding.dtype).itemsize) > weights.embedding.dtype.itemsize:
        screen.line(f"training in fp32: this processor is slow in {options.dtype}")
        weights = in_fp32(base, weights)
    frozen = frozen_base(base.config, weights, screen.line)
    config = options.train
    start, begun_from = begin(options, identity, weights, screen)
    _check_alike(options, corpus, f"{identity.fingerprint} {begun_from}", crew)
    if start.slot_head is not None:  # an adapter that it goes on from keeps the width of its own
        config = replace(config, slot_head=start.slot_head.out.shape[1])
    vocabulary = Vocabulary(corpus, weights.head, config.vocabulary)
    data = TrainingData(sampler, vocabulary, windows)
    budget = _budget(options, spent)
    work, peak = work_per_row(frozen, start, vocabulary.columns), measure_peak(base.device, frozen.dtype)
    made = made_from(identity, options.model, corpus, config, device_name(base.device, crew.size), begun_from)

    def kept(progress: Progress) -> None:
        progress.knows(kept_tokens_per_step(options.out))

    def stepped(report: StepReport) -> None:
        fraction = work.fraction(report.clean_rows, report.mask_rows, report.seconds, peak)
        screen.trained(report, budget.used(report.progress), fraction)

    def measured(result: HeldOutResult, adapter: AdapterWeights, progress: Progress, best: bool) -> None:
        screen.measured(result, progress, best)
        if best or not (options.out / WEIGHTS_FILE).exists():
            write_folder(options.out, made, adapter, progress, result)

    watch = Watch(stepped, measured, screen.line, kept) if crew.leads else Watch()
    directory = options.work / "training"
    if crew.leads and not has_checkpoint(directory):
        screen.line(f"measuring on {len(windows.documents)} held-out documents, then training")
    origin = Origin(identity.fingerprint, begun_from)
    return train_drafter(frozen, start, data, config, budget, directory, watch, crew, origin)


def convert(options: ConvertOptions, screen: Screen, train: Train = train_gathered) -> Progress:
    """Makes the drafter; `train` is how it is trained once the documents are there (`--mode full` has its own way).

    Raises ConfigError, in one line, for what the user can mend.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    source = find_model(options.model)
    if options.mode == "full":
        read = (source.directory, options.data, options.prompts, options.text)
        check_replaceable(options.out, [path for path in read if path is not None])
    else:
        check_folder(options.out)
        if options.shards.resolve().is_relative_to(options.out.resolve()):  # the next start would refuse such a folder
            raise ConfigError(f"{options.shards} lies in {options.out}: choose a folder outside of --out for --data")
    _check_result(options)
    base = read_base(source, device)
    if options.mode == "full" or options.generator == "transformers":
        parameters = check_dense(source)
        if options.mode == "full":
            check_memory(base, parameters)
    if options.mode == "adapter":
        check_start(options, shape_of(source.name, base.config, base.tokenizer))
    if options.text is not None:
        check_text(options.text)
    with alone_in(options.lock, "running", "--out"):  # before all that takes long
        if options.mode == "full":
            take_back(options.out)
        with alone_in(options.shards, "gathering", "--data"):
            stored, spent = gather(options, base, screen)
        gc.collect()
        screen.line(_counts_line(stored))
        if options.mode == "full":
            return _train_full(options, base, stored, spent, screen)
        del stored  # which `train` reads anew, perhaps elsewhere
        return train(options, spent, screen)


def _check_result(options: ConvertOptions) -> None:
    """Raises ConfigError where `out` holds the result of a training whose checkpoints are gone: a new training would
    replace it at once by something untrained."""
    adapter = options.mode == "adapter"
    steps = trained_steps(options.out) if adapter else full_steps(options.out)
    goes_on = adapter and Path(options.start).resolve() == options.out.resolve()
    if steps != 0 and not goes_on and not has_checkpoint(options.work / "training"):
        content = "a drafter" if steps is None else f"what {steps:,} steps have trained"
        instead = f", or go on from it with --start {options.out}" if adapter else ""
        raise ConfigError(
            f"{options.out} holds {content}, and the training itself is not in {options.work}: choose another "
            f"--out{instead}"
        )


def _counts_line(stored: Corpus) -> str:
    """How many documents there are, for the user."""
    learnt, held_out = counts_of(stored)
    return (
        f"{learnt.of_all_kinds:,} documents, {learnt.own_tokens:,} tokens to learn from; "
        f"{held_out.of_all_kinds:,} more, with {held_out.own_tokens:,} such tokens, are held out"
    )


def _train_full(options: ConvertOptions, base: Base, corpus: Corpus, spent: float, screen: Screen) -> Progress:
    """As `train_gathered`, for `--mode full`."""
    train, longest = options.train, min(FullConfig().longest, base.config.max_positions)
    config = FullConfig(
        block=train.block, within_block=train.within_block, learning_rate=train.learning_rate,
        tokens_a_step=train.rows_a_step or FullConfig().tokens_a_step, longest=longest, seed=train.seed,
        dtype=options.dtype, patience=train.patience,
    )  # fmt: skip
    # Documents go through the model one by one: how many make a step changes nothing.
    with enough_memory(f"training all weights of {base.source.name} wants more: take a smaller model, or a larger GPU"):
        return train_full(base, corpus, config, _budget(options, spent), options.out, options.work / "training", screen)


def _budget(options: ConvertOptions, spent: float) -> Budget:
    """What is left for training after `spent` seconds of gathering."""
    return Budget(options.steps, 0.0 if options.steps else left_for_training(options, spent))


def _check_alike(options: ConvertOptions, corpus: Corpus, known_by: str, crew: Crew) -> None:
    """Raises ConfigError where this worker reads other documents, or another model or start, than the first worker:
    their gradients would be added up all the same, and nobody would notice. known_by: stands for model and start."""
    if crew.size == 1:
        return
    mine = digest_of((corpus.tokens, corpus.own, corpus.ends, np.frombuffer(known_by.encode(), np.uint8)))
    if crew.agree_digest(mine) != mine:
        raise ConfigError(
            f"what lies in {options.shards}, the model or --start is not the same for all workers: put it where every "
            "node sees it, and let nobody gather into that folder while they start"
        )


def _check_known(options: ConvertOptions, base: Base, corpus: Corpus) -> None:
    """Raises ConfigError for tokens beyond the embedding: --data may be of a model that has the same tokenizer, and
    more rows for it."""
    rows, highest = base.config.vocab_size, int(corpus.tokens.max(initial=0))
    if highest >= rows:
        raise ConfigError(
            f"{options.shards} holds token {highest:,}, and {base.source.name} has {rows:,} of them: choose another "
            "--data, or delete this one"
        )
