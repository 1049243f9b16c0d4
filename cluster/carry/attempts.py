"""One attempt at a request: a call of one replica under a name of its own, and what comes of it.

A stream follows one attempt at a time. A rival to that one, called while its replica is quiet, takes what comes in by
itself, for nobody to hear, until it has brought what the other owes (`cluster.carry.handover`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from cluster.carry.channels import Call, Channels, Ended, LookAgain, Lost, hang_up, hear, next_arrival
from cluster.errors import full, server_error, unavailable
from cluster.line import Accepted, EngineKind, Event, Refusal
from cluster.observe.tracing import AttemptSpan
from tidar_core.request import FinishReason, Request, StepOutput

log = logging.getLogger("ray.serve")
# What a call ends of when its replica is gone, going, or none: Ray's and Serve's words for it, and those of gRPC, which
# Serve also wraps into a RuntimeError where a replica dies while it accepts.
GONE = (RayError, BackPressureError, RequestCancelledError, LookupError, grpc.RpcError)
OTHER_MODEL = "another model"
Item = Accepted | Event | LookAgain | Exception


@dataclass(frozen=True, slots=True)
class Start:
    """What an attempt begins with. request: as it is sent. number: of the attempt. base: the fingerprint of the model
    that it is for. kind: of the engine that it must be, where tokens were passed on. step, seconds: what its steps and
    seconds count from. wait: for its acceptance."""

    request: Request
    number: int
    base: str
    kind: EngineKind | None
    step: int
    seconds: float
    wait: float


def ended_badly(output: StepOutput) -> bool:
    """The replica ended the request, not the answer: it is going."""
    return output.finish is not None and output.finish.reason is FinishReason.ABORT


class Attempt:
    """A call that is made at once. call: makes it, for a mailbox. silence: what comes after the call's own end comes
    within so many seconds."""

    def __init__(
        self, start: Start, span: AttemptSpan, channels: Channels, call: Callable[[str], Call], silence: float
    ):
        self.start = start
        self.span = span
        self.accepted: Accepted | None = None
        self.began = self.accepted_at = time.monotonic()
        self.finished = False
        self._channels = channels
        self._silence = silence
        self._reception = channels.expect(start.request.request_id)
        try:
            self._call = call(self._reception.mailbox.name)
        except BaseException:
            channels.forget(self._reception)
            raise
        self.listener = asyncio.create_task(hear(self._call, self._reception.arrived))
        self._ended: Ended | None = None
        self._race: asyncio.Task[list[Item]] | None = None
        self._closed = False

    @property
    def replica(self) -> str | None:
        """Who has the request, once somebody has."""
        return self._reception.replica

    def race(self, other: "Attempt") -> None:
        """Go on as a rival to another attempt, which is told when this one is `over`."""

        def tell(race: asyncio.Task[list[Item]]) -> None:
            if not race.cancelled():
                race.exception()  # a failure that nobody needs to hear of any more is no news
                other._reception.arrived.put_nowait(LookAgain())

        self._race = asyncio.create_task(self._first_tokens())
        self._race.add_done_callback(tell)

    @property
    def over(self) -> bool:
        """A rival has won, or failed."""
        return self._race is not None and self._race.done()

    @property
    def failure(self) -> BaseException | None:
        """What a rival that is over failed of; None where it won."""
        assert self._race is not None
        return asyncio.CancelledError() if self._race.cancelled() else self._race.exception()

    @property
    def won(self) -> bool:
        return self.over and self.failure is None

    async def opening(self) -> list[Item]:
        """The first that is heard, once somebody has the request. Raises Lost where another may go on."""
        return await (self._acceptance() if self._race is None else self._race)

    async def heard(self) -> list[Item]:
        """All that has come, waiting for something. Whether the replica lives its channel sees to, and tells it behind
        the last events; that the request's own call is over, of whatever, may be known before they are there."""
        arrived = self._reception.arrived
        while True:
            if self._ended is None:
                came = [await arrived.get()]
            else:
                try:
                    came = [await next_arrival(arrived, self._silence, "ended early")]
                except Lost as lost:
                    return [self._ended.error or lost]
            while not arrived.empty():
                came.append(arrived.get_nowait())
            items: list[Item] = []
            for item in came:
                if isinstance(item, Ended):
                    self._ended = item
                else:
                    items.append(item)
            if items:
                return items

    def give_up(self, item: Item) -> NoReturn:
        """Raise what became of an attempt that somebody had: Lost where another may go on."""
        if isinstance(item, Refusal):
            raise Lost(f"refused: {item.message}", refused=self.replica)
        if isinstance(item, StepOutput):
            assert item.finish is not None
            if ended_badly(item):
                raise Lost("aborted", self.replica)
            raise Lost(f"failed: {item.finish.error}", refused=self.replica)
        assert isinstance(item, Exception)
        self._judge(item)

    def close(self) -> None:
        """End it wherever it is; if it has `finished`, the listener is left to hear its last words."""
        if self._closed:
            return
        self._closed = True
        self._channels.forget(self._reception)
        if self._race is not None:
            self._race.cancel()
        if not self.finished:
            hang_up(self._call, self.listener)
        self.span.over()

    async def _acceptance(self) -> list[Item]:
        """Wait until somebody has the request; what came before that was known."""
        early: list[Item] = []
        arrived = self._reception.arrived
        while not isinstance(heard := await next_arrival(arrived, self.start.wait, "not accepted"), Accepted):
            if isinstance(heard, Ended):
                self._judge(heard.error or Lost("ended early"))
            else:
                early.append(heard)
        if heard.kind.fingerprint != self.start.base:  # while a deployment changes its model there are two
            raise Lost(OTHER_MODEL, refused=heard.replica)
        if self.start.kind not in (None, heard.kind):
            raise Lost("another kind of engine", refused=heard.replica)
        early += self._channels.accepted(self._reception, heard.replica)
        self.accepted, self.accepted_at = heard, time.monotonic()
        return early

    async def _first_tokens(self) -> list[Item]:
        """All up to the first token. An end without one is a failure: the other attempt may come to a better one."""
        items: list[Item] = []
        came = await self._acceptance()
        while True:
            for item in came:
                if isinstance(item, StepOutput) and not ended_badly(item):
                    if item.finish is not None and item.finish.reason is FinishReason.ERROR:
                        raise Lost(f"failed: {item.finish.error}")
                    items.append(item)
                elif isinstance(item, Refusal) and self.start.kind is None:
                    raise Lost(f"refused: {item.message}")  # the client's to hear, once it comes from no rival
                elif not isinstance(item, LookAgain):
                    self.give_up(item)
            if any(isinstance(item, StepOutput) and (item.tokens or item.finish) for item in items):
                return items
            came = await self.heard()

    def _judge(self, heard: Exception) -> NoReturn:
        """Raise what the attempt failed of: Lost where another replica may go on."""
        first = self.start.number == 0 and self.replica is None
        if isinstance(heard, BackPressureError) and first:
            raise full() from heard
        if isinstance(heard, DeploymentUnavailableError):
            raise unavailable() from heard
        # A LookupError of its own: the replica is not the one that was meant.
        if isinstance(heard, RayTaskError) and not (
            isinstance(heard.cause, RayActorError) or type(heard.cause) is LookupError
        ):
            log.error("request %s failed: %s", self.start.request.request_id, heard)
            raise server_error() from heard
        if isinstance(heard, Lost):
            raise Lost(heard.cause, self.replica, heard.refused, heard.waited) from heard
        if isinstance(heard, GONE) or (isinstance(heard, RuntimeError) and "StatusCode" in str(heard)):
            raise Lost(type(heard).__name__, self.replica) from heard
        raise heard
