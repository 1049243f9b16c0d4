"""From a body to what an answer is made by. Slow for long bodies and many choices: the caller runs these in a thread,
where no stream waits for it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.errors import ApiError, bad_request
from cluster.wire.answer import Echo, ResponseOptions
from cluster.wire.prompts import chat_prompt, completion_prompts, decode, read_body
from cluster.wire.responses_asked import ResponsesBody, as_here
from cluster.wire.responses_tools import Namespaced
from cluster.wire.sampling import sampling_of, sampling_params, token_wishes
from cluster.wire.schemas import MAX_PROMPTS, SEED_BITS, Body, ChatBody, CompletionBody, refuse_unsupported
from cluster.wire.thoughts import Thinking, behind_thoughts, thinking, thought_limit
from cluster.wire.tools import Toolbox, toolbox
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import SamplingParams, ThoughtLimit

Prompts = list[tuple[int, ...]]
# They come at once, and nobody else hears of the replica meanwhile: with more it would be taken for one that hangs.
MOST_LOGPROBS_OF_A_PROMPT = 1_000_000
# Of a request, those of its prompts and those of answers that are told whole: each takes some 140 bytes until then.
MOST_LOGPROBS = 2_000_000
FIELDS_TOLD, LONGEST_FIELD = 16, 64  # of a body; characters: they may be megabytes, and an answer may take long


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What a body asks for. prompts, params, echoes: of each choice its prompt as token ids, how its tokens are picked,
    and what stands before it, where anything does. constraint_field: the field that says what the answer has to follow.
    tools: what it may call; thinking: how it may begin with thoughts. repeated: what an object of the Responses API
    repeats of its request; None for the other two. namespaced: of that API too, the functions of namespaces by what the
    model calls them. ignored: fields of it that nobody knows, the first of them."""

    options: ResponseOptions
    prompts: Prompts
    params: Sequence[SamplingParams]
    cache_salt: str
    priority: int
    constraint_field: str
    ignored: Sequence[str]
    echoes: Sequence[Echo] = ()
    tools: Toolbox | None = None
    thinking: Thinking | None = None
    repeated: str | None = None
    namespaced: Mapping[str, Namespaced] = field(default_factory=dict)


