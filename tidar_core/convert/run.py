"""`tidar convert`, from a checkpoint to a folder: gather its own words, train a drafter, write what came out.

Beside the folder that comes out lies `<out>.work`: `data` has the token shards, `training` the trainer's checkpoints.
The same command started again goes on from there. While it runs no other may use the folder or gather into its data.
"""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert.base import Base, load_base_weights, read_base
from tidar_core.convert.card import (
    check_folder,
    counts_of,
    kept_tokens_per_step,
    made_from,
    trained_steps,
    write_folder,
)
from tidar_core.convert.checkpoint import Progress, has_checkpoint
from tidar_core.convert.conversations import DocumentPlan
from tidar_core.convert.crew import ALONE, Crew
from tidar_core.convert.forward import frozen_base
from tidar_core.convert.full import FullConfig
from tidar_core.convert.full_folder import check_replaceable, full_steps, take_back
from tidar_core.convert.full_run import train_full
from tidar_core.convert.given import check_text, read_prompts
from tidar_core.convert.growing import waits_to_be_cut
from tidar_core.convert.held_out import HeldOutResult, choose_windows
from tidar_core.convert.lock import alone_in
from tidar_core.convert.options import ConvertOptions, Screen, Train
from tidar_core.convert.own_words import (
    DRAIN_SHARE,
    Goal,
    add_text,
    gather_own_words,
    sort_prompts,
    unanswered,
)
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus, DataHeader, ShardStore, digest_of, open_store, read_header
from tidar_core.convert.sources import EngineSource, TextSource, TransformersSource
from tidar_core.convert.speed import device_name, fast_dtype, measure_peak, work_per_row
from tidar_core.convert.start import begin, check_start
from tidar_core.convert.template import can_chat
from tidar_core.convert.trainer import Budget, Origin, StepReport, Watch, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.engine import load_engine
from tidar_core.model.adapter import WEIGHTS_FILE, shape_of, tokenizer_fingerprint
from tidar_core.model.dense import check_dense, dense_model
from tidar_core.model.sources import find_model
from tidar_core.model.weights import AdapterWeights, widened
from tidar_core.transfer import choose_device, enough_memory

TEXT_LONGEST = 512  # tokens of a document from a file
GATHER_SHARE = 0.45  # of the time, where no number of tokens is asked for
LEAST_TRAINING = 0.1
CAPACITY = {"cpu": 64, "cuda": 768}  # answers generated at once
STEP_ROWS = {"cpu": 512, "cuda": 8192}


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
    identity, weights = load_base_weights(base, options.dtype, screen)
    if crew.agree(fast_dtype(base.device, weights.embedding.dtype).itemsize) > weights.embedding.dtype.itemsize:
        screen.line(f"training in fp32: this processor is slow in {options.dtype}")
        weights = widened(weights)
    frozen = frozen_base(base.config, weights, screen.line)
    config = options.train
    start, begun_from = begin(options, identity, weights, screen)
    _check_alike(options, corpus, f"{identity.fingerprint} {begun_from}", crew)
    if start.slot_head is not None:  # that of an adapter it goes on from is as wide as it is
        config = replace(config, slot_head=start.slot_head.out.shape[1])
    learnt, held_out = corpus.split()
    longest = base.config.max_positions
    anchors = anchor_counts(corpus, learnt.tolist(), config.block, longest)
    sampler = Sampler(corpus.document, anchors, longest, config.seed)
    vocabulary = Vocabulary(corpus, weights.head, config.vocabulary)
    windows = choose_windows(corpus, held_out.tolist(), config.block, longest)
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
    origin = Origin(identity.fingerprint, begun_from)
    return train_drafter(frozen, start, sampler, vocabulary, windows, config, budget, directory, watch, crew, origin)


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
        if options.shards.resolve().is_relative_to(options.out.resolve()):  # which would then hold something else
            raise ConfigError(f"{options.shards} lies in {options.out}: choose a folder outside of --out for --data")
    _check_result(options)
    base = read_base(source, device)
    if options.mode == "full" or options.generator == "transformers":
        check_dense(source)
    if options.mode == "adapter":
        check_start(options, shape_of(source.name, base.config, base.tokenizer))
    if options.text is not None:
        check_text(options.text)
    with alone_in(options.lock, "running", "--out"):  # before all that takes long
        if options.mode == "full":
            take_back(options.out)
        with alone_in(options.shards, "gathering", "--data"):
            stored, spent = _gather(options, base, screen)
        gc.collect()
        screen.line(_counts_line(stored))
        if options.mode == "full":
            return _train_full(options, base, stored, spent, screen)
        del stored  # which `train` reads anew, perhaps elsewhere
        return train(options, spent, screen)


