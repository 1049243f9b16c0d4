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

CLIENT_LEFT = 499  # nginx's number for it; nobody is there to be told


@dataclass(slots=True)
class Outcome:
    """Of one request. model: the name that answers it, once that is known. status: HTTP's, or that of the error which
    broke a stream off behind it; 0 before there is one. error: what its client got of it, where it is an error.
    streams: whether a stream was asked for, None until that is known. ignored: fields of its body that nobody knows.
    asked_at: since when its client waits for a first token, on the monotonic clock; None where it does not."""

    metrics: IngressMetrics
    span: RequestSpan
    model: str = ""
    status: int = 0
    error: ApiError | None = None
    streams: bool | None = None
    ignored: Sequence[str] = ()
    asked_at: float | None = None

    def is_for(self, model: str) -> None:
        """Known by now: the name that answers it."""
        self.metrics.goes_over(self.model, model)
        self.model = model

    def asked(self) -> None:
        """All of the request is here, and a first token is what its client waits for."""
        self.asked_at = time.monotonic()

    def waits_no_more(self) -> None:
        """The first token is here, or the client has left without one."""
        if self.asked_at is not None:
            self.metrics.first_token(self.model, time.monotonic() - self.asked_at)
            self.asked_at = None

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
    """Counts what comes of every POST, which is how all that takes an engine or a tokenizer is asked for, also of one
    whose client leaves before the end of its answer. An exception that nobody expected is logged here and answered 500,
    without a word of its trace."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics):
        self._app = app
        self._metrics = metrics
        self._log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, counts = time.monotonic(), scope["method"] == "POST"
        outcome, told = Outcome(self._metrics, RequestSpan(scope)), False
        scope["state"] = {**scope.get("state", {}), "outcome": outcome}

        async def watched(message: Message) -> None:
            nonlocal told
            starts = message["type"] == "http.response.start"
            if starts:
                outcome.status = message["status"]
                outcome.span.routed()
            await send(message)
            told = not starts and not message.get("more_body", False)
            if starts and outcome.error is not None and outcome.status >= 500:  # OpenTelemetry has told its number
                outcome.span.failed(outcome.error)

        if counts:
            self._metrics.begun()
        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:  # while its request was read: nobody is there to be answered
            pass
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not outcome.status:
                outcome.error = server_error()
                await outcome.error.response()(scope, receive, watched)
            elif not told:
                outcome.broke(error)
        finally:
            left = not told and outcome.error is None
            if left:
                outcome.span.left()
            if counts:
                if left and outcome.status < 400:
                    outcome.status = CLIENT_LEFT
                    outcome.waits_no_more()
                self._metrics.answered(outcome.model, outcome.status)
                seconds = time.monotonic() - began
                self._log.ignored(outcome.ignored)
                self._log.ended(span_name(scope), outcome.model, outcome.status, outcome.error, seconds)
