"""The nouns of the engine: what goes in, what is kept while it runs, what comes out of a step."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from tidar_core.grammar.grammar import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    from tidar_core.engine.acceptance_rates import AcceptanceRates
    from tidar_core.engine.constraint import Constraint
    from tidar_core.sampling.bad_words import BadWords
    from tidar_core.sampling.penalties import Ledger
    from tidar_core.text import TextStream

DraftMode = Literal["auto", "off", "full"]
MAX_LOGPROBS = 20


class RequestError(ValueError):
    """A request that cannot be served; the message is one line for the user, `param` the field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The part of `SamplingParams` that the makers of a model may recommend: its defaults, neutral by themselves."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def but(self, **stated: Any) -> Self:
        """The same with what is stated in place of it; None states nothing."""
        return replace(self, **{name: value for name, value in stated.items() if value is not None})


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Thoughts in front of an answer, from the tag `begin` to the tag `end`, have at most so many `tokens`, tags left
    out. begun: the prompt has the first tag already."""

    begin: str
    end: str
    begun: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one choice are picked. The token at a position depends on these and the prefix alone.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep everything. `seed` (any integer, used modulo
    2**64) and `choice` key the noise. `logit_bias` and the penalties (neutral: 0, 0 and 1) change the scores first, as
    in `tidar_core.sampling.penalties`, where no tokens but `allowed_token_ids` are left, if there are any. `bad_words`,
    each as tokens, never come (`tidar_core.sampling.bad_words`), but where a grammar or the end of thoughts leaves
    nothing else. `logprobs` asks for the raw log-probability of each token and of so many of the likeliest,
    `prompt_logprobs` the same for the tokens of the prompt. `grammar` is what the answer has to follow; where that
    ends, so does the answer.
    `thought_limit` ends thoughts that would be longer. `mid_text`: the answer's text goes on from the prompt's, so that
    a space in front of it counts, also where `stop` is looked for.
    `special_text`: special tokens are a part of that text too. `drafts` and `block` change the speed, never the tokens:
    `block` k allows at most k slots a proposal and k - 1 verified drafts. `draft_trust` below 1 mixes the drafter's
    scores into the model's where a draft stands (paper, "Trust Diff"): the tokens are no longer the model's own, and
    depend on the drafts; everything is drafted then, whatever `drafts` says.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    thought_limit: ThoughtLimit | None = None
    mid_text: bool = False
    special_text: bool = False
    drafts: DraftMode = "auto"
    block: int | None = None
    draft_trust: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", "max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError("min_tokens must lie between 0 and max_tokens", "min_tokens")
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise RequestError("temperature must lie between 0 and 100", "temperature")
        if self.top_k < 0:
            raise RequestError("top_k must be 0 (off) or more", "top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("top_p must be above 0 and at most 1", "top_p")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError("min_p must lie between 0 and 1", "min_p")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise RequestError(f"{name} must lie between -2 and 2", name)
        if not 0.01 <= self.repetition_penalty <= 100.0:  # far below, scores would overflow
            raise RequestError("repetition_penalty must lie between 0.01 and 100", "repetition_penalty")
        if not all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias):
            raise RequestError("a logit bias must lie between -100 and 100", "logit_bias")
        if self.allowed_token_ids and self.grammar is not None:
            raise RequestError(
                "allowed_token_ids cannot be combined with what holds the answer to a form (response_format, "
                "structured_outputs, strict or required tools): leave one of both out",
                "allowed_token_ids",
            )
        if self.allowed_token_ids and self.thought_limit is not None:
            raise RequestError(
                "allowed_token_ids cannot be combined with thinking_token_budget: leave one of both out",
                "allowed_token_ids",
            )
        if self.allowed_token_ids and self.bad_words:
            raise RequestError(
                "allowed_token_ids cannot be combined with bad_words: leave one of both out", "allowed_token_ids"
            )
        if not all(self.bad_words):
            raise RequestError("bad_words: a word must have a token at least", "bad_words")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
                raise RequestError(f"{name} must lie between 0 and {MAX_LOGPROBS} per token", name)
        if not 0.0 <= self.draft_trust <= 1.0:
            raise RequestError("draft_trust must lie between 0 and 1", "tidar.draft_trust")
        if self.draft_trust < 1.0 and self.drafts == "off":
            raise RequestError("draft_trust below 1 needs drafts: leave one of both out", "tidar.draft_trust")
        if self.draft_trust < 1.0 and self.block == 1:
            raise RequestError("draft_trust below 1 needs drafts, and blocks of 1 have none", "tidar.block")
        if self.block is not None and self.block < 1:
            raise RequestError("block must be at least 1", "tidar.block")
        if any(not text for text in self.stop):
            raise RequestError("a stop string must not be empty", "stop")

    @property
    def drafting(self) -> DraftMode:
        """How much is drafted: everything where drafts have a say in the text (`draft_trust` below 1)."""
        return "full" if self.draft_trust < 1.0 else self.drafts

    @property
    def changes_scores(self) -> bool:
        """Whether bias, penalties or allowed tokens change the scores."""
        return bool(self.logit_bias or self.allowed_token_ids) or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change the scores."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `emitted` holds tokens that were sent already, by a replica that is gone: the engine continues behind them
    and never sends them again, while limits and stops count from the end of `prompt`. Only requests with the same
    `cache_salt` share the K/V pages of a common prefix. Those of a lower `priority` are served first, and take the
    place of others where there is none left. `waited` is for how many seconds its reader has waited already, at a
    replica that is gone: it comes before those of its priority that have waited less. `cut`: where `max_tokens` is
    beyond the positions of this engine, the answer ends with them; without it such a request is refused. Engines of one
    model may have more positions or fewer, by the memory that each has.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    emitted: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    waited: float = 0.0
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. `stop` is the token id or the string that ended it, where one did. `param` is the field
    at fault, where an error is the request's own."""

    reason: FinishReason
    stop: int | str | None = None
    error: str | None = None
    param: str | None = None