def _check_result(options: ConvertOptions) -> None:
    """Raises ConfigError where `out` holds what a training made that is gone: one that begins anew would at once put
    something untrained in its place."""
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
    learnt, held_out = counts_of(stored)
    return (
        f"{learnt.of_all_kinds:,} documents, {learnt.own_tokens:,} tokens to learn from; "
        f"{held_out.of_all_kinds:,} more, with {held_out.own_tokens:,} such tokens, are held out"
    )


def _gather(options: ConvertOptions, base: Base, screen: Screen) -> tuple[Corpus, float]:
    """The documents, and the seconds spent on generating them."""
    source, tokenizer = base.source, base.tokenizer
    goal = Goal(options.own_tokens, 0.0 if options.own_tokens else GATHER_SHARE * 60 * options.minutes)
    prompts = read_prompts(options.prompts) if options.prompts else []
    plan = DocumentPlan(options.train.seed, can_chat(tokenizer), answer_tokens=options.answer_tokens)
    plan = plan.within(base.config.max_positions)
    header = DataHeader(
        model=source.name, fingerprint="", tokenizer=tokenizer_fingerprint(tokenizer), seed=options.train.seed
    )
    store = open_store(options.shards, header)
    for note in store.notes:
        screen.line(note)
    text_alone = options.mode == "full" and options.text and not options.own_tokens and not prompts
    if prompts:
        screen.line(f"reading {options.prompts}")
        prompts = unanswered(tokenizer, prompts, store.read())
        found = sort_prompts(tokenizer, plan, prompts)
        prompts = found.fitting
        if found.too_long:
            room = f"longer than the {plan.longest - plan.answer_tokens:,} tokens that documents have for one"
            if plan.longest < base.config.max_positions:
                room += "; --answer-tokens of at least their length makes room"
            screen.line(f"{found.too_long:,} of --prompts left out: {room}")
        if found.refused:
            screen.line(f"{found.refused:,} of --prompts left out: the chat template refuses them")
    if text_alone or (not prompts and _has_all(goal, store)):
        if not text_alone and store.header.model != source.name:
            screen.line(f"{options.shards} holds the words of {store.header.model}: they are trained on as they are")
        _add_text(options, base, store, screen)
        stored = store.read()
        return stored.corpus, 0.0 if text_alone else stored.seconds
    store.check_seed(options.train.seed)
    _add_text(options, base, store, screen)
    generator, fingerprint = _source(options, base, plan, screen)
    if options.mode == "adapter":  # again: only now is it known which weights these are
        check_start(options, shape_of(source.name, base.config, tokenizer, fingerprint))
    if note := store.words_come_from(header.model_copy(update={"fingerprint": fingerprint})):
        screen.line(note)
    gathered = gather_own_words(
        generator, tokenizer, plan, store, goal, prompts, lambda now: screen.gathered(now, goal)
    )
    if gathered.refused:
        screen.line(f"{gathered.refused:,} of --prompts taught nothing: answered in a word or two")
    if gathered.useless:
        screen.line("the model's own words are of no use: it learns from what else there is")
    return store.read().corpus, gathered.seconds


