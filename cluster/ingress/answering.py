"""A request of the OpenAI API from its body to its answer: planned, carried, and told whole or as events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from opentelemetry.trace import get_current_span
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.errors import MODEL_CHANGED, ApiError, bad_request
from cluster.ingress.late import begun_in_time
from cluster.ingress.models import Models, Served
from cluster.ingress.outcomes import outcome_of
from cluster.ingress.plans import RequestPlan, check_logprobs_kept
from cluster.ingress.streams import Pace, pieces_of
from cluster.wire.answer import Answer, Piece, requests_for
from cluster.wire.completions_told import EventStreamResponse, chain, event_stream, new_head, whole
from cluster.wire.responses_asked import as_here
from cluster.wire.responses_told import new_response_head, response_events, whole_response

SILENT_SECONDS = 30.0  # for which a body may stop coming: it holds a connection, and what came of it

NO_PRIORITIES = "priority would take the places of others here: leave it out, or start the server with --priorities"

Plan = Callable[[dict[str, Any], ModelCard, Tokenizer], RequestPlan]


@dataclass(frozen=True, slots=True)
class Form:
    """A route's form of requests and answers. failed: all of a stream that came to nothing but an error."""

    plan: Plan
    failed: Callable[[ApiError], bytes]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may be: its body's bytes at most, and whether it may go before others."""

    body_bytes: int
    priorities: bool


async def answered(request: Request, form: Form, models: Models, limits: RequestLimits, pace: Pace) -> Response:
    """The answer to a request. Raises ApiError for whatever goes wrong before the first token, and before it is late
    where the answer is a stream (`late.py`)."""
    raw = await read_raw(request, limits.body_bytes)
    outcome = outcome_of(request)
    outcome.asked()

    def allowed_plan(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> RequestPlan:
        if value.get("priority") and not limits.priorities:
            raise bad_request(NO_PRIORITIES, "priority")
        return form.plan(value, card, backend)

    async def made() -> Response:
        try:
            return await _answer(request, *await _planned(request, raw, allowed_plan, models), pace)
        except ApiError as error:
            if error.code != MODEL_CHANGED:
                raise
        # No token is out, and the model that took the other's place may answer as well.
        return await _answer(request, *await _planned(request, raw, allowed_plan, models, anew=True), pace)

    return await begun_in_time(made(), form.failed, outcome)


async def read_raw(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError: 415 where it is not said to be JSON, which a page of another site cannot say
    without asking first, or is compressed, 413 as soon as it is known to be over the limit, 408 where no more comes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The request needs the header `Content-Type: application/json`.", code="not_json")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise ApiError(
            415,
            f"Compressed request bodies are not supported: send this one without `Content-Encoding: {packed[:20]}`.",
            code="compressed",
        )
    refusal = ApiError(413, f"The request body is larger than {limit} bytes.", code="body_too_large")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal():
        raise bad_request("invalid Content-Length")
    digits = stated.lstrip("0")  # of which Python makes no number where they are thousands
    if len(digits) > len(str(limit)) or int(digits or "0") > limit:
        raise refusal
    parts: list[bytes] = []
    size = 0
    coming = request.stream()
    while True:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await anext(coming, None)
        except TimeoutError:
            message = f"Nothing more came of the request's body for {SILENT_SECONDS:g} seconds. Send it again."
            raise ApiError(408, message, code="body_timeout") from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > limit:
            raise refusal
        parts.append(part)


async def _planned(
    request: Request, raw: bytes, plan: Plan, models: Models, anew: bool = False
) -> tuple[Served, ModelCard, RequestPlan]:
    """What a body asks for, of whom. anew: by who is there now, which may not be known yet."""
    served, name, value = await models.wanted(raw)
    outcome_of(request).is_for(served.name)
    outcome_of(request).streams = value.get("stream") is True
    if anew:
        await served.directory.look()
    card, backend = await served.directory.awake()
    if name not in (None, card.name):  # another model has come meanwhile
        served = models.named(name)
        card, backend = served.directory.model
    # In a thread: a long prompt takes a while to tokenize, and streams must go on meanwhile.
    return served, card, await models.work(len(raw), plan, value, card, backend)


async def _answer(request: Request, served: Served, card: ModelCard, plan: RequestPlan, pace: Pace) -> Response:
    options, repeated, outcome = plan.options, plan.repeated, outcome_of(request)
    outcome.ignored = plan.ignored
    head = new_head(card.name, options.chat) if repeated is None else new_response_head(card.name)
    get_current_span().set_attributes(
        {
            "gen_ai.provider.name": "tidar",
            "gen_ai.operation.name": "chat" if options.chat else "text_completion",
            "gen_ai.request.model": card.name,
            "gen_ai.response.model": card.name,
            "gen_ai.response.id": head.id,
        }
    )
    made = _answer_to(plan, card, head.id)
    replicas = max(1, len(served.directory.replicas))
    pieces = pieces_of(made, served.carrier, served.admission, replicas, pace if options.stream else None)
    try:
        # The first piece before the status line: what goes wrong until then has a status of its own.
        first = await anext(pieces)
        outcome.waits_no_more()
        if options.stream:
            if repeated is not None:
                told = response_events(head, repeated, plan.namespaced, made, first, pieces, outcome.broke)
                return EventStreamResponse(told)
            events = event_stream(head, made, first, pieces, outcome.broke)
            return EventStreamResponse(events)
        gathered = await all_of(chain(first, pieces), plan)
    except ApiError as error:
        if repeated is None:
            raise
        raise as_here(error) from error  # an engine's words for fields are a chat's
    # In a thread: the log-probabilities of long prompts take a while to write down.
    tell = partial(whole, head) if repeated is None else partial(whole_response, head, repeated, plan.namespaced)
    return Response(await asyncio.to_thread(tell, made, gathered), media_type="application/json")


async def all_of(pieces: AsyncGenerator[Piece, None], plan: RequestPlan) -> list[Piece]:
    """The pieces of an answer that is told whole. Raises ApiError (400) where their log-probabilities are more than can
    be kept: it may have been as long as it liked."""
    gathered: list[Piece] = []
    logprobs = 0
    async with aclosing(pieces):
        async for piece in pieces:
            logprobs += sum(1 + len(entry.top) for entry in piece.logprobs)
            check_logprobs_kept(logprobs, plan.options.chat)
            gathered.append(piece)
    return gathered


def _answer_to(plan: RequestPlan, card: ModelCard, answer_id: str) -> Answer:
    return Answer(
        card,
        requests_for(answer_id, plan.prompts, plan.params, plan.cache_salt, plan.priority),
        plan.options,
        plan.echoes,
        by_part=plan.repeated is not None,
        tools=plan.tools,
        constraint_field=plan.constraint_field,
        thinking=plan.thinking,
    )