def completion_plan(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> RequestPlan:
    """What the body of a `POST /v1/completions` asks for. Raises ApiError (400) for a field that cannot be honoured."""
    body = read_body(value, CompletionBody)
    refuse_unsupported(body)
    prompts = completion_prompts(body, card, backend)
    params = params_of(body, prompts, card, backend, body.grammar)
    return replace(plan_by(body, for_each_choice(prompts, body), params), echoes=echoes_of(body, prompts, backend))


def chat_plan(value: dict[str, Any], card: ModelCard, backend: Tokenizer, reasoning: bool) -> RequestPlan:
    """As `completion_plan`, for `/v1/chat/completions`. reasoning: thoughts are kept apart from the answer."""
    return plan_of_chat(read_body(value, ChatBody), card, backend, reasoning)


def responses_plan(value: dict[str, Any], card: ModelCard, backend: Tokenizer, reasoning: bool) -> RequestPlan:
    """As `chat_plan`, for `/v1/responses`; errors name the fields as they are called there."""
    body = read_body(value, ResponsesBody)
    chat = body.as_chat()
    try:
        plan = plan_of_chat(chat, card, backend, reasoning)
    except ApiError as error:
        raise as_here(error) from error
    return replace(plan, repeated=body.repeated(sampling_of(chat, card)), namespaced=body.namespaced)


def input_tokens(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> dict[str, Any]:
    """How many tokens the prompt has that `/v1/responses` makes of a body, as OpenAI's object. Raises ApiError (400) as
    `responses_plan` does for what the prompt is made of."""
    chat = read_body(value, ResponsesBody).as_chat()
    try:
        refuse_unsupported(chat)
        prompt, _ = chat_prompt(chat, card, backend)
    except ApiError as error:
        raise as_here(error) from error
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def plan_of_chat(body: ChatBody, card: ModelCard, backend: Tokenizer, reasoning: bool) -> RequestPlan:
    refuse_unsupported(body)
    parallel = body.parallel_tool_calls is not False
    tools = toolbox(card.tokenizer, body.tools or (), body.tool_choice, parallel, body.response_format)
    grammar = body.grammar if tools is None else tools.grammar
    prompt, text = chat_prompt(body, card, backend)
    thoughts = thinking(card.tokenizer, text, body.begun_answer)
    limit = thought_limit(card.tokenizer, thoughts, body.thinking_token_budget)
    if not reasoning:  # they are a part of the answer, and what that has to follow leaves room for none
        thoughts, limit = None, limit if grammar is None else None
    if tools is not None and body.begun_answer is not None and (thoughts is None or not thoughts.begun):
        tools = tools.behind(text[text.rindex(body.begun_answer.strip()) :])
    if thoughts is not None and grammar is not None:
        grammar = behind_thoughts(grammar, thoughts, body.grammar_field if tools is None else "tools")
    if body.tidar.trace:  # who watches tokens wants to find them in the text
        thoughts = None
        tools = None if tools is None else replace(tools, alone=False)  # calls come behind them
    params = params_of(body, [prompt], card, backend, grammar, limit)
    each = for_each_choice([prompt], body)
    field = body.grammar_field if tools is None else "tools"
    return replace(plan_by(body, each, params), constraint_field=field, tools=tools, thinking=thoughts)


def plan_by(body: Body, prompts: Prompts, params: Sequence[SamplingParams]) -> RequestPlan:
    """What the fields say that completions and chats have in common."""
    return RequestPlan(
        options=response_options(body),
        prompts=prompts,
        params=params,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        constraint_field=body.grammar_field,
        ignored=ignored_by(body),
    )


def response_options(body: Body) -> ResponseOptions:
    return ResponseOptions(
        chat=isinstance(body, ChatBody),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        trace=bool(body.tidar.trace),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        include_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
        include_stop=bool(body.include_stop_str_in_output),
    )


def params_of(
    body: Body,
    prompts: Prompts,
    card: ModelCard,
    backend: Tokenizer,
    grammar: Grammar | None,
    limit: ThoughtLimit | None = None,
) -> list[SamplingParams]:
    """How the tokens of each choice are picked."""
    choices = range(body.n or 1)
    if len(prompts) * len(choices) > MAX_PROMPTS:
        raise bad_request(f"prompts times n may be at most {MAX_PROMPTS}", "n")
    check_logprobs_of(body, max(map(len, prompts)))
    wishes = token_wishes(body, card, backend)
    # Without a given seed each prompt gets its own, so that equal prompts get different answers.
    seed = secrets.randbits(SEED_BITS)
    each = [
        sampling_params(body, card, len(prompt), (seed + number) % 2**SEED_BITS, grammar, wishes, limit)
        for number, prompt in enumerate(prompts)
    ]
    check_logprobs_together(body, sum(map(len, prompts)))
    return [replace(params, choice=choice) for params in each for choice in choices]


def check_logprobs_of(body: Body, longest: int) -> None:
    """Raises ApiError where a prompt of so many tokens has too many log-probabilities to tell."""
    wanted = body.wanted_of_prompt
    if wanted is not None and longest * (wanted + 1) > MOST_LOGPROBS_OF_A_PROMPT:
        most = MOST_LOGPROBS_OF_A_PROMPT // longest - 1
        field = "prompt_logprobs" if body.prompt_logprobs == wanted else "logprobs"
        hint = f"of {longest} tokens there may be {most} at most" if most >= 0 else f"{longest} tokens are too many"
        raise bad_request(f"{field} {wanted} is too much for the log-probabilities of a prompt: {hint}", field)


def check_logprobs_together(body: Body, prompt_tokens: int) -> None:
    """Raises ApiError where all prompts, of so many tokens together, have too many log-probabilities to be kept until
    they are told. Those of an answer are counted as they come: it is mostly shorter than it may be."""
    wanted = body.wanted_of_prompt
    asked = 0 if wanted is None else (body.n or 1) * prompt_tokens * (wanted + 1)
    if asked > MOST_LOGPROBS:
        field = logprobs_field(isinstance(body, ChatBody)) if body.prompt_logprobs is None else "prompt_logprobs"
        raise too_many_logprobs(f"these would be {asked}: ask for fewer of them, of choices or of prompts", field)


def check_logprobs_kept(gathered: int, chat: bool) -> None:
    """Raises ApiError where an answer that is told whole has come to more log-probabilities than can be kept."""
    if gathered > MOST_LOGPROBS:
        what = "and this answer has more already: ask for fewer of them, of choices or of tokens, or stream it"
        raise too_many_logprobs(what, logprobs_field(chat))


def logprobs_field(chat: bool) -> str:
    """What says how many of the likeliest tokens are told."""
    return "top_logprobs" if chat else "logprobs"


def too_many_logprobs(what: str, field: str) -> ApiError:
    return bad_request(f"a request may have {MOST_LOGPROBS} log-probabilities at most, {what}", field)


def for_each_choice(prompts: Prompts, body: Body) -> Prompts:
    return [prompt for prompt in prompts for _ in range(body.n or 1)]


def echoes_of(body: CompletionBody, prompts: Prompts, backend: Tokenizer) -> list[Echo]:
    """What stands before each choice where the prompt is to be repeated: its text as it came, or as its tokens say."""
    if not body.echo:
        return []
    as_it_came = body.truncate_prompt_tokens is None
    texts = [
        given if isinstance(given, str) and as_it_came else decode(backend, prompt)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]
    pairs = zip(texts, prompts, strict=True)
    return [
        Echo(text, prompt[0], body.logprobs, body.reads_alone) for text, prompt in pairs for _ in range(body.n or 1)
    ]


def ignored_by(body: Body) -> list[str]:
    return [name[:LONGEST_FIELD] for name in body.ignored[:FIELDS_TOLD]]