def _add_text(options: ConvertOptions, base: Base, store: ShardStore, screen: Screen) -> None:
    """The user's text goes into the data directory, as far as it is not there yet."""
    if options.text is None:
        return
    screen.line(f"reading {options.text}")
    added = add_text(base.tokenizer, options.text, store, TEXT_LONGEST, base.config.vocab_size)
    if added.documents:
        screen.line(f"{added.documents:,} documents from {options.text.name}")
    if added.unknown:
        screen.line(
            f"{added.unknown:,} more were left out: they hold tokens that {base.source.name} has no embedding for"
        )


def _has_all(goal: Goal, store: ShardStore) -> bool:
    """Whether the goal is reached, and nothing waits to be taken up."""
    stored = store.read()
    enough = bool(goal.own_tokens) and stored.corpus.generated_tokens() >= goal.own_tokens
    over = bool(goal.seconds) and stored.seconds >= (1 - DRAIN_SHARE) * goal.seconds
    return (enough or over) and not waits_to_be_cut(store.directory, stored.done)


def _source(options: ConvertOptions, base: Base, plan: DocumentPlan, screen: Screen) -> tuple[TextSource, str]:
    """What generates the text, and the fingerprint of its weights."""
    capacity = CAPACITY.get(base.device.type, 64)
    if options.generator == "engine":
        adapter = "default" if options.start == "none" else options.start
        gc.collect()
        gc.freeze()  # what is loaded by now stays: else the collector walks through all of it between the steps
        engine = load_engine(
            EngineConfig(
                options.model, adapter, options.dtype, options.device, options.threads,
                max_model_len=plan.longest, max_running=capacity, step_rows=STEP_ROWS.get(base.device.type, 512),
            ),
            screen.line,
            screen.loading,
        )  # fmt: skip
        return EngineSource(engine, capacity), engine.info.fingerprint
    # Of the weights the fingerprint alone is kept: they are gone before transformers reads them once more.
    fingerprint = load_base_weights(base, options.dtype, screen)[0].fingerprint
    screen.line("generating with transformers")
    dtype = fast_dtype(base.device, getattr(torch, options.dtype))
    with enough_memory("it does not hold what transformers generates with, leave --generator out"):
        model = dense_model(base.source, dtype).to(base.device).eval()
    return TransformersSource(model, base.tokenizer, base.config.eos_ids, capacity, plan.longest), fingerprint


def _train_full(options: ConvertOptions, base: Base, corpus: Corpus, spent: float, screen: Screen) -> Progress:
    train, longest = options.train, min(FullConfig().longest, base.config.max_positions)
    config = FullConfig(
        block=train.block, within_block=train.within_block, learning_rate=train.learning_rate,
        tokens_a_step=train.rows_a_step or FullConfig().tokens_a_step, longest=longest, seed=train.seed,
        dtype=options.dtype, patience=train.patience,
    )  # fmt: skip
    with enough_memory(
        f"training all weights of {base.source.name} wants more, or lower --rows (now {config.tokens_a_step})"
    ):
        return train_full(base, corpus, config, _budget(options, spent), options.out, options.work / "training", screen)


def _budget(options: ConvertOptions, spent: float) -> Budget:
    seconds = max(60 * options.minutes - spent, LEAST_TRAINING * 60 * options.minutes)
    return Budget(options.steps, 0.0 if options.steps else seconds)


def _check_alike(options: ConvertOptions, corpus: Corpus, known_by: str, crew: Crew) -> None:
    """Raises ConfigError where this worker reads others than the first does: each learns its part of what all draw, so
    that parts of different things would be put together, and nobody saw it. known_by: stands for model and start."""
    if crew.size == 1:
        return
    mine = digest_of((corpus.tokens, corpus.own, corpus.ends, np.frombuffer(known_by.encode(), np.uint8)))
    if crew.agree(int(mine, 16)) != int(mine, 16):  # exact: a double holds its 48 bits
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
