"""What came of each request, for the metrics; and an answer where something happened that nobody expected."""

import logging
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError, server_error
from cluster.observe.ingress_metrics import IngressMetrics

log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Outcome:
    """Of one request. model: the name that answers it, once that is known. status: HTTP's, or that of the error which
    broke a stream off behind it; 0 before there is one."""

    model: str = ""
    status: int = 0

    def broke(self, error: Exception) -> None:
        """A stream that had begun ended by this."""
        self.status = error.status if isinstance(error, ApiError) else 500


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        outcome = Outcome()
        scope["state"] = {**scope.get("state", {}), "outcome": outcome}

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:  # while its request was read: nobody is there to be answered
            pass
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not outcome.status:
                await server_error().response()(scope, receive, watched)
        finally:
            if scope["method"] == "POST" and outcome.status:
                self._metrics.answered(outcome.model, outcome.status)
