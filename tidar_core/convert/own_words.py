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
from tidar_core.convert.ending import end_put_off, unseen
from tidar_core.convert.given import read_text
from tidar_core.convert.growing import Growing, growing_of, read_growing, take_up, write_growing
from tidar_core.convert.shards import Document, ShardStore, Stored, content_key, prompt_number
from tidar_core.convert.sources import TextSource
from tidar_core.convert.template import encode, text_lead

FLUSH_SECONDS = 30.0
FLUSH_TOKENS = 1_000_000
# Jobs without a single document, after which the model is given up; at least twice as many as are generated at once,
# since those that come to nothing end first.
HOPELESS = 500
# Conversations that came to nothing, of those that the model began by itself, for the user to be told; once as many are
# over as for HOPELESS, or these at the end.
NEARLY_ALL, LEAST_BEGUN = 0.95, 20
DRAIN_SHARE, DRAIN_SECONDS = 0.15, 120.0  # the end of the time, in which nothing new begins and answers may end


@dataclass(frozen=True, slots=True)
class Goal:
    """When to stop: once there are `own_tokens`, or once `seconds` were spent; 0 is no limit. elsewhere: of the seconds
    that are stored, how many do not count, since other runs spent them.

    The user's prompts are answered even where the goal is reached. They have `seconds` in each run.
    """

    own_tokens: int = 0
    seconds: float = 0.0
    elsewhere: float = 0.0


@dataclass(frozen=True, slots=True)
class GatherProgress:
    """How far gathering is, earlier runs included. own_tokens: in finished documents; growing: in those on their way.
    asked: the user's prompts that are still to be answered. until: what `seconds` may reach at most, 0 for no limit.
    refused: prompts of this run whose answers teach nothing. useless: what the model says by itself is of no use, and
    it is asked nothing more. speechless: it asks itself next to nothing that comes to an answer."""

    documents: int
    own_tokens: int
    growing: int
    seconds: float
    asked: int = 0
    until: float = 0.0
    refused: int = 0
    useless: bool = False
    speechless: bool = False


@dataclass(slots=True)
class _Books:
    """What a run has counted, and what it has yet to write. hopeless: so many jobs that came to nothing, without a
    single one that did not, and the model is given up. spent: is told the seconds of each shard."""

    store: ShardStore
    documents: int
    own_tokens: int
    seconds_before: float
    hopeless: int
    spent: Callable[[float], None]
    began: float = field(default_factory=time.monotonic)
    flushed: float = field(default_factory=time.monotonic)
    fresh: list[Document] = field(default_factory=list)
    fresh_done: list[int] = field(default_factory=list)
    refused: int = 0
    useless: int = 0
    useful: int = 0
    begun: int = 0  # conversations that are over
    broken: int = 0  # those of them that came to nothing

    @property
    def seconds(self) -> float:
        """Spent on gathering, earlier runs included, as far as the goal counts them."""
        return self.seconds_before + time.monotonic() - self.began

    def finish(self, conversation: Conversation) -> None:
        """Counts a conversation that is over, and keeps its document to be written."""
        document, number = conversation.document(), conversation.job.number
        given, chat = conversation.job.kind == "prompt", conversation.job.kind == "chat"
        self.begun += chat
        self.broken += chat and document is None
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
        """Whether the model is given up: nothing came of anything it said by itself."""
        return self.useless >= self.hopeless and not self.useful

    def speechless(self, least: int) -> bool:
        """Whether nearly all conversations came to nothing, `least` of which are over."""
        return self.begun >= least and self.broken >= NEARLY_ALL * self.begun

    @property
    def due(self) -> bool:
        """Whether it is time to write."""
        waited = time.monotonic() - self.flushed
        return waited > FLUSH_SECONDS or sum(len(document.tokens) for document in self.fresh) > FLUSH_TOKENS

    def flush(self, growing: Sequence[Growing]) -> None:
        """Writes a shard of what is fresh, and what is still growing."""
        now = time.monotonic()
        self.store.append(self.fresh, self.fresh_done, now - self.flushed)
        self.spent(now - self.flushed)
        write_growing(self.store.directory, growing)
        self.fresh, self.fresh_done, self.flushed = [], [], now


