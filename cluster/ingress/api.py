"""The routes: OpenAI's API, vLLM's small extras, health, metrics and the document of it all. No Ray in here."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from opentelemetry.trace import get_current_span
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.carry.directory import Directory
from cluster.errors import ApiError, bad_request
from cluster.ingress.auth import KeyFile, KeyGuard, wants_key
from cluster.ingress.models import Models, Served
from cluster.ingress.outcomes import Outcomes, outcome_of
from cluster.ingress.plans import RequestPlan, chat_plan, completion_plan, responses_plan
from cluster.ingress.streams import Pace, pieces_of
from cluster.observe.ingress_metrics import IngressMetrics, render
from cluster.observe.tracing import flush, trace_requests, tracer_provider
from cluster.options import ServeOptions
from cluster.wire.answer import Answer, requests_for
from cluster.wire.completions_told import EventStreamResponse, event_stream, new_head, whole
from cluster.wire.prompts import check_ids, decode, encode_end, most_tokens, read_body, render_chat
from cluster.wire.responses_asked import as_here
from cluster.wire.responses_told import new_response_head, response_events, whole_response
from cluster.wire.schemas import ChatBody, DetokenizeBody, TokenizeBody

PAGE_PATH = "playground/"  # relative to the API's root, of which a proxy may have taken a prefix
WITHOUT_PAGE = "TiDAR Cluster: OpenAI's API is at /v1, the document of all that there is at /openapi.json\n"


def build_api(directories: Mapping[str, Directory], options: ServeOptions) -> FastAPI:
    """The ingress' application; `directories` by the names that requests may ask for. Errors of any kind leave as
    OpenAI's error object."""
    name = secrets.token_hex(4)
    metrics, spans = IngressMetrics(name), tracer_provider(options.traces, name)
    models = Models(directories, options, metrics, spans.get_tracer("tidar"))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await models.start()
        yield
        await models.stop()
        await flush(spans)

    app = FastAPI(title="TiDAR Cluster", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_middleware(KeyGuard, api=KeyFile(options.api_keys), metrics=KeyFile(options.metrics_keys))
    app.add_middleware(Outcomes, metrics=metrics)
    if options.cors_origins:
        # Around all others: a browser asks first without a key, and shows an error only where it may read it.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Request-Id"),
        )
    trace_requests(app, spans)
    add_openai_routes(app, models, options)
    add_tokenizer_routes(app, models, options)
    add_service_routes(app, models, metrics, options.playground)
    add_document(app, options)
    return app


def add_openai_routes(app: FastAPI, models: Models, options: ServeOptions) -> None:
    pace = Pace(options.chunk_rate)

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card.describe() for card in models.cards()]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> JSONResponse:
        models.cards()  # while nothing is served, nobody is told that a name is wrong
        card, _ = models.named(name).directory.model
        return JSONResponse(card.describe())

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer(request, *await planned(request, completion_plan))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, *await planned(request, partial(chat_plan, reasoning=options.reasoning)))

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        begun = await planned(request, partial(responses_plan, reasoning=options.reasoning))
        try:
            return await answer(request, *begun)
        except ApiError as error:  # an engine's words for fields are a chat's
            raise as_here(error) from error

    async def planned(
        request: Request, plan: Callable[[dict[str, Any], ModelCard, Tokenizer], RequestPlan]
    ) -> tuple[Served, ModelCard, RequestPlan]:
        raw = await read_raw(request, options.max_body_bytes)
        served, value = await models.wanted(raw)
        outcome_of(request).model = served.name
        card, backend = await served.directory.awake()
        # In a thread: a long prompt takes a while to tokenize, and streams must go on meanwhile.
        return served, card, await asyncio.to_thread(plan, value, card, backend)

    async def answer(request: Request, served: Served, card: ModelCard, plan: RequestPlan) -> Response:
        body, repeated, outcome = plan.body, plan.repeated, outcome_of(request)
        chat = isinstance(body, ChatBody)
        head = new_head(card.name, chat) if repeated is None else new_response_head(card.name)
        operation = "chat" if chat else "text_completion"
        get_current_span().set_attributes(
            {"gen_ai.operation.name": operation, "gen_ai.request.model": card.name, "gen_ai.response.id": head.id}
        )
        made = Answer(
            card,
            requests_for(head.id, plan.prompts, plan.params, body.cache_salt or "", body.priority or 0),
            bool(body.tidar.trace),
            plan.echoes,
            of_prompt=body.prompt_logprobs,
            tells_end=not chat,
            tells_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            tells_thoughts=not isinstance(body, ChatBody) or body.include_reasoning is not False,
            tells_stop=bool(body.include_stop_str_in_output),
            by_part=repeated is not None,
            tools=plan.tools,
            follows=plan.follows,
            thinking=plan.thinking,
        )
        replicas = max(1, len(served.directory.replicas))
        pieces = pieces_of(made, served.carrier, served.admission, replicas, pace if body.stream else None)
        if body.stream:
            # The first piece before the status line: what goes wrong until then has a status of its own.
            first = await anext(pieces)
            if repeated is not None:
                return EventStreamResponse(response_events(head, repeated, made, first, pieces, outcome.broke))
            events = event_stream(head, made, first, pieces, outcome.broke, body.include_usage, body.counts_on)
            return EventStreamResponse(events)
        async with aclosing(pieces):
            gathered = [piece async for piece in pieces]
        # In a thread: the log-probabilities of long prompts take a while to write down.
        tell = partial(whole, head) if repeated is None else partial(whole_response, head, repeated)
        return Response(await asyncio.to_thread(tell, made, gathered), media_type="application/json")


