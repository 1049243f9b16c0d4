"""Fills a data directory: the user's text as it stands, the user's prompts answered, then the model's own words."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError
from tidar_core.convert.conversations import (
    LEAST_OWN_TOKENS,
    Conversation,
    DocumentPlan,
    Job,
    Wish,
    plan_job,
    prompt_job,
)
from tidar_core.convert.given import read_text
from tidar_core.convert.growing import Growing, growing_of, read_growing, take_up, write_growing
from tidar_core.convert.shards import Document, ShardStore, Stored, content_key, prompt_number
from tidar_core.convert.sources import TextSource
from tidar_core.convert.template import encode, text_lead

FLUSH_SECONDS = 30.0
FLUSH_TOKENS = 1_000_000
HOPELESS = 500  # jobs without a single document, or twice what is generated at once: short ones end before good ones
DRAIN_SHARE, DRAIN_SECONDS = 0.15, 120.0  # of the time, for answers to end that are on their way


@dataclass(frozen=True, slots=True)
class Goal:
    """When to stop: as soon as there are `own_tokens` that the model said (0: no such limit) or `seconds` were spent
    (0: no limit). The user's prompts are answered all the same, and have `seconds` in each run."""

    own_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GatherProgress:
    """How far it is, runs before this one counted. own_tokens: of finished documents; growing: of those on their
    way. asked: the user's prompts that are still to be answered. until: where `seconds` ends at the latest, 0 where
    that has no limit. refused: prompts of this run that have no answer to learn from. useless: the model says nothing
    of use by itself, and is not asked on."""

    documents: int
    own_tokens: int
    growing: int
    seconds: float
    asked: int = 0
    until: float = 0.0
    refused: int = 0
    useless: bool = False


@dataclass(slots=True)
class _Run:
    """One run's books."""

    store: ShardStore
    documents: int
    own_tokens: int
    seconds_before: float
    hopeless: int
    began: float = field(default_factory=time.monotonic)
    flushed: float = field(default_factory=time.monotonic)
    fresh: list[Document] = field(default_factory=list)
    fresh_done: list[int] = field(default_factory=list)
    refused: int = 0
    useless: int = 0
    useful: int = 0

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.began

    def finish(self, conversation: Conversation) -> None:
        document, number = conversation.document(), conversation.job.number
        given = conversation.job.kind == "prompt"
        if document is None:
            self.refused += given
            self.useless += not given
        else:
            self.useful += not given
            self.documents += 1
            self.own_tokens += document.own_tokens
            self.fresh.append(document)
        self.fresh_done.append(number if number >= 0 else prompt_number(conversation.key))

    @property
    def in_vain(self) -> bool:
        return self.useless >= self.hopeless and not self.useful

    @property
    def due(self) -> bool:
        waited = time.monotonic() - self.flushed
        return waited > FLUSH_SECONDS or sum(len(document.tokens) for document in self.fresh) > FLUSH_TOKENS

    def flush(self, growing: Sequence[Growing]) -> None:
        """Writes what is fresh, and what is still growing."""
        self.store.append(self.fresh, self.fresh_done, time.monotonic() - self.flushed)
        write_growing(self.store.directory, growing)
        self.fresh, self.fresh_done, self.flushed = [], [], time.monotonic()


def gather_own_words(
    source: TextSource,
    tokenizer: PreTrainedTokenizerFast,
    plan: DocumentPlan,
    store: ShardStore,
    goal: Goal,
    prompts: Sequence[str] = (),
    progress: Callable[[GatherProgress], None] = lambda gathered: None,
) -> GatherProgress:
    """Generates documents into `store` until the goal is reached, behind those that are there.

    Prompts come first; they are asked once, and also where the goal is reached already. What was said is on disk within
    a minute. Where the time is over, what is on its way is cut and learnt from as it is, but for answers to
    prompts: a later run goes on with those, and with all that a kill interrupts as far as there is time. Raises
    ConfigError where the disk is full, and where nothing is stored and the model says nothing that can be used.
    """
    stored = store.read()
    seen = set(stored.corpus.keys.tolist())
    hopeless = max(HOPELESS, 2 * source.capacity)
    run = _Run(store, len(stored.corpus), stored.corpus.generated_tokens(), stored.seconds, hopeless)
    asked = deque(prompt_job(plan, prompt) for prompt in unanswered(tokenizer, prompts, stored))
    planned = (plan_job(plan, number) for number in count() if number not in stored.done)
    left = _left_growing(store.directory, tokenizer, stored)
    drain = min(DRAIN_SHARE * goal.seconds, DRAIN_SECONDS)
    open_ones: dict[int, Conversation] = {}
    first_emitted, landed, number = source.emitted, 0, 0

    def next_job(growing: int) -> Job | None:
        if asked and has_time(stored.seconds + goal.seconds - drain):
            return asked.popleft()
        enough = bool(goal.own_tokens) and run.own_tokens + growing >= goal.own_tokens
        over = enough or run.in_vain or not has_time(goal.seconds - drain)
        return None if asked or over else next(planned)

    def has_time(end: float) -> bool:
        return not goal.seconds or run.seconds < end

    def go_on(key: int, conversation: Conversation, wish: Wish | None, said: tuple[int, ...] = ()) -> None:
        if wish is not None and source.submit(key, wish.prompt, wish.params, said):
            open_ones[key] = conversation
        else:
            run.finish(conversation)

    def cut_what_is_long_enough() -> None:
        for key, conversation in list(open_ones.items()):
            if conversation.job.kind != "prompt" and conversation.cut(source.said(key)):
                run.finish(open_ones.pop(key))

    def flush() -> None:
        growing = [growing_of(conversation, source.said(key)) for key, conversation in open_ones.items()]
        run.flush([*growing, *left.values()])

    while True:
        growing = max(0, source.emitted - first_emitted - landed)
        asking = len(asked) + sum(conversation.job.kind == "prompt" for conversation in open_ones.values())
        until = goal.seconds and goal.seconds + (stored.seconds if asking else 0.0)
        progress(GatherProgress(run.documents, run.own_tokens, growing, run.seconds, asking, until))
        if not has_time(until):
            cut_what_is_long_enough()
            break
        while source.in_flight < source.capacity + source.capacity // 4 and (job := next_job(growing)) is not None:
            conversation = Conversation(job, plan, tokenizer, seen)
            kept = left.pop(job.opening if job.kind == "prompt" else job.number, None)
            go_on(number, conversation, *take_up(conversation, kept))
            number += 1
        if not open_ones:
            break
        for completion in source.step():
            landed += len(completion.tokens)
            conversation = open_ones.pop(completion.key)
            go_on(completion.key, conversation, conversation.advance(completion))
        if run.due:
            flush()
    # Of a run that was killed, and there is no time to go on with it.
    for kept in [kept for kept in left.values() if kept.number >= 0]:
        conversation = Conversation(plan_job(plan, kept.number), plan, tokenizer, seen)
        _, said = take_up(conversation, left.pop(kept.job))
        conversation.cut(said)
        run.finish(conversation)
    if run.in_vain and not run.documents:
        raise ConfigError("the model's own words are of no use: it asks nothing and ends nothing; use --text FILE")
    if run.fresh_done or open_ones:
        flush()
    return GatherProgress(run.documents, run.own_tokens, 0, run.seconds, refused=run.refused, useless=run.in_vain)


