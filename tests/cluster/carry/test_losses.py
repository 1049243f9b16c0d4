"""Streams that lose replicas in ways of their own: wrapped errors, refusals, one loss long after another."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from opentelemetry.trace import NoOpTracer
from ray.exceptions import ActorUnavailableError, RayTaskError

from cluster.carry.handover import LONGEST_WAIT_SECONDS, Carrier, Patience
from cluster.errors import ApiError
from cluster.line import Accepted, EngineKind, EventBatch, Route
from cluster.observe.ingress_metrics import IngressMetrics
from tests.cluster.carry.test_carrier import goes_on_behind
from tests.cluster.scripted import KIND, REQUEST, Act, Cast, Listening, Scripted, carry, undisturbed
from tidar_core.request import Request


@pytest.mark.parametrize("cause", [LookupError("r1 is not r0"), ActorUnavailableError("gone", b"0" * 16)])
def test_a_replica_that_is_not_the_one_that_was_meant_is_no_failure(cause: Exception) -> None:
    """As it comes through Serve: wrapped into the task's own error."""
    error = RayTaskError("generate", "a traceback", cause)

    class Cut(Scripted):
        async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
            raise error
            yield

    goes_on_behind(Cut)


def test_a_request_that_is_over_is_waited_for_no_more() -> None:
    async def run() -> dict[str, object]:
        carrier = Carrier(
            Cast([Act(2), Act()]), Patience(0.1, 5), IngressMetrics("here").streams_of("tiny"), NoOpTracer()
        )
        mailbox = carrier._channels._mailbox
        async for _ in carrier.run(REQUEST, KIND.fingerprint):
            pass
        return dict(mailbox.waiting) | dict(carrier._channels._mailbox.waiting)

    assert asyncio.run(run()) == {}


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_is_over_leaves_no_task(ends: bool) -> None:
    """Whether its answer came to an end, or nobody wants it any more."""

    async def run() -> None:
        carrier = Carrier(Cast([Act()]), Patience(0.1, 5), IngressMetrics("here").streams_of("tiny"), NoOpTracer())
        updates = carrier.run(REQUEST, KIND.fingerprint)
        await anext(updates)
        assert len(asyncio.all_tasks()) > 1
        if ends:
            async for _ in updates:
                pass
        await updates.aclose()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        assert not carrier._ending

    asyncio.run(run())


def test_who_is_asked_again_is_asked_after_pauses() -> None:
    cast = Cast([Act(2), Act(end="fits nobody")])
    with pytest.raises(ApiError, match="no engine replica took this request on within 1 s"):
        carry(cast, Patience(silence=0.1, give_up=1))
    assert len(cast.calls) < 20


def test_a_call_that_the_server_cancels_is_waited_for_no_more() -> None:
    """Not for the time either that a call has to be accepted."""

    class Cancelled(Scripted):
        async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
            raise asyncio.CancelledError
            yield

    began = time.monotonic()
    goes_on_behind(Cancelled, patience=Patience(silence=300, give_up=600))
    assert time.monotonic() - began < LONGEST_WAIT_SECONDS


def test_patience_begins_anew_with_each_loss() -> None:
    """A stream that lost a replica long ago may lose another."""

    class Slow(Cast):
        def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
            call = super().generate(request, mailbox, kind, route)
            if len(self.calls) == 2:
                say = call.say
                call.say = lambda *events: (time.sleep(0.1), say(*events))[1]  # type: ignore[method-assign]
            return call

    cast = Slow([Act(2), Act(4), Act()])
    outputs, _ = carry(cast, Patience(silence=0.1, give_up=0.3))
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert len(cast.calls) == 3


def test_a_replica_that_is_lost_again_and_again_is_not_tried_for_ever() -> None:
    """As one that takes every request on, and says nothing."""

    class Same(Cast):
        def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
            super().generate(request, mailbox, kind, route).name = "r0"
            return self.calls[-1]

        def listen(self, replica: str, mailbox: str) -> Listening:
            return Listening(self.calls[-1])

    cast = Same([Act(0, end="silent")])
    with pytest.raises(ApiError, match=r"it was lost \d+ times in \d+ s without a new token"):
        carry(cast, Patience(silence=0.1, give_up=1))
    assert 4 <= len(cast.calls) < 20


def test_the_only_replica_that_hangs_is_waited_for_as_long_as_a_stream_may_be_without_one() -> None:
    cast, began = Cast([Act(2, end="silent")], replicas=("r0",)), time.monotonic()
    with pytest.raises(ApiError, match="the only engine replica gave no sign of life for 2 s"):
        carry(cast, Patience(silence=0.1, give_up=1.5))
    assert len(cast.calls) == 1
    assert time.monotonic() - began > 1.5


def test_who_refuses_what_was_begun_elsewhere_is_not_asked_again() -> None:
    cast = Cast([Act(2), Act(end="refuses"), Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert cast.routes[2].never == {"r1"}
