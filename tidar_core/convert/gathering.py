"""The documents of a conversion, gathered: the user's text, the user's prompts answered, the model's own words."""

import gc
from dataclasses import dataclass

import torch

from tidar_core.config import EngineConfig
from tidar_core.convert.base import Base, load_base_weights
from tidar_core.convert.conversations import DocumentPlan
from tidar_core.convert.given import read_prompts
from tidar_core.convert.options import ConvertOptions, Screen
from tidar_core.convert.own_words import (
    DRAIN_SHARE,
    GatherProgress,
    Goal,
    add_text,
    cut_growing,
    gather_own_words,
    sort_prompts,
    unanswered,
)
from tidar_core.convert.shards import Corpus, DataHeader, ShardStore, open_store
from tidar_core.convert.sources import EngineSource, TextSource, TransformersSource
from tidar_core.convert.speed import fast_dtype
from tidar_core.convert.spent import Spent, left_for_training, most_gathering
from tidar_core.convert.start import check_start
from tidar_core.convert.template import can_chat
from tidar_core.engine import load_engine
from tidar_core.model.adapter import shape_of, tokenizer_fingerprint
from tidar_core.model.dense import dense_model
from tidar_core.transfer import enough_memory

TEXT_LONGEST = 512  # tokens of a document from a file
GATHER_SHARE = 0.45  # of the time, where no number of tokens is asked for
CAPACITY = {"cpu": 64, "cuda": 768}  # answers generated at once
SPEECHLESS = (
    "nearly all of the model's conversations with itself come to nothing, as where its chat template does not suit: "
    "it learns from code and prose that it goes on with; --prompts FILE gives it questions to answer"
)
STEP_ROWS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class _Gathering:
    """What gathering is about: for whom, with which model, which documents, and where they are kept."""

    options: ConvertOptions
    base: Base
    plan: DocumentPlan
    store: ShardStore
    screen: Screen


def gather(options: ConvertOptions, base: Base, screen: Screen) -> tuple[Corpus, float]:
    """The documents, and the seconds that this conversion spent on generating them. What is stored already is not made
    again, and no model is loaded where nothing has to be generated.

    Raises ConfigError, in one line, for what the user can mend.
    """
    given = read_prompts(options.prompts) if options.prompts else []
    plan = DocumentPlan(options.train.seed, can_chat(base.tokenizer), answer_tokens=options.answer_tokens)
    plan = plan.within(base.config.max_positions)
    header = DataHeader(
        model=base.source.name, fingerprint="", tokenizer=tokenizer_fingerprint(base.tokenizer), seed=options.train.seed
    )
    store = open_store(options.shards, header)
    for note in store.notes:
        screen.line(note)
    gathering = _Gathering(options, base, plan, store, screen)
    in_store = store.read().seconds
    spent = Spent(options, in_store)
    spent.add(0.0)  # so that the next start finds its file, however little is gathered
    goal = Goal(seconds=GATHER_SHARE * 60 * options.minutes)  # what others have gathered need not be gathered again
    if options.own_tokens:
        limit = 0.0 if options.steps else most_gathering(options)  # nobody chose a time where steps are counted
        goal = Goal(options.own_tokens, limit, max(0.0, in_store - spent.seconds))
    text_alone = bool(options.mode == "full" and options.text and not options.own_tokens and not given)
    prompts = _to_be_asked(gathering, given) if given else []
    if text_alone or (not prompts and _has_all(goal, store)):
        if not text_alone and store.header.model != base.source.name:
            screen.line(f"{options.shards} holds the words of {store.header.model}: they are trained on as they are")
        if not text_alone and (store.header.model, store.header.seed) == (header.model, header.seed):
            cut_growing(base.tokenizer, plan, store)
        _add_text(gathering)
        useful = True
    else:
        store.check_seed(options.train.seed)
        _add_text(gathering)
        useful = _generate(gathering, header, goal, prompts, spent)
    corpus = store.read().corpus
    if useful and (there := corpus.generated_tokens()) < goal.own_tokens:
        screen.line(
            f"{there:,} of {goal.own_tokens:,} tokens are there, and the time for gathering is over: with more "
            "--minutes the same command gathers the rest"
        )
    if spent.seconds and not options.steps:
        screen.line(
            f"gathering took {spent.seconds / 60:.1f} min: {left_for_training(options, spent.seconds) / 60:.1f} min of "
            "--minutes are for training"
        )
    return corpus, spent.seconds


