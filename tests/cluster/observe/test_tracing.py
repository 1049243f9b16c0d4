"""Traces: what a collector gets of a request, and of a stream that lost its replica."""

import asyncio
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from cluster.errors import ApiError
from cluster.observe.tracing import check_traces, flush, tracer_provider
from cluster.options import ServeOptions
from tests import plain_http
from tests.cluster.collector import Collector
from tests.cluster.guarded import Guarded
from tests.cluster.scripted import LENGTH, Act, Cast, carry
from tidar_core.config import ConfigError
from tidar_core.settings import read_options


def attempts(*acts: Act) -> list[ReadableSpan]:
    """The spans of one request over replicas that do this."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with suppress(ApiError):
        carry(Cast(acts), tracer=provider.get_tracer("test"))
    return list(exporter.get_finished_spans())


def told(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    attributes = span.attributes or {}
    return tuple(attributes.get(f"tidar.{name}") for name in names)


def test_a_lost_replica_ends_one_attempt_and_begins_another() -> None:
    first, second = attempts(Act(steps=3, run=2, end="dies"), Act())
    assert told(first, "attempt", "replica", "tokens_before", "tokens") == (0, "r0", 0, 6)
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description
    assert told(second, "attempt", "replica", "tokens_before", "tokens") == (1, "r1", 6, LENGTH - 6)
    assert second.status.status_code is StatusCode.UNSET
    for span in (first, second):
        assert [event.name for event in span.events] == ["first tokens"]
    assert first.end_time is not None
    assert second.start_time is not None
    assert first.end_time <= second.start_time


def test_every_attempt_that_is_given_up_has_ended_with_its_cause() -> None:
    spans = attempts(Act(steps=0, end="dies"))
    assert len(spans) == 4, "as many as a request may lose replicas without a token"
    assert all(span.status.status_code is StatusCode.ERROR and span.end_time for span in spans)
    assert all(span.events == () for span in spans)


def ask(guarded: Guarded, stream: bool, chat: bool = False, host: str | None = None, **more: Any) -> str:
    """The id of the trace that the client began."""
    trace_id = secrets.token_hex(16)
    headers = {**guarded.headers, "traceparent": f"00-{trace_id}-{'1' * 16}-01", "X-Request-Id": f"id-{trace_id}"}
    if host is not None:
        headers["Host"] = host
    body = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "stream": stream, "model": "tiny", **more}
    body |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a b c"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = plain_http.post(f"{guarded.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == (400 if more.get("top_p") == 7 else 200), answer.text
    return trace_id


@pytest.mark.parametrize(("stream", "chat", "operation"), [(True, False, "text_completion"), (False, True, "chat")])
def test_a_request_is_a_span_within_the_clients_with_an_attempt_in_it(
    guarded: Guarded, collector: Collector, stream: bool, chat: bool, operation: str
) -> None:
    trace_id = ask(guarded, stream, chat)
    request, attempt = sorted(collector.of_trace(trace_id, lambda spans: len(spans) == 2), key=lambda span: span.parent)
    if attempt.name != "attempt":
        request, attempt = attempt, request
    assert (request.parent, attempt.parent) == ("1" * 16, request.span_id)
    assert request.service == attempt.service == "tidar"
    route = f"/v1/{'chat/' if chat else ''}completions"
    assert (request.name, request.attributes["http.route"]) == (f"POST {route}", route)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["tidar.http_request_id"] == f"id-{trace_id}"
    assert request.attributes["gen_ai.operation.name"] == operation
    assert request.attributes["gen_ai.provider.name"] == "tidar"
    assert request.attributes["gen_ai.request.model"] == request.attributes["gen_ai.response.model"] == "tiny"
    assert request.attributes["gen_ai.usage.output_tokens"] == 9
    assert request.attributes["gen_ai.usage.input_tokens"] > 0
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 1 <= request.attributes["tidar.decode_steps"] <= 8
    assert attempt.attributes["tidar.tokens"] == 9
    assert attempt.attributes["tidar.request_id"].startswith(request.attributes["gen_ai.response.id"])
    assert attempt.events == ("first tokens",)
    assert not request.failed
    assert not attempt.failed


def test_several_choices_are_several_attempts_and_a_refusal_is_none(guarded: Guarded, collector: Collector) -> None:
    spans = collector.of_trace(ask(guarded, True, n=3, temperature=1.0), lambda spans: len(spans) == 4)
    assert sorted(span.name for span in spans) == ["POST /v1/completions", *["attempt"] * 3]
    trace_id = ask(guarded, False, top_p=7)
    (refused,) = collector.of_trace(trace_id, lambda spans: len(spans) > 0)
    assert refused.name == "POST /v1/completions"
    assert refused.attributes["tidar.http_request_id"] == f"id-{trace_id}"


def test_being_looked_at_leaves_no_span(guarded: Guarded, collector: Collector) -> None:
    plain_http.get(f"{guarded.url}/health")
    plain_http.get(f"{guarded.url}/metrics", headers=guarded.headers)
    spans = collector.of_trace(ask(guarded, True, host="metrics.example.org"), lambda spans: len(spans) == 2)
    assert {span.name for span in spans} == {"POST /v1/completions", "attempt"}, "a host's name is no route"
    assert not [span.name for span in collector.spans if "health" in span.name or "metrics" in span.name]


def test_name_and_sampler_are_opentelemetrys_and_the_collector_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    provider: Any = tracer_provider("http://127.0.0.1:9", "here")
    assert provider.resource.attributes["service.name"] == "mine"
    assert not provider.get_tracer("x").start_span("y").is_recording()
    provider.shutdown()


def test_without_a_collector_no_span_is_made() -> None:
    provider = tracer_provider(None, "here")
    assert isinstance(provider, NoOpTracerProvider)
    assert not provider.get_tracer("x").start_span("y").is_recording()


def test_a_collector_that_is_away_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1.5")  # enough for a second try
    with socket.socket() as taken:  # where nobody listens
        taken.bind(("127.0.0.1", 0))
        provider: Any = tracer_provider(f"http://127.0.0.1:{taken.getsockname()[1]}", "here")
        with caplog.at_level("INFO", logger="ray.serve"):
            for _ in range(2):
                provider.get_tracer("x").start_span("y").end()
                provider.force_flush()
        provider.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert line.startswith("spans do not reach the collector: ")
    assert "refused" in line, "the first try said why"
    others = [said for said in capfd.readouterr().err.splitlines() if line not in said]  # Serve may have set its log up
    assert not any("export" in said for said in others), "OpenTelemetry's own lines"


def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr("cluster.observe.tracing.FLUSH_SECONDS", 0.05)

    class Stuck:
        def shutdown(self) -> None:
            released.wait(20)

    async def flushed() -> float:
        began = time.monotonic()
        await flush(Stuck())
        took = time.monotonic() - began
        released.set()
        return took

    assert asyncio.run(flushed()) < 5


@pytest.mark.parametrize("address", ["collector:4318", "grpc://collector:4317", "http://", "http://a b"])
def test_what_is_no_collectors_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="http://collector:4318") as caught:
        read_options(ServeOptions, {"traces": address})
    assert "\n" not in str(caught.value)


def test_missing_packages_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.asgi", None)
    check_traces(None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[traces\]' in the repository"):
        check_traces("http://collector:4318")
