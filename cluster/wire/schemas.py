"""Request bodies of the OpenAI API with vLLM's extra names.

Whatever would change the answer and cannot be honoured is refused by name; what cannot change it is ignored.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from cluster.errors import FieldError, bad_request
from cluster.wire.limits import few, stated
from cluster.wire.messages import Messages, Templated
from cluster.wire.structured import ResponseFormat, StructuredOutputs, grammar_of
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import MAX_LOGPROBS, DraftMode

MAX_STOP = 16
MAX_PROMPTS = 256
MAX_STOP_IDS = 128
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD = 256  # characters
MAX_SALT = 256
MAX_KEYS = 16  # of an object whose keys are all known
SEED_BITS = 53  # a drawn seed survives a client whose numbers are doubles

# Fields that would change the answer and are not supported (some of them in completions alone), with the values that
# ask for nothing (null always does).
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "web_search_options": (),
}

# What serves in place of those of them that others have, or have had and given up for it.
INSTEAD: Mapping[str, str] = {
    "ebnf": "structured_outputs",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "json_schema": "response_format",
    "regex": "structured_outputs",
}

# What other endpoints call the limit of an answer. Some clients send all names at once.
LIMITS = ("max_completion_tokens", "max_output_tokens")

# Those of them that would change the prompt.
OF_PROMPTS = ("chat_template", "documents", "function_call", "functions")

# Known fields that cannot change the answer: nothing to say about them in the log.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


ShortText = Annotated[str, Field(max_length=1000)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD)]
Stops = Annotated[list[ShortText], Field(max_length=MAX_STOP)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
# What `check_prompts` takes, for the document.
Prompt = (
    Annotated[str, Field(min_length=1)]
    | Ids
    | Annotated[list[Annotated[str, Field(min_length=1)]] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def one_or_many(value: object) -> object:
    if not isinstance(value, str | list | None):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def check_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """The four shapes of `prompt` (text, texts, token ids, lists of them) as one tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("prompt must be a string, a list of strings, a list of token ids or a list of those lists")
    if is_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"prompt may hold at most {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and is_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError("prompt must be a string, a list of strings, a list of token ids or a list of those lists")


def is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


# For the document, of each field of `Sampling`.
MAKERS = Field(description="Left out: the model's own default, `tidar.sampling_defaults` in /v1/models.")
TOKEN_IDS = Field(
    description="Each choice, and each chunk of it, tells its tokens as `token_ids`, and the prompt's are told as "
    "`prompt_token_ids`: of a completion in each choice, or its first chunk; of a chat beside the choices, or in the "
    "first chunk of all."
)
THOUGHTS = Field(
    description="Thoughts in front of the answer have at most so many tokens, tags left out, and are ended there; "
    "-1: as many as the model likes."
)


