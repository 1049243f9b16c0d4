"""An answer's pieces as they come: requests go out by way of `cluster.carry`, and what comes back is told.

Whatever goes wrong leaves here as an ApiError. Closing a stream ends its request in the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, TypeVar

from opentelemetry.trace import get_current_span

from cluster.carry.handover import Carrier, Update
from cluster.errors import ApiError, bad_request, full
from cluster.line import Refusal
from cluster.wire.answer import Answer, Choice, Piece, joined
from tidar_core.request import FinishReason, StepOutput

T = TypeVar("T")
CHUNK_RATE = {"cpu": 300, "cuda": 2000}  # where the options leave it open; each costs an ingress some 250 µs
LONGEST_INTERVAL_SECONDS = 0.25  # so that a reader sees text flow, however many there are


async def pieces_of(
    answer: Answer, carrier: Carrier, admission: "Admission", replicas: int, pace: "Pace | None" = None
) -> AsyncGenerator[Piece, None]:
    """Pieces of all choices as they come; at a pace, what several steps of a choice brought may be one. Raises
    ApiError."""
    span = get_current_span()  # of the HTTP request, as this begins within it
    with admission.enter(len(answer.requests), replicas):
        streams = [
            choice_pieces(answer, choice, carrier.run(request, answer.card.fingerprint), pace)
            for choice, request in zip(answer.choices, answer.requests, strict=True)
        ]
        try:
            async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if span.is_recording():
                span.set_attributes(answer.account())


async def choice_pieces(
    answer: Answer, choice: Choice, updates: AsyncGenerator[Update, None], pace: "Pace | None"
) -> AsyncGenerator[Piece, None]:
    async with aclosing(updates):
        with ExitStack() as paced:
            counted = False
            async for update in updates:
                pieces, failed = added(answer, choice, update)
                sent_at = time.monotonic()
                for piece in pieces if answer.options.trace or not pieces else [joined(pieces)]:
                    yield piece
                if failed is not None:
                    raise failed
                if pace is None or answer.options.trace or choice.finish is not None:  # a trace is told step by step
                    continue
                if not counted:  # from its first piece on
                    paced.enter_context(pace.stream())
                    counted = True
                await asyncio.sleep(pace.interval(answer.card.device) - (time.monotonic() - sent_at))


def added(answer: Answer, choice: Choice, update: Update) -> tuple[list[Piece], ApiError | None]:
    """What the events added, up to the one that broke the answer off, and what that one says."""
    pieces: list[Piece] = []
    for event in update.events:
        try:
            pieces.append(choice.add(finished_well(event), update.replica))
        except ApiError as error:
            if error.param == "grammar":  # the engine's word for it
                error.param = answer.constraint_field
            return pieces, error
    return pieces, None


class Pace:
    """How often a stream gets a chunk: one a step, unless all streams of an ingress together would get more than
    `chunks` a second (0: what suits the engines' device). Then a chunk brings what several steps did: chunks cost
    processor time, and where engines compute on the same processors, tokens."""

    def __init__(self, chunks: int):
        self._chunks = chunks
        self._streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While this is open there is one stream more."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def interval(self, device: str) -> float:
        """Seconds between two chunks of a stream."""
        return min(self._streams / (self._chunks or CHUNK_RATE[device]), LONGEST_INTERVAL_SECONDS)


class Admission:
    """How many answers an ingress may have under way: `per_replica` for each replica that is there."""

    def __init__(self, per_replica: int):
        self.under_way = 0
        self._per_replica = per_replica

    def most(self, replicas: int) -> int:
        """How many, with so many replicas; while there is none, as with one."""
        return self._per_replica * max(1, replicas)

    @contextmanager
    def enter(self, answers: int, replicas: int) -> Iterator[None]:
        """Hold places for one request's answers. Raises ApiError (429) where there are not enough.

        A request that alone asks for more answers than that is let in when nothing else is under way.
        """
        if self.under_way and self.under_way + answers > self.most(replicas):
            raise full()
        self.under_way += answers
        try:
            yield
        finally:
            self.under_way -= answers


def finished_well(event: StepOutput | Refusal) -> StepOutput:
    """The event where it is a step that did not break the answer off; raises ApiError for all others."""
    if isinstance(event, Refusal):
        raise bad_request(event.message, event.param)
    if event.finish is not None and event.finish.reason is FinishReason.ERROR:
        if event.finish.param is not None:
            raise bad_request(event.finish.error or "the request cannot be served", event.finish.param)
        raise ApiError(500, event.finish.error or "the engine could not go on", code="engine_failed")
    return event


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams in the order in which they come; the first error ends them all, as does closing this."""
    arrivals: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    arrivals.put_nowait(("item", item))
        except Exception as error:
            arrivals.put_nowait(("error", error))
        else:
            arrivals.put_nowait(("end", None))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            kind, value = await arrivals.get()
            if kind == "error":
                raise value
            if kind == "end":
                open_streams -= 1
            else:
                yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