class _Run:
    """One run of `gather_own_words`: the jobs that it has yet to begin, the conversations on their way, its books."""

    def __init__(
        self,
        source: TextSource,
        tokenizer: PreTrainedTokenizerFast,
        plan: DocumentPlan,
        store: ShardStore,
        goal: Goal,
        prompts: Sequence[str],
        spent: Callable[[float], None],
    ):
        self.source, self.tokenizer, self.plan, self.goal = source, tokenizer, plan, goal
        stored = store.read()
        self.seen = set(stored.corpus.keys.tolist())
        hopeless = max(HOPELESS, 2 * source.capacity)
        documents, own_tokens = len(stored.corpus), stored.corpus.generated_tokens()
        before = stored.seconds - goal.elsewhere
        self.books = _Books(store, documents, own_tokens, before, hopeless, spent)
        self.asked = deque(prompt_job(plan, prompt) for prompt in unanswered(tokenizer, prompts, stored))
        done = stored.done  # not all that is stored: the documents need not stay in memory
        self.planned = (plan_job(plan, number) for number in count() if number not in done)
        self.left = _left_growing(store.directory, tokenizer, stored)
        self.drain = min(DRAIN_SHARE * goal.seconds, DRAIN_SECONDS)
        self.open: dict[int, Conversation] = {}
        self.next_key = 0
        self.emitted_before, self.landed = source.emitted, 0  # landed: tokens of completions

    def progress(self) -> GatherProgress:
        """How far it is now."""
        books, goal = self.books, self.goal
        growing = max(0, self.source.emitted - self.emitted_before - self.landed)
        asking = len(self.asked) + sum(conversation.job.kind == "prompt" for conversation in self.open.values())
        until = goal.seconds and goal.seconds + (books.seconds_before if asking else 0.0)
        speechless = books.speechless(books.hopeless)
        return GatherProgress(
            books.documents, books.own_tokens, growing, books.seconds, asking, until, speechless=speechless
        )

    def has_time(self, end: float) -> bool:
        """Whether fewer than `end` seconds were spent; always where the goal has no limit of time."""
        return not self.goal.seconds or self.books.seconds < end

    def fill(self, growing: int) -> None:
        """Begins jobs until the source has enough to do. growing: as in `GatherProgress`."""
        most = self.source.capacity + self.source.capacity // 4
        while self.source.in_flight < most and (job := self._next_job(growing)) is not None:
            conversation = Conversation(job, self.plan, self.tokenizer, self.seen)
            kept = self.left.pop(job.opening if job.kind == "prompt" else job.number, None)
            self._go_on(self.next_key, conversation, *take_up(conversation, kept))
            self.next_key += 1

    def advance(self) -> None:
        """Lets the source work, and leads on the conversations that it has completed something for."""
        for completion in self.source.step():
            self.landed += len(completion.tokens)
            conversation = self.open.pop(completion.key)
            self._go_on(completion.key, conversation, conversation.advance(completion))

    def cut_open(self) -> None:
        """Ends what is on its way, where it is long enough to be learnt from; never answers to prompts."""
        for key, conversation in list(self.open.items()):
            if conversation.job.kind != "prompt" and conversation.cut(self.source.so_far(key)):
                self.books.finish(self.open.pop(key))

    def cut_left(self) -> None:
        """Ends what an earlier run has left, and this one had no time to go on with."""
        _cut(self.left, self.plan, self.tokenizer, self.seen, self.books)

    def flush(self) -> None:
        """Writes all documents that are finished, and all conversations that are not."""
        growing = [growing_of(conversation, self.source.so_far(key)) for key, conversation in self.open.items()]
        self.books.flush([*growing, *self.left.values()])

    def _next_job(self, growing: int) -> Job | None:
        """A prompt as long as there are any; then a planned job, unless the goal is reached or out of reach."""
        if self.asked and self.has_time(self.books.seconds_before + self.goal.seconds - self.drain):
            return self.asked.popleft()
        enough = bool(self.goal.own_tokens) and self.books.own_tokens + growing >= self.goal.own_tokens
        over = enough or self.books.in_vain or not self.has_time(self.goal.seconds - self.drain)
        return None if self.asked or over else next(self.planned)

    def _go_on(self, key: int, conversation: Conversation, wish: Wish | None, so_far: tuple[int, ...] = ()) -> None:
        """Submits what the conversation needs next; it is finished where that is nothing, or does not fit."""
        if wish is not None and self.source.submit(key, wish.prompt, wish.params, so_far):
            self.open[key] = conversation
        else:
            self.books.finish(conversation)