def is_a_length(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("must be 1 or more, or -1 for as many as leave room for the answer")
    return value


Length = Annotated[
    int | None,
    AfterValidator(is_a_length),
    Field(
        json_schema_extra={"minimum": -1, "not": {"const": 0}},
        description="How many of a prompt's last tokens count; -1: as many as leave room for the answer.",
    ),
]


class TidarOptions(BaseModel):
    """The `tidar` object of a request: how to draft, and whether to show it. Only `draft_trust` changes the tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    drafts: Annotated[
        DraftMode | None, Field(description="auto: drafts where that is faster; off: never; full: always.")
    ] = None
    block: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="At most so many masked positions guess at a time.")
    ] = None
    draft_trust: Annotated[
        float | None,
        stated(minimum=0, maximum=1),
        Field(description="Below 1, the text is not the model's own: what share its scores have beside the drafter's."),
    ] = None
    trace: Annotated[
        bool | None, Field(description="Each chunk tells as `tidar` what its step drafted and what of it held.")
    ] = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """What all endpoints share. Null means the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Annotated[int | None, stated(minimum=1)] = None
    temperature: Annotated[float | None, stated(minimum=0, maximum=100), MAKERS] = None
    top_p: Annotated[float | None, stated(exclusiveMinimum=0, maximum=1), MAKERS] = None
    top_k: Annotated[int | None, stated(minimum=-1), MAKERS] = None
    min_p: Annotated[float | None, stated(minimum=0, maximum=1), MAKERS] = None
    seed: int | None = None
    stop: Annotated[Stops | None, BeforeValidator(one_or_many, json_schema_input_type=ShortText | Stops | None)] = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: Annotated[int | None, stated(minimum=0)] = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str | None, Field(max_length=MAX_SALT)] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Length = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None
    presence_penalty: Annotated[float | None, stated(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, stated(minimum=-2, maximum=2)] = None
    repetition_penalty: Annotated[float | None, stated(minimum=0.01, maximum=100), MAKERS] = None
    logit_bias: Annotated[dict[str, float] | None, few(MAX_BIASES)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs | None, few(MAX_KEYS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool | None, TOKEN_IDS] = None
    return_tokens_as_token_ids: bool | None = None
    tidar: Annotated[TidarOptions, few(MAX_KEYS)] = TidarOptions()

    @field_validator("tidar", mode="before")
    @classmethod
    def null_is_default(cls, value: object) -> object:
        return TidarOptions() if value is None else value

    @model_validator(mode="after")
    def prompt_is_read_whole(self) -> "Body":
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs is not available where stream is true", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def usage_needs_stream(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options is only allowed where stream is true", "stream_options")
        return self

    @model_validator(mode="after")
    def limit_has_its_name_here(self) -> "Body":
        for name in () if self.limit is not None else LIMITS:
            if (self.model_extra or {}).get(name) is not None:
                raise FieldError(f"{name} is a field of another endpoint: use max_tokens", name)
        return self

    @property
    def limit(self) -> int | None:
        """How many tokens the answer may have; None where nothing is said of it."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """vLLM's `continuous_usage_stats`: every chunk tells the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer has to follow, if anything. Slow for large schemas. Raises ApiError (400)."""
        return grammar_of(self.response_format, self.structured_outputs)

    @property
    def grammar_field(self) -> str:
        """Where that is said."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name beside each token; None: no log-probabilities at all."""
        return None

    @property
    def wanted_of_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def ignored(self) -> list[str]:
        """Names of fields that this server does not know, for its log."""
        extra = self.model_extra or {}
        return [name for name in extra if name not in UNSUPPORTED and name not in HARMLESS]


class CompletionBody(Body):
    """`POST /v1/completions`: each prompt is a choice."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(check_prompts, json_schema_input_type=Prompt)]
    add_special_tokens: bool | None = None
    logprobs: Annotated[int | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None
    echo: bool | None = None

    @property
    def reads_alone(self) -> bool:
        """Nothing is asked for but the prompt again, mostly for its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_of_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((wanted for wanted in (echoed, self.prompt_logprobs) if wanted is not None), default=None)


class ChatBody(Templated, Body):
    """`POST /v1/chat/completions`."""

    messages: Messages
    thinking_token_budget: Annotated[int | None, stated(minimum=-1), THOUGHTS] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: Annotated[int | None, stated(minimum=1)] = None
    logprobs: bool | None = None
    echo: Literal[False] | None = None  # of completions alone
    top_logprobs: Annotated[int | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None

    @model_validator(mode="after")
    def top_needs_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs is only allowed where logprobs is true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def what_tools_exclude(self) -> "ChatBody":
        if self.skip_special_tokens is False and self.offered_tools:
            message = "skip_special_tokens: false cannot be combined with tools, whose calls are read from the text"
            raise FieldError(message, "skip_special_tokens")
        if self.structured_outputs is not None and self.offered_tools:
            message = "structured_outputs cannot be combined with tools; use response_format"
            raise FieldError(message, "structured_outputs")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Templated):
    """`POST /tokenize`, as vLLM has it: a prompt, or the messages of a chat."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    truncate_prompt_tokens: Length = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def one_of(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        name = first_in_vain(self.model_extra or {}, {name: UNSUPPORTED[name] for name in OF_PROMPTS})
        if name is not None:
            raise FieldError(unsupported(name), name)
        return self


class DetokenizeBody(BaseModel):
    """`POST /detokenize`, as vLLM has it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


def refuse_unsupported(body: Body) -> None:
    """Raise ApiError (400) for the first field that would change the answer and cannot be honoured."""
    name = first_in_vain(body.model_extra or {}, UNSUPPORTED)
    if name is not None:
        raise bad_request(unsupported(name), name)


def unsupported(name: str) -> str:
    """What to say of a field."""
    instead = f": use `{INSTEAD[name]}`" if name in INSTEAD else ""
    return f"`{name}` is not supported by this server yet{instead}"


def first_in_vain(given: Mapping[str, object], fields: Mapping[str, tuple[object, ...]]) -> str | None:
    """The first of these fields, all unsupported, that asks for something. Types count: where 0 would ask for
    something, false may not."""
    for name, value in given.items():
        neutral = fields.get(name)
        if neutral is None or value is None:
            continue
        if not any(type(value) is type(item) and value == item for item in neutral):
            return name
    return None
