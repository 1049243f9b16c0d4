"""A first token that is late: a stream has begun without it, and all else is as it would have been."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.types import Message
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.carry.handover import Carrier, Update
from cluster.errors import ApiError, bad_request, server_error
from cluster.ingress import late
from cluster.ingress.api import build_api
from cluster.ingress.outcomes import Outcome
from cluster.observe.ingress_metrics import IngressMetrics
from cluster.observe.tracing import RequestSpan
from cluster.options import ServeOptions
from cluster.wire import completions_told
from cluster.wire.completions_told import COMMENT, EventStreamResponse, failed_stream
from tests.cluster.ingress.test_answering import Replaced, run
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, tool_tokenizer

ASKED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
}
EACH_ITS_OWN = re.compile(
    rb'(cmpl|resp|msg)[-_][0-9a-f]{32}|"(created|created_at|completed_at|seed)":\d+|"metrics":\{[^}]*\}'
)


class Asleep(Replaced):
    """Its model wakes, or is given up, when a test says so."""

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes=True)
        self.wakes = asyncio.Event()
        self.waited_for = 0  # by how many requests
        self._fails = fails

    async def awake(self) -> tuple[ModelCard, Tokenizer]:
        self.waited_for += 1
        try:
            await self.wakes.wait()
        finally:
            self.waited_for -= 1
        if self._fails is not None:
            raise self._fails
        await self.look()
        return self.model


class Client:
    """One request: what is sent back, and what its client does next when some of that has come."""

    def __init__(self, api: FastAPI, route: str, body: dict[str, Any], then: Callable[["Client"], bool]) -> None:
        self.sent: list[Message] = []
        self.leaves_behind = 0
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._leaves = asyncio.Event()
        self._then = then
        path = f"/v1/{route}"
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("tidar", 1),
            "server": ("tidar", 80), "headers": [(b"content-type", b"application/json"), (b"host", b"tidar")],
        }  # fmt: skip
        self._api = api

    async def __call__(self) -> None:
        await asyncio.wait_for(self._api(self._scope, self._receive, self._send), 60)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def comments(self) -> int:
        return sum(message.get("body") == COMMENT for message in self.sent)

    @property
    def told(self) -> bytes:
        """All but the comments."""
        return b"".join(message.get("body", b"") for message in self.sent).replace(COMMENT, b"")

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if self._then(self):
            self._leaves.set()


def answered(
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    directory: Asleep,
    late_by: int | None,
    leaves: bool = False,
    **more: Any,
) -> Client:
    """To who waits for a model that wakes after so many comments; at once for None. leaves: instead of that."""

    async def asked() -> Client:
        if late_by is None:
            directory.wakes.set()

        def then(client: Client) -> bool:
            if client.comments == late_by and not leaves:
                directory.wakes.set()
            return leaves and client.comments == late_by

        api = build_api({"tiny": directory}, ServeOptions())
        client = Client(api, route, {"stream": True, **ASKED[route], **more}, then)
        await client()
        await asyncio.sleep(0.05)  # whatever was cancelled ends; `asyncio.run` cancels all that is left
        client.leaves_behind = directory.waited_for
        return client

    monkeypatch.setattr(Carrier, "run", run)
    monkeypatch.setattr(late, "LATE_SECONDS", 0.05 if late_by is not None else 60.0)
    monkeypatch.setattr(completions_told, "SILENT_SECONDS", 0.05)
    return asyncio.run(asked())


@pytest.mark.parametrize("route", ASKED)
def test_a_stream_that_begins_before_its_first_token_tells_the_same(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = answered(monkeypatch, route, Asleep(), None)
    waited = answered(monkeypatch, route, Asleep(), 2)
    assert (usual.status, waited.status) == (200, 200)
    assert usual.told.count(b"data: ") >= 2
    assert EACH_ITS_OWN.sub(b"", waited.told) == EACH_ITS_OWN.sub(b"", usual.told)
    assert waited.comments >= 2
    assert waited.sent[0]["headers"] == usual.sent[0]["headers"]


@pytest.mark.parametrize("route", ASKED)
@pytest.mark.parametrize(
    ("error", "status"), [(bad_request("it is too long", "prompt"), 400), (KeyError("a secret"), 500)]
)
def test_what_goes_wrong_once_it_has_begun_is_told_in_it(
    route: str, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("cluster.ingress.request_log.RequestLog.ended", lambda *given: ended.append(given[3]))
    client = answered(monkeypatch, route, Asleep(error), 1)
    assert (client.status, ended) == (200, [status])
    first, *rest = client.told.removesuffix(b"\n\n").split(b"\n\n")
    assert rest == ([] if route == "responses" else [b"data: [DONE]"])
    name, _, data = first.rpartition(b"data: ")
    assert name == (b"event: error\n" if route == "responses" else b"")
    told = json.loads(data)
    shown = error if isinstance(error, ApiError) else server_error()
    assert {"error": told["error"]} == shown.body()
    assert b"secret" not in client.told
    if route == "responses":
        assert told == {**told["error"], "error": told["error"], "type": "error", "sequence_number": 0}


@pytest.mark.parametrize("late_by", [0, 1])
def test_a_client_that_leaves_meanwhile_is_waited_for_no_more(late_by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has left as soon as the stream begins."""
    client = answered(monkeypatch, "completions", Asleep(), late_by, leaves=True)
    assert client.told == b""
    assert not client.leaves_behind


