"""What the span of an HTTP request says of its route, its id and its end."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.types import Message

from cluster.observe.ingress_metrics import IngressMetrics
from cluster.observe.tracing import trace_requests
from tests.cluster.ingress.test_api import ask
from tests.cluster.ingress.test_outcomes import app_of


class Traced:
    """The application, and the spans that it has made."""

    def __init__(self) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.app: FastAPI = app_of(IngressMetrics("here"))
        trace_requests(self.app, provider)

    def span_of(self, method: str, path: str, **fields: Any) -> ReadableSpan:
        ask(self.app, method, path, **fields)
        return self.last()

    def last(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        self.exporter.clear()
        return span


@pytest.fixture
def traced() -> Traced:
    return Traced()


def told(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    return tuple((span.attributes or {}).get(name) for name in names)


def test_names_are_of_routes_not_of_paths(traced: Traced) -> None:
    for how in ("well", "unready"):
        span = traced.span_of("POST", f"/stream/{how}")
        assert (span.name, *told(span, "http.route")) == ("POST /stream/{how}", "/stream/{how}")
    assert traced.span_of("PUT", "/whole").name == "PUT /whole"
    assert traced.span_of("BREW", "/whole").name == "HTTP /whole"
    for number in range(3):
        span = traced.span_of("GET", f"/nope/{number}")
        assert (span.name, *told(span, "http.route")) == ("GET", None)


def test_attributes_have_the_names_of_today(traced: Traced) -> None:
    span = traced.span_of("POST", "/whole?a=b")
    assert told(span, "http.request.method", "http.response.status_code", "url.path") == ("POST", 200, "/whole")
    assert not {"http.method", "http.status_code", "http.target", "net.peer.ip"} & set(span.attributes or {})


def test_a_request_is_found_by_its_id_whatever_came_of_it(traced: Traced) -> None:
    for path in ("/whole", "/no", "/lost/away"):
        span = traced.span_of("POST", path, headers={"X-Request-Id": f"mine{path}"})
        assert told(span, "tidar.http_request_id") == (f"mine{path}",)


@pytest.mark.parametrize(
    ("path", "status", "code", "message"),
    [
        ("/lost/away", 503, "not_ready", "It is\naway."),
        ("/bug", 500, "internal_error", "The server failed on this request; its log says why."),
        ("/stream/unready", 200, "503", "none"),
        ("/stream/bug", 200, "internal_error", "The server failed on this request; its log says why."),
    ],
)
def test_what_the_server_failed_is_an_error(traced: Traced, path: str, status: int, code: str, message: str) -> None:
    span = traced.span_of("POST", path)
    assert told(span, "http.response.status_code", "error.type") == (status, code)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, message)


@pytest.mark.parametrize("path", ["/whole", "/stream/well", "/no", "/too-many"])
def test_what_is_served_or_refused_is_none(traced: Traced, path: str) -> None:
    span = traced.span_of("POST", path)
    assert span.status.status_code is StatusCode.UNSET
    assert told(span, "error.type", "tidar.cancelled") == (None, None)


@pytest.mark.parametrize("path", ["/whole", "/endless"])
def test_a_client_that_leaves_is_told_apart(traced: Traced, path: str) -> None:
    """While its request was read, or in the midst of its answer, by Serve's cancelling it."""

    @traced.app.post("/endless")
    async def endless() -> None:
        await asyncio.Event().wait()

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    scope |= {"root_path": "", "http_version": "1.1", "scheme": "http"}

    async def run() -> None:
        request = asyncio.create_task(traced.app(scope, leave, send))
        await asyncio.wait([request], timeout=0.2)
        request.cancel()
        await asyncio.wait([request])

    asyncio.run(run())
    span = traced.last()
    assert (span.name, *told(span, "tidar.cancelled", "error.type")) == (f"POST {path}", True, None)
    assert span.status.status_code is StatusCode.UNSET
