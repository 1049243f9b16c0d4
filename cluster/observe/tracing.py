"""OpenTelemetry traces: where a request was, and what it waited for.

OpenTelemetry's own ASGI middleware makes a span of each HTTP request, within the client's where that sent a
`traceparent`; what was asked and what came of it is told on it under OpenTelemetry's names for generative AI. Within it
lies a span for each attempt (`cluster.carry`): a stream that lost its replica shows two, one behind the other, or begun
while the first was quiet.

Spans leave by OTLP over HTTP, from a thread of their own. Without a collector none is made.
"""

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from opentelemetry.trace import NoOpTracerProvider, StatusCode, Tracer, TracerProvider, get_current_span
from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.errors import ApiError, cut
from cluster.observe.seldom import Seldom
from tidar_core.config import ConfigError
from tidar_core.error_text import unbroken

FLUSH_SECONDS = 2.0
UNREACHED_SECONDS = 60.0  # between two lines that say so
LONGEST_REASON = 300  # characters
# Where OpenTelemetry says what becomes of spans that it sends: on stderr, in five lines for each batch that it tries.
SENDERS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk.trace.export", "opentelemetry.sdk._shared_internal")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE")
UNTRACED = r"^[^/]*//[^/]*/(health|metrics)(\?|$)"  # asked for every few seconds

log = logging.getLogger("ray.serve")


def check_traces(collector: str | None) -> None:
    """Raise ConfigError where spans are wanted and the packages for it are missing."""
    if collector is not None:
        _provider(collector, "check").shutdown()


def tracer_provider(collector: str | None, ingress: str) -> TracerProvider:
    """What makes the spans of an ingress: for the collector at a base address ("http://collector:4318"), or none.

    OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER have their meaning; the collector is this one, whatever
    OTEL_EXPORTER_OTLP_ENDPOINT says. Raises ConfigError where the packages are missing.
    """
    if collector is None:
        return NoOpTracerProvider()
    unreached = Unreached()
    for name in SENDERS:
        sender = logging.getLogger(name)
        sender.handlers, sender.propagate = [unreached], False
    return _provider(collector, ingress)


class Unreached(logging.Handler):
    """Says in Serve's log, now and then, that spans do not reach the collector."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seldom = Seldom(UNREACHED_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        if times := self._seldom.times():
            reason = cut(unbroken(record.getMessage()), LONGEST_REASON)
            log.warning("spans do not reach the collector: %s%s", reason, f" ({times} failures)" if times > 1 else "")


def _provider(collector: str, ingress: str) -> Any:
    try:
        import opentelemetry.instrumentation.asgi  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider as Sdk
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(f"traces need {error.name}: pip install -e '.[traces]' in the repository") from None
    service = os.environ.get("OTEL_SERVICE_NAME", "tidar")
    provider = Sdk(resource=Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: ingress}))
    exporter = OTLPSpanExporter(f"{collector.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def trace_requests(app: FastAPI, provider: TracerProvider) -> None:
    """Have every request to `app` make a span; not one for each chunk that it gets."""
    if isinstance(provider, NoOpTracerProvider):
        return
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    # By itself it names attributes as OpenTelemetry did before 2023.
    os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
    app.add_middleware(
        OpenTelemetryMiddleware,  # type: ignore[arg-type]  # its `app` has no type
        tracer_provider=provider,
        default_span_details=lambda scope: (span_name(scope), {}),
        excluded_urls=UNTRACED,
        exclude_spans=["receive", "send"],
    )


async def flush(provider: Any) -> None:
    """Send what was not sent yet, but wait no longer than FLUSH_SECONDS for a collector; no span is made afterwards."""
    if not isinstance(provider, NoOpTracerProvider):
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(provider.shutdown), FLUSH_SECONDS)


def span_name(scope: Scope) -> str:
    """Of an HTTP request, by its route once that is found: not by its path, of which a scanner has as many as it
    likes."""
    method = scope.get("method")
    named = method if method in METHODS else "HTTP"
    return f"{named} {route}" if (route := route_template(scope)) else named


def route_template(scope: Scope) -> str:
    """The route that was found for a request, with the prefix of the application; empty where none was."""
    path = getattr(scope.get("route"), "path", "")
    return f"{scope.get('root_path', '').rstrip('/')}{path}" if path else ""


class RequestSpan:
    """The span of the HTTP request within which this is made; `scope` is the request's."""

    def __init__(self, scope: Scope):
        self._scope = scope
        self._span = get_current_span()
        if (request_id := Headers(scope=scope).get("x-request-id")) is not None:  # Serve's own where a client sent none
            self._span.set_attribute("tidar.http_request_id", request_id)

    def routed(self) -> None:
        """Its route is known by now, if it has one."""
        if self._span.is_recording() and (route := route_template(self._scope)):
            self._span.update_name(span_name(self._scope))
            self._span.set_attribute("http.route", route)

    def failed(self, error: ApiError) -> None:
        """The client got this, in place of an answer or behind its beginning."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", error.code or str(error.status))
            self._span.set_status(StatusCode.ERROR, error.message)

    def left(self) -> None:
        """Nobody waits for it any more."""
        if self._span.is_recording():
            self.routed()
            self._span.set_attribute("tidar.cancelled", True)


class AttemptSpan:
    """The span of one attempt, until it is `over`. `before`: tokens that were passed on before it."""

    def __init__(self, tracer: Tracer, request_id: str, attempt: int, before: int):
        self._before = before
        self._spoken = False
        self._span = tracer.start_span("attempt")
        self._span.set_attributes(
            {"tidar.request_id": request_id, "tidar.attempt": attempt, "tidar.tokens_before": before, "tidar.tokens": 0}
        )

    def heard(self, replica: str, tokens: int) -> None:
        """A replica brought something: now there are so many tokens."""
        if not self._span.is_recording():
            return
        if not self._spoken and tokens > self._before:
            self._spoken = True
            self._span.add_event("first tokens")
            self._span.set_attribute("tidar.replica", replica)
        self._span.set_attribute("tidar.tokens", tokens - self._before)

    def lost(self, cause: str, replica: str | None) -> None:
        """Another attempt has to go on; `replica` where one is known to be the reason."""
        if replica is not None:
            self._span.set_attribute("tidar.replica", replica)
        self._span.set_status(StatusCode.ERROR, cause)

    def dropped(self, cause: str) -> None:
        """It was not needed, for the replica that it should have followed goes on, or could not have helped."""
        self._span.set_attribute("tidar.dropped", cause)

    def failed(self, error: Exception) -> None:
        """It ends the request, of what the client gets to hear."""
        self._span.set_status(StatusCode.ERROR, str(error))

    def over(self) -> None:
        self._span.end()