def test_a_stream_whose_body_is_read_late_begins_soon_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> None:
        outcome = Mock(streams=None)
        asking = asyncio.create_task(late.begun_in_time(Asleep().awake(), Mock(), outcome))
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert not done, "it may be no stream"
        outcome.streams = True
        assert isinstance(await asyncio.wait_for(asking, 60), EventStreamResponse)

    monkeypatch.setattr(late, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(late, "LOOK_SECONDS", 0.05)
    asyncio.run(asked())


def test_a_stream_that_is_closed_before_it_is_read_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> None:
        outcome = Mock(streams=True)
        response = await late.begun_in_time(asleep.awake(), Mock(), outcome)
        assert isinstance(response, EventStreamResponse)
        assert asleep.waited_for == 1
        await response.events.aclose()
        await asyncio.sleep(0)
        assert (asleep.waited_for, outcome.broke.called) == (0, False)

    asleep = Asleep()
    monkeypatch.setattr(late, "LATE_SECONDS", 0.05)
    asyncio.run(asked())


@pytest.mark.parametrize(("error", "status"), [(bad_request("it is too long", "prompt"), 400), (None, 200)])
def test_an_answer_that_is_told_whole_is_waited_for(
    error: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Asleep):
        async def awake(self) -> tuple[ModelCard, Tokenizer]:
            asyncio.get_running_loop().call_later(0.2, self.wakes.set)
            return await super().awake()

    client = answered(monkeypatch, "completions", Slow(error), 1, stream=False)
    assert (client.status, client.comments) == (status, 0)


@pytest.mark.parametrize("halts", [False, True])
def test_a_comment_comes_where_tokens_are_far_apart_and_nowhere_else(
    halts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(40):
            await asyncio.sleep(0.3 if halts and number == 20 else 0.01)
            yield b"data: %d\n\n" % number

    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    monkeypatch.setattr(completions_told, "SILENT_SECONDS", 0.2)
    asyncio.run(EventStreamResponse(events()).stream_response(send))
    assert (COMMENT in sent) == halts
    assert [one for one in sent if one not in (COMMENT, b"")] == [b"data: %d\n\n" % number for number in range(40)]
    assert COMMENT not in (sent[0], sent[-1])


@pytest.mark.parametrize("late_by", [0.01, 60.0])
@pytest.mark.parametrize("stream", [False, True])
def test_what_came_of_an_answer_that_is_given_up_is_known_before_its_request_ends(
    late_by: float, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its span takes nothing more in from then on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def asked() -> None:
        is_run = asyncio.Event()

        async def endless(*_: object) -> AsyncGenerator[Update, None]:
            is_run.set()
            await asyncio.Event().wait()
            yield Update("r1", ())

        monkeypatch.setattr(Carrier, "run", endless)
        directory = Asleep()
        directory.wakes.set()
        api = build_api({"tiny": directory}, ServeOptions())
        request = asyncio.create_task(Client(api, "completions", {"prompt": "a", "stream": stream}, lambda _: False)())
        await is_run.wait()
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait([request])

    monkeypatch.setattr("cluster.ingress.api.tracer_provider", lambda *_: provider)
    monkeypatch.setattr(late, "LATE_SECONDS", late_by)
    asyncio.run(asked())
    (span,) = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert "gen_ai.usage.output_tokens" in (span.attributes or {})


def test_what_fails_while_it_is_given_up_is_asked_for() -> None:
    """Else asyncio reports it as an exception that nobody has retrieved."""
    reported: list[dict[str, Any]] = []

    async def making() -> Response:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise bad_request("it ended otherwise") from None
        raise AssertionError

    async def given_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        outcome = Outcome(IngressMetrics("here"), RequestSpan({"type": "http", "headers": []}))
        waiting = asyncio.create_task(late.begun_in_time(making(), failed_stream, outcome))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    asyncio.run(given_up())
    gc.collect()
    assert reported == []
