"""One HTTP request's answer as it grows: tokens become text, thoughts and calls of tools."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.card import ModelCard
from cluster.wire.acceptance import Acceptance, answer_metrics
from cluster.wire.logprobs import with_likeliest
from cluster.wire.spelling import Spelling
from cluster.wire.thoughts import Thinking, Thought, ThoughtParser
from cluster.wire.tool_calls import CallDelta, ToolParser
from cluster.wire.tools import Toolbox
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from tidar_core.text import TextStream

Share = tuple[TokenLogprobs, ...]
Part = str | Thought | CallDelta  # of what an answer says: text, thoughts before it, calls of tools


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice, in order. `tokens` are all that the model said, also those that are no part
    of the text: a stop string's, the one that ended the answer. `trace` is the wire's `tidar` object, where one was
    asked for. shares: where they were asked for by part (`Answer.by_part`), of each part of `told` the
    log-probabilities of its tokens, which only text has."""

    choice: int
    told: tuple[Part, ...]
    finish: Finish | None = None
    trace: dict[str, Any] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    tokens: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part for part in self.told if isinstance(part, str))

    @property
    def thoughts(self) -> str:
        return "".join(part.text for part in self.told if isinstance(part, Thought))

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        """At most one delta for each call: clients add up one a chunk."""
        return tuple(part for part in self.told if isinstance(part, CallDelta))


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answer: its text and its first token, of which no log-probability
    can be told. logprobs: of how many of the likeliest tokens those of the others are told beside their own, None where
    none are. alone: no answer is told behind it."""

    text: str
    first: int
    logprobs: int | None
    alone: bool


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How an answer is told, by what its request said. The body itself, read in, takes many times its size, unknown
    fields too, and an answer may take long: this alone is kept.

    chat: its objects are a chat's, not a completion's. include_usage, continuous_usage: usage comes at the end of a
    stream, and with each of its chunks. trace: so does what its step drafted. prompt_logprobs: of how many of the
    likeliest tokens vLLM's field of that name tells, None where none were asked for. return_token_ids: vLLM's.
    tokens_as_ids: log-probabilities name tokens by their ids. include_reasoning: else thoughts are counted alone.
    include_stop: the text ends with the stop string, or the token, that was asked for and ended it.
    """

    chat: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    trace: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    include_reasoning: bool = True
    include_stop: bool = False

    @property
    def tells_end(self) -> bool:
        """The token that ended an answer has a log-probability among the others', as in OpenAI's completions and
        vLLM's: evaluations count on one for each token. In a chat OpenAI tells none of it."""
        return not self.chat


