"""One request, carried over as many replicas as it takes.

A token depends on the tokens before it, the parameters and the seed alone, so a request goes on at another replica as
its prompt and the tokens that were sent already. What may befall the replica under a stream: it dies, it hangs (its
heartbeats stop), its engine breaks, it is shut down. The client sees a gap, never a lost or a repeated token.

Each attempt is a call of its own under a name of its own, and only the last one is listened to: a replica that wakes up
late talks to nobody, and finds its call cancelled. What happens to it meanwhile comes by `channels`.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import grpc
from opentelemetry.trace import Tracer
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from cluster.channels import Call, Channels, Ended, Lost, Reception, hang_up, hear, next_arrival
from cluster.engine_thread import Event, Refusal
from cluster.errors import ApiError, full, server_error
from cluster.metrics import IngressMetrics
from cluster.replica import Accepted, EngineKind
from cluster.routing import Way
from cluster.tracing import AttemptSpan
from tidar_core.request import FinishReason, Request, StepOutput

log = logging.getLogger("ray.serve")
# What a call ends of when its replica is gone, going, or none: Ray's and Serve's words for it, and those of gRPC, which
# Serve also wraps into a RuntimeError where a replica dies while it accepts.
GONE = (
    RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError, LookupError, grpc.RpcError,
)  # fmt: skip
LONGEST_PAUSE_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0  # for a call to be accepted


class Replicas(Protocol):
    """Those that may be called: `cluster.directory` where there is a cluster."""

    @property
    def silent(self) -> frozenset[str]: ...
    def silence(self, name: str) -> None: ...
    def marks(self, request: Request) -> bytes: ...
    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, way: Way) -> Call: ...
    def listen(self, replica: str, mailbox: str) -> Call: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """silence: a replica that says nothing for so many seconds hangs. give_up: a stream may be without a replica for
    so many. losses: it may lose so many replicas without a new token, lest a request that breaks engines goes round."""

    silence: float
    give_up: float
    losses: int = 4


@dataclass(slots=True)
class Story:
    """A request, and how far it came.

    emitted: the tokens that were passed on, the last of them at `heard_at`. kind: of the engine that said the first.
    replica: who has the request, or had it last. step, step_base, seconds_base: the last step passed on, and what steps
    and seconds of the present attempt count from. losses: replicas lost since the last token; refused: those that said
    no; tries: calls that nobody accepted since one did; lost_at: since when nobody has the request; marks: of the
    prompt's prefixes.
    """

    request: Request
    began: float = field(default_factory=time.monotonic)
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)
    kind: EngineKind | None = None
    replica: str | None = None
    step: int = 0
    step_base: int = 0
    seconds_base: float = 0.0
    losses: int = 0
    refused: set[str] = field(default_factory=set)
    tries: int = 0
    lost_at: float | None = None
    cause: str = ""
    marks: bytes = b""

    def next_request(self) -> Request:
        """The request as the present attempt sends it."""
        now, waited = time.monotonic(), 0.0
        if self.attempt:
            self.step_base, self.seconds_base, waited = self.step, now - self.began, now - self.heard_at
        name, emitted = f"{self.request.request_id}.{self.attempt}", (*self.request.emitted, *self.emitted)
        return replace(self.request, request_id=name, emitted=emitted, waited=waited)

    def take(self, output: StepOutput) -> StepOutput:
        """Note what a step brought; the output as if there had been no other attempt before."""
        if output.tokens:
            self.emitted += output.tokens
            self.heard_at = time.monotonic()
            self.losses = 0
        trace = output.trace
        if trace is None:
            return output
        self.step = self.step_base + trace.step
        return replace(output, trace=replace(trace, step=self.step, seconds=self.seconds_base + trace.seconds))


@dataclass(frozen=True, slots=True)
class News:
    """What happened to a request since the last time, and the name of the replica where it did."""

    replica: str
    events: tuple[StepOutput | Refusal, ...]


def ended_badly(output: StepOutput) -> bool:
    """The replica ended the request, not the answer: it is going."""
    return output.finish is not None and output.finish.reason is FinishReason.ABORT


class Carrier:
    """Carries requests over the replicas that there are."""

    def __init__(self, replicas: Replicas, patience: Patience, metrics: IngressMetrics, tracer: Tracer):
        self._replicas = replicas
        self._patience = patience
        self._metrics = metrics
        self._tracer = tracer
        self._channels = Channels(replicas.listen, patience.silence)
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, request: Request) -> AsyncGenerator[News, None]:
        """What happens to a request, up to its finish or a `Refusal`. Raises ApiError; however the caller stops, the
        request ends wherever it is."""
        story = Story(request, marks=self._replicas.marks(request))
        while True:
            with AttemptSpan(self._tracer, request.request_id, story.attempt, len(story.emitted)) as span:
                try:
                    async with aclosing(self._attempt(story)) as attempt:
                        async for news in attempt:
                            span.heard(news.replica, len(story.emitted))
                            yield news
                    return
                except Lost as lost:
                    span.lost(lost.cause, lost.replica)
                    reason = lost
            await self._recover(story, reason)

    async def _attempt(self, story: Story) -> AsyncGenerator[News, None]:
        """One call of one replica. Raises Lost where another may go on."""
        request = story.next_request()
        # Who has the prefix may be the very one that does not answer: another attempt goes anywhere.
        marks = b"" if story.tries else story.marks
        way = Way(never=frozenset(story.refused), avoid=self._replicas.silent, marks=marks)
        reception = self._channels.expect(request.request_id)
        call = self._replicas.generate(request, reception.mail.name, story.kind if story.emitted else None, way)
        listener = asyncio.create_task(hear(call, reception.news))
        finished = False
        try:
            heard: list[object] = [*await self._acceptance(story, reception)]
            name = reception.replica
            assert name is not None
            call_ended: Ended | None = None
            while not finished:
                heard = heard or await self._heard(reception, call_ended)
                said: list[StepOutput | Refusal] = []
                for item in heard:
                    if finished:  # what befell the replica afterwards is nothing to this request
                        break
                    if isinstance(item, Ended):
                        call_ended = item
                    elif isinstance(item, Refusal) and not story.emitted:
                        said.append(item)
                        finished = True
                    elif isinstance(item, StepOutput) and not ended_badly(item):
                        said.append(story.take(item))
                        finished = item.finish is not None
                    else:
                        if said:
                            yield News(name, tuple(said))
                        self._give_up(item, story, name)
                heard = []
                if said:
                    yield News(name, tuple(said))
        finally:
            self._channels.forget(reception)
            if finished:  # its last words are still to come
                self._ending.add(listener)
                listener.add_done_callback(self._ending.discard)
            else:
                hang_up(call, listener)

    async def _heard(self, reception: Reception, call_ended: Ended | None) -> list[object]:
        """All that has come, waiting for something. Whether the replica lives its channel sees to, and tells it behind
        the last events; that the request's own call is over, of whatever, may be known before they are there."""
        news = reception.news
        if call_ended is None:
            heard: list[object] = [await news.get()]
        else:
            try:
                heard = [await next_arrival(news, self._patience.silence, "ended early")]
            except Lost as lost:
                heard = [call_ended.error or lost]
        while not news.empty():
            heard.append(news.get_nowait())
        return heard

    def _give_up(self, item: object, story: Story, replica: str) -> NoReturn:
        """Raise what became of an attempt: Lost where another may go on."""
        if isinstance(item, Refusal):
            story.refused.add(replica)
            raise Lost(f"refused: {item.message}")
        if isinstance(item, StepOutput):
            raise Lost("aborted", replica)
        assert isinstance(item, Exception)
        self._judge(item, story, replica)

    async def _acceptance(self, story: Story, reception: Reception) -> list[Event]:
        """Wait until somebody has the request; its events that came before that was known."""
        early: list[Event] = []
        wait = min(self._patience.silence * 2**story.tries, LONGEST_WAIT_SECONDS)
        while not isinstance(heard := await next_arrival(reception.news, wait, "not accepted"), Accepted):
            if isinstance(heard, Ended):
                self._judge(heard.error or Lost("ended early"), story, None)
            else:
                early.append(heard)
        if story.emitted and heard.kind != story.kind:
            story.refused.add(heard.replica)
            raise Lost("another kind of engine")
        self._channels.accepted(reception, heard.replica)
        self._accepted(story, heard)
        return early

    def _judge(self, heard: Exception, story: Story, replica: str | None) -> NoReturn:
        """Raise what a request failed of: Lost where another replica may go on."""
        first = story.attempt == 0 and replica is None
        if isinstance(heard, BackPressureError) and first:
            raise full() from heard
        if isinstance(heard, DeploymentUnavailableError) and first:
            raise ApiError(503, "The model is not available: its deployment failed.", code="not_ready") from heard
        # A LookupError of its own: the replica is not the one that was meant.
        if isinstance(heard, RayTaskError) and not (
            isinstance(heard.cause, RayActorError) or type(heard.cause) is LookupError
        ):
            log.error("request %s failed: %s", story.request.request_id, heard)
            raise server_error() from heard
        if isinstance(heard, Lost):
            raise Lost(heard.cause, replica) from heard
        if isinstance(heard, GONE) or (isinstance(heard, RuntimeError) and "StatusCode" in str(heard)):
            raise Lost(type(heard).__name__, replica) from heard
        raise heard

    def _accepted(self, story: Story, accepted: Accepted) -> None:
        if story.replica is not None:
            gap = time.monotonic() - (story.lost_at or story.began)
            self._metrics.handed_over(story.cause, gap)
            said = {
                "request": story.request.request_id,
                "attempt": story.attempt,
                "from": story.replica,
                "to": accepted.replica,
                "tokens": len(story.emitted),
                "cause": story.cause,
                "gap_ms": round(gap * 1000),
            }
            log.warning("stream handed over %s", json.dumps(said))
        story.replica, story.kind = accepted.replica, accepted.kind
        story.tries, story.lost_at = 0, None

    async def _recover(self, story: Story, lost: Lost) -> None:
        """Make ready for the next attempt. Raises ApiError where there shall be none."""
        now = time.monotonic()
        story.attempt += 1
        if story.lost_at is None:
            story.lost_at = now
        if lost.replica is not None:
            story.cause = lost.cause
            story.losses += 1
            self._replicas.silence(lost.replica)
        log.info("attempt %d of %s is over: %s", story.attempt, story.request.request_id, lost.cause)
        if story.losses >= self._patience.losses or now - story.lost_at > self._patience.give_up:
            tried = f"{story.losses} engine replicas were lost under this request"
            waited = f"no engine replica took this request on within {self._patience.give_up:g} s"
            message = tried if story.losses >= self._patience.losses else waited
            log.error("request %s is given up: %s (%s)", story.request.request_id, message, lost.cause)
            raise ApiError(503, f"The server gave up: {message}. Try again.", code="replica_lost") from lost
        if lost.replica is None:
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, 0.05 * 2**story.tries))
            story.tries += 1
