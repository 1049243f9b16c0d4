"""The routes: OpenAI's API, vLLM's small extras, health, metrics and the document of it all. `carry` calls Ray."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.carry.directory import Directory
from cluster.errors import ApiError
from cluster.ingress.answering import Form, RequestLimits, answered, read_raw
from cluster.ingress.auth import KeyFile, KeyGuard, wants_key
from cluster.ingress.models import Models
from cluster.ingress.outcomes import Outcomes, outcome_of
from cluster.ingress.plans import chat_plan, completion_plan, input_tokens, responses_plan
from cluster.ingress.streams import Pace
from cluster.observe.ingress_metrics import IngressMetrics, render
from cluster.observe.tracing import flush, trace_requests, tracer_provider
from cluster.options import ServeOptions
from cluster.wire.completions_told import failed_stream
from cluster.wire.prompts import check_ids, decode, encode_end, most_tokens, read_body, render_chat
from cluster.wire.reach import check_reach
from cluster.wire.responses_told import failed_response
from cluster.wire.schemas import DetokenizeBody, TokenizeBody

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
    pace, limits = Pace(options.chunk_rate), RequestLimits(options.max_body_bytes, options.priorities)

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card.describe() for card in models.cards()]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> JSONResponse:
        models.cards()  # while nothing is served, nobody is told that a name is wrong
        card, _ = models.named(name).directory.model
        return JSONResponse(card.describe())

    completion = Form(completion_plan, failed_stream)
    chat_answer = Form(partial(chat_plan, reasoning=options.reasoning), failed_stream)
    response = Form(partial(responses_plan, reasoning=options.reasoning), failed_response)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answered(request, completion, models, limits, pace)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(request, chat_answer, models, limits, pace)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await answered(request, response, models, limits, pace)


def add_tokenizer_routes(app: FastAPI, models: Models, options: ServeOptions) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        def work(value: dict[str, Any], card: ModelCard, backend: Tokenizer) -> dict[str, Any]:
            body = read_body(value, TokenizeBody)
            text = render_chat(card, body) if body.prompt is None else body.prompt
            special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
            most = most_tokens(body.truncate_prompt_tokens, card)
            if most is None:
                check_reach(text, card, "messages" if body.prompt is None else "prompt")
            ids = encode_end(backend, text, special, most)
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

    @app.post("/v1/responses/input_tokens")
    async def count_input(request: Request) -> JSONResponse:
        return await in_thread(request, input_tokens)

    async def in_thread(
        request: Request, work: Callable[[dict[str, Any], ModelCard, Tokenizer], dict[str, Any]]
    ) -> JSONResponse:
        raw = await read_raw(request, options.max_body_bytes)
        served, _, value = await models.wanted(raw)
        outcome_of(request).is_for(served.name)
        return JSONResponse(await models.work(len(raw), work, value, *await served.directory.known()))


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


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    outcome_of(request).error = error
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Routing's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None).response()
    response.headers.update(error.headers or {})
    return response