def add_tokenizer_routes(app: FastAPI, models: Models, options: ServeOptions) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        def work(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> dict[str, Any]:
            body = read_body(value, TokenizeBody)
            text = render_chat(card, body) if body.prompt is None else body.prompt
            special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
            ids = encode_end(backend, text, special, most_tokens(body.truncate_prompt_tokens, card))
            found: dict[str, Any] = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids}
            found["token_strs"] = [backend.id_to_token(token) for token in ids] if body.return_token_strs else None
            return found

        return await in_thread(request, work)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        def work(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> dict[str, Any]:
            body = read_body(value, DetokenizeBody)
            check_ids(body.tokens, card, "tokens")
            return {"prompt": decode(backend, body.tokens)}

        return await in_thread(request, work)

    async def in_thread(
        request: Request, work: Callable[[dict[str, Any], ModelCard, Tokenizer], dict[str, Any]]
    ) -> JSONResponse:
        raw = await read_raw(request, options.max_body_bytes)
        served, value = await models.wanted(raw)
        outcome_of(request).model = served.name
        return JSONResponse(await asyncio.to_thread(work, value, *await served.directory.known()))


def add_service_routes(app: FastAPI, models: Models, counts: IngressMetrics, page: bool) -> None:
    # HEAD apart, and not in the document: of one operation it would tell under two names.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if not models.serves():
            return PlainTextResponse("no engine replica answers yet\n", 503, {"Retry-After": "1"})
        return PlainTextResponse("ok\n")

    @app.get("/metrics")
    async def metrics() -> Response:
        told = await models.metrics()
        others = counts.of_others(known for replica in told for known in replica.ingresses)
        text = render([*(replica.series for replica in told), *others, counts.collect()])
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return RedirectResponse(PAGE_PATH) if page else PlainTextResponse(WITHOUT_PAGE)


def add_document(app: FastAPI, options: ServeOptions) -> None:
    """`/openapi.json`, instead of what FastAPI would find out by itself: the routes read their bodies on their own.

    Made when it is first asked for, and in a thread: OpenAI's types alone take half a second of a start, or of streams.
    """

    @cache
    def made() -> dict[str, Any]:
        from cluster.wire.openapi import document

        api, metrics = options.api_keys is not None, options.metrics_keys is not None
        return document(app, lambda path: wants_key(path, api, metrics))

    app.openapi = made  # type: ignore[method-assign]  # FastAPI's own way to say it

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(made))


async def read_raw(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError: 415 where it is not said to be JSON, which a page of another site cannot say
    without asking first, or is compressed, 413 as soon as it is known to be over the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The request needs the header `Content-Type: application/json`.", code="not_json")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        said = f"The server unpacks no bodies: send this one without `Content-Encoding: {packed[:20]}`."
        raise ApiError(415, said, code="compressed")
    refusal = ApiError(413, f"The request body is larger than {limit} bytes.", code="body_too_large")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal():
        raise bad_request("content-length is no number")
    if int(stated) > limit:
        raise refusal
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise refusal
        parts.append(part)
    return b"".join(parts)


async def answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Routing's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, said, code="not_found" if error.status_code == 404 else None).response()
    response.headers.update(error.headers or {})
    return response
