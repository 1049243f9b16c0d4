"""What came of each request, for the metrics; and an answer where something happened that nobody expected."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError, server_error
from cluster.ingress.request_log import RequestLog
from cluster.observe.ingress_metrics import IngressMetrics
from cluster.observe.tracing import RequestSpan, span_name

log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Outcome:
    """Of one request. model: the name that answers it, once that is known. status: HTTP's, or that of the error which
    broke a stream off behind it; 0 before there is one. error: what its client got of it, where it is an error.
    ignored: fields of its body that nobody knows."""

    span: RequestSpan
    model: str = ""
    status: int = 0
    error: ApiError | None = None
    ignored: Sequence[str] = ()

    def broke(self, error: Exception) -> None:
        """A stream that had begun ended by this."""
        self.error = error if isinstance(error, ApiError) else server_error()
        self.status = self.error.status
        self.span.failed(self.error)


def outcome_of(request: Request) -> Outcome:
    outcome = request.state.outcome
    assert isinstance(outcome, Outcome)
    return outcome


class Outcomes:
    """Counts what comes of every POST, which is how all that takes an engine or a tokenizer is asked for. An exception
    that nobody expected is logged here and answered 500, without a word of its trace."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics):
        self._app = app
        self._metrics = metrics
        self._log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, outcome = time.monotonic(), Outcome(RequestSpan(scope))
        scope["state"] = {**scope.get("state", {}), "outcome": outcome}
        whole = False

        async def watched(message: Message) -> None:
            nonlocal whole
            starts = message["type"] == "http.response.start"
            if starts:
                outcome.status = message["status"]
                outcome.span.routed()
                self._log.ignored(outcome.ignored)
            whole = not starts and not message.get("more_body", False)
            await send(message)
            if starts and outcome.error is not None and outcome.status >= 500:  # OpenTelemetry has told its number
                outcome.span.failed(outcome.error)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:  # while its request was read: nobody is there to be answered
            pass
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            outcome.error = server_error()
            if outcome.status:
                outcome.span.failed(outcome.error)
            else:
                await outcome.error.response()(scope, receive, watched)
        finally:
            if not whole and outcome.error is None:
                outcome.span.left()
            if scope["method"] == "POST" and outcome.status:
                self._metrics.answered(outcome.model, outcome.status)
                seconds = time.monotonic() - began
                self._log.ended(span_name(scope), outcome.model, outcome.status, outcome.error, seconds)