def _to_be_asked(gathering: _Gathering, given: list[str]) -> list[str]:
    """Those of the given prompts that have no answer yet and can have one; the user is told how many cannot."""
    base, plan, screen = gathering.base, gathering.plan, gathering.screen
    screen.line(f"reading {gathering.options.prompts}")
    found = sort_prompts(base.tokenizer, plan, unanswered(base.tokenizer, given, gathering.store.read()))
    if found.too_long:
        room = f"longer than the {plan.longest - plan.answer_tokens:,} tokens that documents have for one"
        if plan.longest < base.config.max_positions:
            room += "; --answer-tokens of at least their length makes room"
        screen.line(f"{found.too_long:,} of --prompts left out: {room}")
    if found.refused:
        screen.line(f"{found.refused:,} of --prompts left out: the chat template refuses them")
    return found.fitting


def _generate(gathering: _Gathering, header: DataHeader, goal: Goal, prompts: list[str], spent: Spent) -> bool:
    """Loads the generator, has it answer the prompts and write its own words. Gives whether these are of any use."""
    options, base, store, screen = gathering.options, gathering.base, gathering.store, gathering.screen
    generator, fingerprint = _generator(gathering)
    if options.mode == "adapter":  # again: only now is it known which weights these are
        check_start(options, shape_of(base.source.name, base.config, base.tokenizer, fingerprint))
    if note := store.words_come_from(header.model_copy(update={"fingerprint": fingerprint})):
        screen.line(note)
    told = False

    def show(now: GatherProgress) -> None:
        nonlocal told
        screen.gathered(now, goal)
        if now.speechless and not told:
            screen.line(SPEECHLESS)
            told = True

    gathered = gather_own_words(generator, base.tokenizer, gathering.plan, store, goal, prompts, show, spent.add)
    if gathered.refused:
        screen.line(f"{gathered.refused:,} of --prompts taught nothing: answered in a word or two")
    if gathered.useless:
        screen.line("the model's own words are of no use: it learns from what else there is")
    elif gathered.speechless and not told:
        screen.line(SPEECHLESS)
    return not gathered.useless


def _add_text(gathering: _Gathering) -> None:
    """The user's text goes into the data directory, as far as it is not there yet."""
    options, base, screen = gathering.options, gathering.base, gathering.screen
    if options.text is None:
        return
    screen.line(f"reading {options.text}")
    added = add_text(base.tokenizer, options.text, gathering.store, TEXT_LONGEST, base.config.vocab_size)
    if added.documents:
        screen.line(f"{added.documents:,} documents from {options.text.name}")
    if added.unknown:
        screen.line(
            f"{added.unknown:,} more were left out: they hold tokens that {base.source.name} has no embedding for"
        )


def _has_all(goal: Goal, store: ShardStore) -> bool:
    """Whether the goal is reached, so that nothing more would be generated."""
    stored = store.read()
    enough = bool(goal.own_tokens) and stored.corpus.generated_tokens() >= goal.own_tokens
    over = bool(goal.seconds) and stored.seconds - goal.elsewhere >= (1 - DRAIN_SHARE) * goal.seconds
    return enough or over


def _generator(gathering: _Gathering) -> tuple[TextSource, str]:
    """What generates the text, and the fingerprint of its weights."""
    options, base, plan, screen = gathering.options, gathering.base, gathering.plan, gathering.screen
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