@dataclass(slots=True)
class Choice:
    """One answer as it grows: its text, its counts, how it ended. shown_ends: tokens that may end it and are a part of
    its text then."""

    number: int
    prompt_tokens: int
    acceptance: Acceptance
    text: TextStream
    spelling: Spelling | None
    tells_end: bool = False
    echo: Echo | None = None
    tools: ToolParser | None = None
    thoughts: ThoughtParser | None = None
    include_reasoning: bool = True
    shown_ends: frozenset[int] = frozenset()
    by_part: bool = False
    waiting: Share = ()  # of tokens whose text is held back
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None

    @property
    def called(self) -> bool:
        """The answer ended in calls of tools, the last of them complete."""
        return self.tools is not None and self.tools.calls > 0 and self.tools.complete

    def add(self, output: StepOutput, replica: str) -> Piece:
        """Count one step and turn its tokens into the text to show."""
        if self.echo is not None and self.echo.alone:
            trace = None if output.trace is None else output.trace._replace(anchor=None)
            output = output._replace(tokens=(), logprobs=(), trace=trace, finish=Finish(FinishReason.LENGTH))
        finish = self.finish = output.finish
        self.acceptance.add(output)
        self.completion_tokens += len(output.tokens)
        if output.trace is not None:
            self.cached_tokens += min(output.trace.cached, self.prompt_tokens)
        # The id that ended an answer is among the tokens, but no part of the text.
        hidden = finish and isinstance(finish.stop, int) and finish.stop not in self.shown_ends
        shown = output.tokens[:-1] if hidden else output.tokens
        shown_trace = None
        if self.spelling is not None and output.trace is not None:
            shown_trace = self.spelling.describe(output, output.trace, replica)
        entries = output.logprobs if self.tells_end else output.logprobs[: len(shown)]
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        front = ""
        if self.echo is not None:
            if self.echo.logprobs is not None:
                entries = (*with_likeliest(output.prompt_logprobs, self.echo.logprobs), *entries)
            front, self.echo = self.echo.text, None
        if self.by_part:
            told, shares = with_shares(self._shared(shown, entries))
        elif self.thoughts is not None:
            told, shares = runs(part for part, _ in self._shared(shown, ())), ()
        else:
            told, shares = runs(self._told(shown, front, finish is not None)), ()
        if self.thoughts is not None:
            self.thoughts.count(output.tokens[len(shown) :])
        return Piece(self.number, told, finish, shown_trace, entries, output.tokens, shares)

    def _shared(self, tokens: Sequence[int], entries: Share) -> Iterator[tuple[Part, Share]]:
        """A step's parts with the log-probabilities of their tokens. Token by token, so that whose one is, and how many
        are of thoughts, does not depend on how many a step brought."""
        for number, token in enumerate(tokens):
            self.waiting += entries[number : number + 1]
            yield from (self._with_share(part) for part in self._told((token,)) if part)
            if (self.thoughts and self.thoughts.within) or (self.tools and self.tools.in_call):
                self.waiting = ()
        if self.finish is not None:
            yield from (self._with_share(part) for part in self._told((), last=True) if part)
            yield self._with_share("")

    def _with_share(self, part: Part) -> tuple[Part, Share]:
        """The part, and the log-probabilities that go out with it. Those that wait go with the next text: they belong
        to it, or to no text at all. A part that is not text takes none."""
        share, self.waiting = self.waiting, ()
        return part, share if isinstance(part, str) else ()

    def _told(self, tokens: Sequence[int], front: str = "", last: bool = False) -> Iterator[Part]:
        """The text of tokens, and what of it are thoughts or adds to calls. front: text before it; last: no more
        comes."""
        pushed = self.text.push(tokens)
        text = front + pushed.text
        if last and pushed.stop is None:
            text += self.text.finish()
        parts: tuple[str | Thought, ...] = (text,)
        if self.thoughts is not None:
            parts = self.thoughts.push(text)
            self.thoughts.count(tokens)
            parts = (*parts, *self.thoughts.finish()) if last else parts
        for part in parts:
            if isinstance(part, Thought) and not self.include_reasoning:
                continue
            if self.tools is None or isinstance(part, Thought):
                yield part
            else:
                yield from self.tools.push(part)
        if self.tools is not None and last:
            yield from self.tools.finish()


