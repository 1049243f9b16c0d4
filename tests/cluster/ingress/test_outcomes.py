"""What comes of requests is counted as their clients see it, once for each."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ApiError, full
from cluster.ingress.api import answer_error
from cluster.ingress.outcomes import Outcomes, outcome_of
from cluster.observe.ingress_metrics import IngressMetrics, render
from cluster.wire import completions_told
from cluster.wire.answer import Answer, Piece, requests_for
from cluster.wire.completions_told import EventStreamResponse, event_stream, new_head
from tests.cluster.ingress.test_api import ask
from tests.cluster.observe.behind import Behind
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams

CARD = card_for(tiny_tokenizer())
UNKNOWN = 7  # no choice of the answer


async def pieces(*given: Piece | Exception) -> AsyncGenerator[Piece, None]:
    for one in given:
        if isinstance(one, Exception):
            raise one
        yield one


@pytest.fixture
def metrics() -> IngressMetrics:
    return IngressMetrics("here")


@pytest.fixture
def api(metrics: IngressMetrics) -> FastAPI:
    return app_of(metrics)


def app_of(metrics: IngressMetrics) -> FastAPI:
    """Where requests end in all the ways that there are."""
    app = FastAPI()
    app.add_exception_handler(ApiError, answer_error)
    app.add_middleware(Outcomes, metrics=metrics)
    follows = {
        "well": Piece(0, ("b",), Finish(FinishReason.STOP)),
        "unready": ApiError(503, "none"),
        "bug": KeyError("a secret"),
        "unwritable": Piece(UNKNOWN, ("b",)),
    }

    @app.post("/stream/{how}")
    async def stream(request: Request, how: str) -> Response:
        outcome = outcome_of(request)
        outcome.is_for("tiny")
        rest = pieces(Piece(0, ("a",)), follows[how]) if how in follows else pieces(KeyError("a secret"))
        first = await anext(rest)
        answer = Answer(CARD, requests_for("answer", [(1,)], [SamplingParams(max_tokens=5)]))
        return EventStreamResponse(event_stream(new_head("tiny", False), answer, first, rest, outcome.broke))

    @app.post("/whole")
    async def whole(request: Request) -> Response:
        outcome_of(request).is_for("tiny")
        await request.body()
        return JSONResponse({})

    @app.post("/bug")
    async def bug() -> Response:
        raise KeyError("a secret")

    @app.post("/lost/{why}")
    async def lose(request: Request, why: str) -> Response:
        outcome_of(request).model = "tiny"
        raise ApiError(503, f"It is\n{why}.", code="not_ready")

    @app.post("/too-many")
    async def refuse_for_now() -> Response:
        raise full()

    @app.post("/full")
    async def refuse() -> Response:
        return full().response()

    @app.get("/page")
    async def page() -> Response:
        return full().response()

    return app


def counted(metrics: IngressMetrics) -> dict[tuple[str, str], float]:
    """Of each model and code, where there is something."""
    samples = [sample for metric in metrics.collect() for sample in metric.samples]
    return {
        (sample.labels["model_name"], sample.labels["code"]): sample.value
        for sample in samples
        if sample.name == "tidar:http_responses_total" and sample.value
    }


def test_a_stream_counts_by_what_it_ended_of(api: FastAPI, metrics: IngressMetrics) -> None:
    for how in ("well", "unready", "bug", "unwritable", "well"):
        answer = ask(api, "POST", f"/stream/{how}")
        assert (answer.status_code, "error" in answer.text) == (200, how != "well")
    assert counted(metrics) == {("tiny", "200"): 2, ("tiny", "503"): 1, ("tiny", "500"): 2}


def test_a_stream_that_fails_before_it_begins_is_an_answer(api: FastAPI, metrics: IngressMetrics) -> None:
    answer = ask(api, "POST", "/stream/before")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text
    assert counted(metrics) == {("tiny", "500"): 1}


def test_what_is_refused_and_what_fails_counts_and_pages_do_not(api: FastAPI, metrics: IngressMetrics) -> None:
    for method, path in (("POST", "/whole"), ("POST", "/full"), ("POST", "/bug"), ("POST", "/no"), ("GET", "/page")):
        ask(api, method, path)
    assert counted(metrics) == {("tiny", "200"): 1, ("", "429"): 1, ("", "500"): 1, ("", "404"): 1}


def test_a_client_that_leaves_before_it_has_asked_got_nothing(api: FastAPI, metrics: IngressMetrics) -> None:
    sent: list[Message] = []

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/whole", "headers": [], "query_string": b""}
    asyncio.run(api({**scope, "root_path": "", "http_version": "1.1"}, leave, send))
    assert sent == []
    assert counted(metrics) == {("tiny", "499"): 1}


def test_the_usual_stands_at_0_before_it_happens(metrics: IngressMetrics) -> None:
    metrics.watch("tiny", Behind())
    page = render([metrics.collect()]).decode()
    for model, code in (
        ("tiny", "200"),
        ("tiny", "499"),
        ("tiny", "429"),
        ("tiny", "500"),
        ("tiny", "503"),
        ("", "401"),
        ("", "500"),
    ):
        assert f'tidar:http_responses_total{{code="{code}",ingress="here",model_name="{model}"}} 0.0' in page


@pytest.mark.parametrize("halts", [False, True])
def test_a_client_that_reads_nothing_any_more_loses_its_answer(
    halts: bool, metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its places would be taken until it closes its connection: also where there is nothing to tell it."""
    monkeypatch.setattr(completions_told, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(completions_told, "SILENT_SECONDS", 0.05)
    unread = completions_told.COMMENT if halts else b"3"
    closed: list[int] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            for number in count():
                yield b"%d" % number
                if halts and number == 3:
                    await asyncio.Event().wait()
        finally:
            closed.append(number)

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStreamResponse(endless())(scope, receive, send)

    async def stay() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message.get("body") == unread:
            await asyncio.Event().wait()

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"version": "3.0"}}
    asyncio.run(asyncio.wait_for(Outcomes(stream, metrics)(scope, stay, send), 60))
    assert closed == [3]
    assert counted(metrics) == {("", "499"): 1}
