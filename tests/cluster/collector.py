"""A collector of OpenTelemetry spans as they come over the wire: OTLP in protobuf, by HTTP."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ToldSpan:
    """What a span said of itself; ids in hexadecimal, `parent` empty where it has none."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    service: str
    failed: bool
    events: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass
class Collector:
    """`url` is what a server is told."""

    url: str = ""
    spans: list[ToldSpan] = field(default_factory=list)

    def of_trace(self, trace_id: str, enough: Callable[[list[ToldSpan]], bool], seconds: float = 20) -> list[ToldSpan]:
        """The spans of a trace, once there are enough."""
        deadline = time.monotonic() + seconds
        while not enough(found := [span for span in self.spans if span.trace_id == trace_id]):
            assert time.monotonic() < deadline, self.spans
            time.sleep(0.05)
        return found


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def spans_of(body: bytes) -> Iterator[ToldSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        named = {entry.key: value_of(entry.value) for entry in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ToldSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    service=named["service.name"],
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    events=tuple(event.name for event in span.events),
                    attributes={entry.key: value_of(entry.value) for entry in span.attributes},
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.spans.extend(spans_of(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
