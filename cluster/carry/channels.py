"""The ingress side of the line to the replicas: one call of each brings what happens to all requests there.

A call of its own for every stream would pay for the way between two processes once a token and stream. So a request is
sent by a call that says who has it and then nothing more (`EngineReplica.generate`), and what happens to it comes by
the replica's one call for this ingress (`EngineReplica.listen`): an item a step, whatever the number of streams.

Both name a mailbox. What a call had taken out of its mailbox when it failed does not come again: the requests that it
brought events of are lost with it, those that nobody has accepted yet too, and what is sent afterwards goes under the
name of a new mailbox.

A replica that says nothing is doubted before it is given up: meanwhile it is `quiet`, and its requests are told. While
it is the only one it is waited for: its requests would be sent to it again, behind all that keep it busy.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.line import Accepted, Event, EventBatch, Failure

log = logging.getLogger("ray.serve")
TICK_SECONDS = 0.1


class Call(Protocol):
    """One call of a replica, from outside."""

    def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]: ...
    def cancel(self) -> None: ...


class Lost(Exception):
    """An attempt is over before its answer: under the replica that had accepted it, where one had. refused: one that
    shall not be asked again, lost or not. waited: seconds for which the only replica was waited for."""

    def __init__(self, cause: str, replica: str | None = None, refused: str | None = None, waited: float = 0.0):
        super().__init__(cause)
        self.cause = cause
        self.replica = replica
        self.refused = refused
        self.waited = waited


@dataclass(frozen=True, slots=True)
class Ended:
    """A call is over: of an error, or by itself."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class LookAgain:
    """The replica fell quiet or speaks again (`Channels.quiet`), or the request's other attempt is over."""


@dataclass(slots=True)
class IngressMailbox:
    """A mailbox's name, who waits for what under it, the calls that fetch it by replica, and those that failed."""

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    waiting: "dict[str, Reception]" = field(default_factory=dict)
    fetching: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Reception:
    """What is heard of one request. arrived: what its own call says, its events, and the exception that ends them.

    early: events that came before it was known who has it, each with the replica that sent it. Serve sends a call again
    whose line was cut before it was accepted: then two replicas may have begun, and one of them counts.
    """

    request_id: str
    mailbox: IngressMailbox
    replica: str | None = None
    early: list[tuple[str, Event]] = field(default_factory=list)
    arrived: asyncio.Queue[Accepted | Event | Ended | LookAgain | Exception] = field(default_factory=asyncio.Queue)