class StepTrace(NamedTuple):
    """What one step of one sequence guessed, and what the model said (design of the step: `tidar_core.layout`).

    step: 0 for the prefill step that emits the first token, then 1, 2, … for decode steps.
    seconds: since the engine received the request.
    drafted: the n drafts that were verified. accepted: how many of them held and were emitted.
    anchor: the token that the model said itself; None where a stop cut the step before it.
    block: slots a proposal (b). proposals: the outcomes that were drafted for (P).
    used: the outcome that came true, where it was drafted for, else None.
    verify_rows, mask_rows: that it had of the step, padding left out.
    cached: in step 0, prompt tokens whose K/V were there already when the request first ran; else 0.
    """

    step: int
    seconds: float
    drafted: tuple[int, ...]
    accepted: int
    anchor: int | None
    block: int
    proposals: tuple[int, ...]
    used: int | None
    verify_rows: int
    mask_rows: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the model's raw scores at one position: of the token that was picked, and of the
    likeliest tokens (id, log-probability), best first. rank: of the token among all, from 1; given for prompts
    alone."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


class StepOutput(NamedTuple):
    """What one step emitted for one request; `finish` is set on the last. `trace` is None where no rows ran.
    `logprobs` has an entry a token where the request asked for them, `prompt_logprobs`, in the first output, one for
    each token of the prompt but its first."""

    request_id: str
    tokens: tuple[int, ...]
    trace: StepTrace | None = None
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


PageNumbers: TypeAlias = "array[int]"


def page_numbers(pages: Iterable[int] = ()) -> PageNumbers:
    """Numbers of pages, int32 each: side by side in memory, since every step lays the pages of all sequences."""
    return array("i", pages)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. The engine's thread alone changes it: the scheduler tokens, cursor, drafts and pages, and
    where an answer ends (`ending.py`) its `stop_watch` and `constraint` move on behind what is emitted. `grammars.py`
    and `thought_watch.py` bring the constraint, `draft_policy.py` lets `acceptance_rates` fade, whoever picks by
    penalties has `ledger` follow the tokens, and the engine notes `prompt_logprobs`.

    tokens: prompt and emitted tokens. computed: how many of them have their K/V in pages (the cursor).
    drafts: guesses for the positions behind the last token. pages: page numbers, in order of position.
    page_keys: keys of the leading pages that are known to others. prefix_keys: those that it looked for when it was
    admitted. cached: tokens that it found there the first time. acceptance_rates: how often its drafts held. ledger:
    what penalties count, where there are any; bad_words: what may not be. prompt_logprobs: of the prompt's tokens from
    the second on, as far as they were read.
    draft_scores: [drafts, vocab], the drafter's scores of each draft, where they have a say in the text. ends: the
    tokens that end the answer.
    """

    request: Request
    arrived: float
    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    pages: PageNumbers = field(default_factory=page_numbers)
    page_keys: list[bytes] = field(default_factory=list)
    prefix_keys: list[bytes] = field(default_factory=list)
    cached: int | None = None
    decode_steps: int = 0
    stop_watch: "TextStream | None" = None
    acceptance_rates: "AcceptanceRates | None" = None
    constraint: "Constraint | None" = None
    ledger: "Ledger | None" = None
    bad_words: "BadWords | None" = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft_scores: "Tensor | None" = None
    ends: frozenset[int] = frozenset()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def reads_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still missing, so that all of it has to be computed: cached K/V
        would not do."""
        request = self.request
        return (
            request.params.prompt_logprobs is not None
            and not request.emitted
            and len(self.prompt_logprobs) < len(request.prompt) - 1
        )

    @property
    def generated(self) -> int:
        """Tokens emitted since the prompt, those of an earlier replica included."""
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Tokens whose K/V are not in pages yet: the last one alone where it decodes."""
        return len(self.tokens) - self.computed

    def remaining(self, max_positions: int) -> int:
        """Tokens that may still be emitted, under max_tokens and below so many positions."""
        request = self.request
        return min(request.params.max_tokens + len(request.prompt), max_positions) - len(self.tokens)