def gather_own_words(
    source: TextSource,
    tokenizer: PreTrainedTokenizerFast,
    plan: DocumentPlan,
    store: ShardStore,
    goal: Goal,
    prompts: Sequence[str] = (),
    progress: Callable[[GatherProgress], None] = lambda gathered: None,
    spent: Callable[[float], None] = lambda seconds: None,
) -> GatherProgress:
    """Generates documents into `store` until the goal is reached, behind those that are there.

    Prompts come first; they are asked once, and also where the goal is reached already. What was generated is on disk
    within a minute, and before a signal ends the run. When the time is over, what is on its way is cut and learnt from
    as it is, except answers to prompts: a later run goes on with those, and with all that a kill interrupts, as far as
    there is time. spent: is told, with each shard, the seconds that it took. Raises ConfigError where the disk is full,
    and where nothing is stored and the model says nothing that can be used.
    """
    run = _Run(source, tokenizer, plan, store, goal, prompts, spent)
    books = run.books
    with end_put_off() as asked:
        with unseen(asked):
            while not asked():
                now = run.progress()
                progress(now)
                if not run.has_time(now.until):
                    run.cut_open()
                    break
                run.fill(now.growing)
                if not run.open:
                    break
                run.advance()
                if books.due:
                    run.flush()
        if not asked():
            run.cut_left()
            if books.in_vain and not books.documents:
                raise ConfigError(
                    "the model's own words are of no use: it asks nothing and ends nothing; use --text FILE"
                )
        if books.fresh_done or run.open:
            run.flush()
    return GatherProgress(
        books.documents, books.own_tokens, 0, books.seconds,
        refused=books.refused, useless=books.in_vain, speechless=books.speechless(LEAST_BEGUN),
    )  # fmt: skip


def cut_growing(tokenizer: PreTrainedTokenizerFast, plan: DocumentPlan, store: ShardStore) -> None:
    """Ends what an earlier run has left on its way, where nothing more is to be generated: what is long enough is
    learnt from as it is. Answers to prompts stay as they are. Only for the model and the seed that the store has: else
    other jobs would be taken for those that were on their way. Raises ConfigError where the disk is full."""
    stored = store.read()
    left = _left_growing(store.directory, tokenizer, stored)
    books = _Books(store, len(stored.corpus), 0, 0.0, HOPELESS, lambda seconds: None)
    _cut(left, plan, tokenizer, set(stored.corpus.keys.tolist()), books)
    if books.fresh_done:
        books.flush(tuple(left.values()))


def _cut(
    left: dict[int | str, Growing],
    plan: DocumentPlan,
    tokenizer: PreTrainedTokenizerFast,
    seen: set[int],
    books: _Books,
) -> None:
    """Takes planned conversations out of those that are `left`, and finishes them where they are. seen: as in
    `Conversation`."""
    for kept in [kept for kept in left.values() if kept.number >= 0]:
        conversation = Conversation(plan_job(plan, kept.number), plan, tokenizer, seen)
        _, so_far = take_up(conversation, left.pop(kept.job))
        conversation.cut(so_far)
        books.finish(conversation)


def _left_growing(directory: Path, tokenizer: PreTrainedTokenizerFast, stored: Stored) -> dict[int | str, Growing]:
    """The conversations that an earlier run left unfinished, by their jobs; without those that were finished since."""
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
    """Cuts the text of a file into documents of at most `longest` tokens, each behind the tokens with which the
    tokenizer begins a text. What is stored already is left out. vocab_size: rows of the embedding; a tokenizer may have
    more tokens. Raises ConfigError where the file cannot be read or is too short, and where the disk is full."""
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
        given = len(lead) or 1  # nothing comes before the very first token, so that none could be learnt there
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