def _left_growing(directory: Path, tokenizer: PreTrainedTokenizerFast, stored: Stored) -> dict[int | str, Growing]:
    """What an earlier run left unfinished and no document has finished since, by the job that it belongs to."""
    kept_ones = read_growing(directory)
    still_open = set(unanswered(tokenizer, [kept.prompt for kept in kept_ones if kept.number < 0], stored))
    return {
        kept.job: kept
        for kept in kept_ones
        if (kept.prompt in still_open if kept.number < 0 else kept.number not in stored.done)
    }


def question_key(tokenizer: PreTrainedTokenizerFast, question: str) -> int:
    """The key of the document that answers a question."""
    return content_key(encode(tokenizer, question))


def unanswered(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], stored: Stored) -> list[str]:
    """Those of the prompts that were not asked yet, each once."""
    answered = set(stored.corpus.keys.tolist())
    return [
        prompt
        for prompt in dict.fromkeys(prompts)
        if (key := question_key(tokenizer, prompt)) not in answered and prompt_number(key) not in stored.done
    ]


@dataclass(frozen=True, slots=True)
class SortedPrompts:
    """fitting: those behind which an answer fits into a document. too_long: how many others there are. refused: how
    many the chat template does not take."""

    fitting: list[str]
    too_long: int
    refused: int


def sort_prompts(tokenizer: PreTrainedTokenizerFast, plan: DocumentPlan, prompts: Sequence[str]) -> SortedPrompts:
    """Which of the prompts can be asked."""
    fitting, too_long, refused = [], 0, 0
    for prompt in prompts:
        conversation = Conversation(prompt_job(plan, prompt), plan, tokenizer, set())
        if conversation.start() is not None:
            fitting.append(prompt)
        elif conversation.tokens:
            too_long += 1
        else:
            refused += 1
    return SortedPrompts(fitting, too_long, refused)


@dataclass(frozen=True, slots=True)
class AddedText:
    """documents: how many came of a text. unknown: how many did not, for a token that the model has no embedding of."""

    documents: int
    unknown: int


def add_text(
    tokenizer: PreTrainedTokenizerFast, path: Path, store: ShardStore, longest: int, vocab_size: int
) -> AddedText:
    """Cuts the text of a file into documents of at most `longest` tokens, behind those with which the tokenizer begins
    each text; what is stored already is left out. vocab_size: rows of the embedding, of which a tokenizer may have
    more tokens. Raises ConfigError where the file cannot be read or is too short, or the disk is full."""
    seen = set(store.read().corpus.keys.tolist())
    lead = text_lead(tokenizer)
    fresh: list[Document] = []
    added = unknown = useful = 0
    for tokens in _windows(tokenizer, path, longest):
        if max(tokens) >= vocab_size:
            unknown += 1
            continue
        key = content_key(tokens)
        useful += len(tokens) > LEAST_OWN_TOKENS
        if key in seen or len(tokens) <= LEAST_OWN_TOKENS:
            continue
        seen.add(key)
        given = len(lead) or 1  # nothing foretells the first token of all
        own = [False] * given + [True] * (len(lead) + len(tokens) - given)
        fresh.append(Document(lead + tokens, tuple(own), key, "file", -1))
        added += 1
        if len(fresh) * longest >= FLUSH_TOKENS:
            store.append(fresh, [], 0.0)
            fresh = []
    if not useful:
        raise ConfigError(
            f"the text {path} has nothing to learn from: it takes more than {LEAST_OWN_TOKENS} tokens that the model "
            "knows"
        )
    if fresh:
        store.append(fresh, [], 0.0)
    return AddedText(added, unknown)


def _windows(tokenizer: PreTrainedTokenizerFast, path: Path, longest: int) -> Iterator[tuple[int, ...]]:
    """The file's tokens in runs of `longest`."""
    rest: tuple[int, ...] = ()
    for piece in read_text(path):
        rest += encode(tokenizer, piece)
        whole = len(rest) // longest * longest
        for first in range(0, whole, longest):
            yield rest[first : first + longest]
        rest = rest[whole:]
    if rest:
        yield rest