class Channels:
    """Fetches what replicas have for this ingress. listen: calls a replica for a mailbox. doubt: one that says nothing
    for so many seconds is `quiet`. silence: for so many, and it hangs; give_up: where it is the only one, for so many.
    there: the replicas that speak."""

    def __init__(
        self,
        listen: Callable[[str, str], Call],
        doubt: float,
        silence: float,
        give_up: float,
        there: Callable[[], Collection[str]],
    ):
        self.quiet: frozenset[str] = frozenset()
        self._listen = listen
        self._doubt = doubt
        self._silence = silence
        self._give_up = give_up
        self._there = there
        self._mailbox = IngressMailbox()

    def expect(self, request_id: str) -> Reception:
        """Make ready for a request that is about to be sent, under the mailbox `mailbox.name`."""
        mailbox = self._mailbox
        reception = mailbox.waiting[request_id] = Reception(request_id, mailbox)
        return reception

    def accepted(self, reception: Reception, replica: str) -> list[Event]:
        """Say who has the request; gives what it has sent already. Raises Lost where its events may have been lost on
        the way."""
        mailbox = reception.mailbox
        if replica in mailbox.failed:
            raise Lost("call failed", replica)
        reception.replica = replica
        if replica not in mailbox.fetching:
            # In a context of its own: it is for all requests, and must not end with the one that happens to be first.
            mailbox.fetching[replica] = asyncio.create_task(self._fetch(mailbox, replica), context=Context())
        early, reception.early = reception.early, []
        return [event for sender, event in early if sender == replica]

    def forget(self, reception: Reception) -> None:
        """The request is over, for whatever reason."""
        reception.mailbox.waiting.pop(reception.request_id, None)

    async def _fetch(self, mailbox: IngressMailbox, replica: str) -> None:
        try:
            # A replica ends the call itself when it has had nothing to say for a while.
            while any(reception.replica == replica for reception in mailbox.waiting.values()):
                await self._fetch_once(mailbox, replica)
        except Exception as error:
            # Whatever it was, it is no request's fault.
            lost = error if isinstance(error, Lost) else Lost(type(error).__name__)
            log.info("nothing more is heard of %s: %s", replica, error)
            mailbox.failed.add(replica)
            if self._mailbox is mailbox:
                self._mailbox = IngressMailbox()
            for reception in mailbox.waiting.values():
                if reception.replica == replica:
                    reception.arrived.put_nowait(lost)
        finally:
            self.quiet -= {replica}
            del mailbox.fetching[replica]

    async def _fetch_once(self, mailbox: IngressMailbox, replica: str) -> None:
        call = self._listen(replica, mailbox.name)
        arrivals: asyncio.Queue[Any] = asyncio.Queue()
        listener = asyncio.create_task(hear(call, arrivals))
        try:
            # How long the call itself takes to get there says nothing yet.
            heard = await self._in_silence(replica, arrivals, self._silence)
            while not isinstance(heard, Ended):
                for event in heard.events:
                    if isinstance(event, Failure):
                        raise Lost("engine failed", refused=replica)
                    found = mailbox.waiting.get(event.request_id)
                    if found is None:
                        continue
                    if found.replica is None:
                        found.early.append((replica, event))
                    elif found.replica == replica:
                        found.arrived.put_nowait(event)
                heard = await self._next(mailbox, replica, arrivals)
        except BaseException:  # whatever ends the listening, the call shall not go on
            hang_up(call, listener)
            raise
        if heard.error is not None:
            raise heard.error

    async def _next(self, mailbox: IngressMailbox, replica: str, arrivals: asyncio.Queue[Any]) -> Any:
        """The next item of a call. Raises Lost where none comes; before that its requests are told of the quiet, and
        of its end."""
        if self._doubt >= self._silence:
            return await self._in_silence(replica, arrivals, self._silence)
        with suppress(Lost):
            return await next_arrival(arrivals, self._doubt, "quiet")
        self.quiet |= {replica}
        self._tell_to_look(mailbox, replica)
        heard = await self._in_silence(replica, arrivals, self._silence - self._doubt)
        if not isinstance(heard, Ended) or heard.error is None:  # else it is lost, and its requests shall hear of that
            self.quiet -= {replica}
            self._tell_to_look(mailbox, replica)
        return heard

    async def _in_silence(self, replica: str, arrivals: asyncio.Queue[Any], seconds: float) -> Any:
        """The next item. Raises Lost where none comes within so many seconds while others are there."""
        waited = 0.0
        while True:
            with suppress(Lost):
                return await next_arrival(arrivals, seconds, "silent")
            if waited > self._give_up or set(self._there()) - self.quiet - {replica}:
                raise Lost("silent", waited=waited)
            waited += self._doubt
            seconds = self._doubt

    def _tell_to_look(self, mailbox: IngressMailbox, replica: str) -> None:
        for reception in mailbox.waiting.values():
            if reception.replica == replica:
                reception.arrived.put_nowait(LookAgain())


async def hear(call: Call, arrivals: asyncio.Queue[Any]) -> None:
    """Put everything that a call brings into `arrivals`, at last how it `Ended`."""
    try:
        async for heard in call:
            arrivals.put_nowait(heard)
        arrivals.put_nowait(Ended())
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        if task.cancelling():
            raise
        arrivals.put_nowait(Ended(Lost("cancelled by the server")))  # so Ray says it: by an exception of the same type
    except Exception as error:
        arrivals.put_nowait(Ended(error))


def hang_up(call: Call, listener: asyncio.Task[None]) -> None:
    """End a call that goes on."""
    with suppress(Exception):  # raises what the call itself failed of, if it did so meanwhile
        call.cancel()
    # Not at once: on one event loop Serve does not cancel a call whose replica has just been found. Who listens is
    # about to hear of it, and cancelling them at that ends the call.
    asyncio.get_running_loop().call_soon(listener.cancel)


async def next_arrival(arrivals: asyncio.Queue[Any], seconds: float, cause: str) -> Any:
    """The next item; raises Lost(cause) if none comes. Ticks are counted, not time: while this very event loop is held
    up nothing can be heard, which is no sign that nobody speaks."""
    if not arrivals.empty():
        return arrivals.get_nowait()
    for _ in range(max(1, round(seconds / TICK_SECONDS))):
        try:
            async with asyncio.timeout(TICK_SECONDS):
                return await arrivals.get()
        except TimeoutError:
            await asyncio.sleep(0)  # what came while the loop was held up is heard only now, the timer first
            if not arrivals.empty():
                return arrivals.get_nowait()
    raise Lost(cause)