@dataclass(slots=True)
class Answer:
    """All choices of one HTTP request, each under sampling parameters of its own.

    by_part: each text of the answer has its log-probabilities, as in the Responses API.
    """

    card: ModelCard
    requests: Sequence[Request]
    options: ResponseOptions = ResponseOptions()
    echoes: Sequence[Echo] = ()
    by_part: bool = False
    tools: Toolbox | None = None
    constraint_field: str = "response_format"  # the field that says what the answer has to follow
    thinking: Thinking | None = None
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = [
            Choice(
                number=number,
                # one prompt for all choices of it: counted once
                prompt_tokens=0 if request.params.choice else len(request.prompt),
                acceptance=Acceptance(max(0, self.card.block_length - 1)),
                text=TextStream(
                    self.card.tokenizer,
                    request.params.stop,
                    min_tokens=request.params.min_tokens,
                    mid_text=request.params.mid_text,
                    with_stop=self.options.include_stop,
                    with_special=request.params.special_text,
                ),
                spelling=(
                    Spelling(self.card.tokenizer, request.params.mid_text, request.params.special_text)
                    if self.options.trace
                    else None
                ),
                tells_end=self.options.tells_end,
                include_reasoning=self.options.include_reasoning,
                shown_ends=self._shown_ends(request.params),
                by_part=self.by_part and request.params.logprobs is not None,
                echo=self.echoes[number] if self.echoes else None,
                tools=self.tools.parser() if self.tools else None,
                thoughts=self.thinking.parser() if self.thinking else None,
            )
            for number, request in enumerate(self.requests)
        ]

    def _shown_ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that may end an answer and are a part of its text then: of those that are not asked for by their ids,
        the ends of sequence, in a text that has special tokens at all."""
        if not self.options.include_stop:
            return frozenset()
        return params.stop_token_ids | (frozenset(self.card.eos_ids) if params.special_text else frozenset())

    def metrics(self) -> dict[str, Any]:
        """The `metrics` object of the response; per step too where the answer is traced."""
        params = self.requests[0].params
        counts = [choice.acceptance for choice in self.choices]
        seeds = [request.params.seed for request in self.requests]
        return answer_metrics(counts, seeds, self.options.trace, params.draft_trust)

    def account(self) -> dict[str, int | list[str]]:
        """What came of it so far, as attributes of a span, under OpenTelemetry's names for generative AI."""
        return {
            "gen_ai.usage.input_tokens": sum(choice.prompt_tokens for choice in self.choices),
            "gen_ai.usage.output_tokens": sum(choice.completion_tokens for choice in self.choices),
            "gen_ai.response.finish_reasons": [
                choice.finish.reason.value for choice in self.choices if choice.finish is not None
            ],
            "tidar.decode_steps": sum(choice.acceptance.decode_steps for choice in self.choices),
            "tidar.cached_tokens": sum(choice.cached_tokens for choice in self.choices),
        }


def joined(pieces: Sequence[Piece]) -> Piece:
    """What several steps added to one choice as if it were one; traces cannot be joined."""
    if len(pieces) == 1:
        return pieces[0]
    if any(piece.shares for piece in pieces):
        told, shares = with_shares(pair for piece in pieces for pair in zip(piece.told, piece.shares, strict=True))
    else:
        told, shares = runs(part for piece in pieces for part in piece.told), ()
    return replace(
        pieces[0],
        told=told,
        shares=shares,
        finish=pieces[-1].finish,
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
    )


def with_shares(parts: Iterable[tuple[Part, Share]]) -> tuple[tuple[Part, ...], tuple[Share, ...]]:
    """The parts, and of each its log-probabilities; neighbours that are text are joined."""
    told: list[Part] = []
    shares: list[list[TokenLogprobs]] = []
    for part, share in parts:
        last = told[-1] if told else None
        if isinstance(part, str) and isinstance(last, str):
            told[-1] = last + part
            shares[-1] += share
        elif part or share:
            told.append(part)
            shares.append(list(share))
    return tuple(told), tuple(map(tuple, shares))


def runs(told: Iterable[Part]) -> tuple[Part, ...]:
    """The same with neighbours joined that are text, thoughts, or of one call; nothing of empty text."""
    made: list[Part] = []
    for part in told:
        last = made[-1] if made else None
        if isinstance(part, str) and isinstance(last, str):
            made[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            made[-1] = Thought(last.text + part.text)
        elif isinstance(part, CallDelta) and isinstance(last, CallDelta) and last.index == part.index:
            made[-1] = replace(last, arguments=last.arguments + part.arguments)
        elif part != "":
            made.append(part)
    return tuple(made)


def requests_for(
    answer_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    cache_salt: str = "",
    priority: int = 0,
) -> list[Request]:
    """One engine request a choice, named after the answer."""
    return [
        Request(f"{answer_id}-{number}", prompt, sampling, cache_salt=cache_salt, priority=priority, cut=True)
        for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    ]
