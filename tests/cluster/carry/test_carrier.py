"""The hand-over by itself, with replicas that do as a script says: what is passed on never shows it."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Never

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import NoOpTracer
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from cluster.carry import handover
from cluster.carry.channels import Reception
from cluster.carry.handover import Carrier, Patience
from cluster.carry.routing import fitting
from cluster.errors import MODEL_CHANGED, ApiError
from cluster.line import Accepted, EngineKind, EventBatch, Refusal, Route
from cluster.observe.ingress_metrics import IngressMetrics, render
from tests.cluster.scripted import FEWER_POSITIONS, KIND, POSITIONS, REQUEST, Act, Cast, Scripted, carry, undisturbed
from tidar_core.request import Finish, FinishReason, Request, StepOutput

ACTS = st.builds(Act, st.integers(1, 5), st.integers(1, 3), st.sampled_from(["dies", "breaks", "aborts", "cancelled"]))
QUIET = st.builds(Act, st.integers(0, 3), st.integers(1, 3), st.sampled_from(["silent", "refuses", "ends early"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTS, max_size=6), st.lists(QUIET, max_size=1))
def test_whatever_befalls_replicas_the_stream_is_the_same(acts: list[Act], quiet: list[Act]) -> None:
    cast = Cast([Act(1), *acts, *quiet, Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    traces = [output.trace for output in outputs if output.trace]
    assert [trace.step for trace in traces] == list(range(len(traces)))
    assert [trace.seconds for trace in traces] == sorted(trace.seconds for trace in traces)
    assert outputs[-1].finish == Finish(FinishReason.LENGTH)
    *left, last = cast.calls
    assert all(call.cancelled for call in left)
    assert not last.cancelled
    names = [call.request.request_id for call in cast.calls]
    assert len(set(names)) == len(names)
    kept = [(call.request.prompt, call.request.params) for call in cast.calls]
    assert kept == [(REQUEST.prompt, REQUEST.params)] * len(kept)


@pytest.mark.parametrize("run", [1, 3])
def test_where_a_replica_has_fewer_positions_another_finishes_the_answer(run: int) -> None:
    """Its end of an answer that began elsewhere is none; where an answer begins there, it is."""
    cast = Cast([Act(2), Act(run=run, end="fewer positions"), Act()])
    outputs, metrics = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert [output.finish for output in outputs if output.finish] == [Finish(FinishReason.LENGTH)]
    assert "r1" in cast.routes[2].never
    assert (
        'tidar:stream_handovers_total{cause="fewer positions",ingress="here",model_name="tiny"} 1.0'
        in render([metrics.collect()]).decode()
    )
    alone = Cast([Act(2), Act(run=run, end="fewer positions")], replicas=("r1",))
    outputs, _ = carry(alone)
    assert outputs[-1].finish == Finish(FinishReason.LENGTH), "where nobody else is there it ends, and is not given up"
    outputs, _ = carry(Cast([Act(run=run, end="fewer positions"), Act()]))
    assert [token for output in outputs for token in output.tokens] == undisturbed()[
        : FEWER_POSITIONS - len(REQUEST.prompt)
    ]
    assert outputs[-1].finish == Finish(FinishReason.LENGTH)


def test_a_request_for_a_model_that_nobody_has_any_more_is_told_so_at_once() -> None:
    """It was asked of the same replicas again for a minute."""
    cast = Cast([Act(end="other model")], replicas=("r0", "r1"))
    with pytest.raises(ApiError) as caught:
        carry(cast)
    assert caught.value.code == MODEL_CHANGED
    assert len(cast.calls) == 2
    accepted = Cast([Act(0, end="dies"), Act(end="other model")], replicas=("r0", "r1"), silent=frozenset({"r0"}))
    with pytest.raises(ApiError) as caught:
        carry(accepted)
    assert caught.value.code == MODEL_CHANGED, "no token is out of one that was accepted alone"
    # One that has begun is for engines of its own model alone, which may come again.
    begun = Cast([Act(2), Act(end="other model"), Act()], replicas=("r0", "r1"))
    assert [token for output in carry(begun)[0] for token in output.tokens] == undisturbed()


def test_end_and_failure_that_are_read_together_are_an_end() -> None:
    class Both(Scripted):
        async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
            yield Accepted("r0", KIND, POSITIONS)
            self.say(StepOutput(self.request.request_id, tuple(undisturbed()), finish=Finish(FinishReason.LENGTH)))
            self.said.put_nowait(ActorUnavailableError("gone", b"0" * 16))
            await asyncio.sleep(60)

    class Late(Cast):
        def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
            self.calls.append(Both(f"r{len(self.calls)}", Act(), request, kind))
            return self.calls[-1]

    outputs, _ = carry(Late([]))
    assert [token for output in outputs for token in output.tokens] == undisturbed()


def goes_on_behind(first: type[Scripted], cause: str = "", patience: Patience | None = None) -> None:
    """A stream whose first replica answers like this loses nothing, and needs one other. cause: what is told of it."""

    class First(Cast):
        def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
            if self.calls:
                return super().generate(request, mailbox, kind, route)
            self.calls.append(first("r0", Act(), request, kind))
            return self.calls[-1]

    cast = First([Act()])
    outputs, metrics = carry(cast, patience)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert len(cast.calls) == 2
    page = render([metrics.collect()]).decode()
    assert not cause or f'tidar:stream_handovers_total{{cause="{cause}",ingress="here",model_name="tiny"}} 1.0' in page


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Unexpected error (StatusCode.UNAVAILABLE): Socket closed."),
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
        LookupError("r1 is not r0"),
    ],
)
def test_whatever_a_gone_replicas_call_ends_of_another_goes_on(error: Exception) -> None:
    class Cut(Scripted):
        async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
            yield Accepted(self.name, KIND, POSITIONS)
            self.said.put_nowait(error)
            raise error

    goes_on_behind(Cut)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("not of gRPC"), "not of gRPC"),
        (RayTaskError("generate", "a traceback", ValueError("a secret")), r"its log says why\.$"),
    ],
)
def test_an_error_that_is_no_loss_is_told(error: Exception, told: str) -> None:
    class Broken(Cast):
        def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
            class Wrong(Scripted):
                async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
                    raise error
                    yield

            self.calls.append(Wrong("r0", Act(), request, kind))
            return self.calls[-1]

    cast = Broken([])
    with pytest.raises((RuntimeError, ApiError), match=told):
        carry(cast)
    assert len(cast.calls) == 1


def test_the_next_replica_is_told_for_how_long_the_reader_has_waited() -> None:
    cast = Cast([Act(3), Act(0, end="silent"), Act(0, end="never accepts"), Act(3), Act()])
    carry(cast)
    first, moved, again, still, later = (call.request.waited for call in cast.calls)
    assert first == 0
    assert 0 < moved < again < still, "since the last token, not since the last replica"
    assert again > 0.1
    assert later < still


def test_a_handover_is_counted_by_its_cause() -> None:
    _, metrics = carry(Cast([Act(2, end="silent"), Act(3), Act()]))
    page = render([metrics.collect()]).decode()
    assert 'tidar:stream_handovers_total{cause="silent",ingress="here",model_name="tiny"} 1.0' in page
    assert 'tidar:stream_handovers_total{cause="ActorUnavailableError",ingress="here",model_name="tiny"} 1.0' in page
    assert 'tidar:stream_handover_seconds_count{ingress="here",model_name="tiny"} 2.0' in page


def test_usual_causes_are_there_before_they_count() -> None:
    """Prometheus sees no increase where a series first appears."""
    metrics = IngressMetrics("here")
    metrics.streams_of("tiny")
    page = render([metrics.collect()]).decode()
    for cause in ("silent", "ActorDiedError"):
        assert f'tidar:stream_handovers_total{{cause="{cause}",ingress="here",model_name="tiny"}} 0.0' in page


def test_what_an_engine_says_of_its_failure_is_no_name_of_a_series() -> None:
    _, metrics = carry(Cast([Act(2), Act(end="refuses"), Act()]))
    assert (
        'handovers_total{cause="refused",ingress="here",model_name="tiny"} 1.0' in render([metrics.collect()]).decode()
    )


def test_a_prompt_is_counted_by_the_first_replica_that_has_it() -> None:
    cast = Cast([Act(end="never accepts"), Act(0), Act(2), Act()])
    carry(cast)
    assert [route.counted for route in cast.routes] == [False, False, True, True]


def test_a_lost_replica_is_kept_clear_of_and_one_of_another_kind_is_never_asked_again() -> None:
    cast = Cast([Act(2), Act(end="other kind"), Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert [call.kind for call in cast.calls] == [None, KIND, KIND]
    assert (cast.routes[1].avoid, cast.routes[1].never) == ({"r0"}, frozenset())
    assert (cast.routes[2].avoid, cast.routes[2].never) == ({"r0"}, {"r1"})
    assert cast.routes[1].marks == cast.marks(REQUEST)
    assert [route.moved for route in cast.routes] == [False, True, True]


def test_before_the_first_token_any_kind_will_do() -> None:
    cast = Cast([Act(0), Act(end="other kind"), Act()])
    carry(cast)
    assert [call.kind for call in cast.calls] == [None, None]
    assert not any(route.moved for route in cast.routes), "nothing to compute anew that another prompt would not cost"


def test_a_replica_of_another_model_has_no_say() -> None:
    """While a deployment changes its model both are there under one name."""
    cast = Cast([Act(3, end="other model"), Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert cast.routes[1].never == {"r0"}
    assert cast.calls[0].cancelled


def test_a_replica_that_cannot_go_on_where_another_was_does_not_end_the_answer() -> None:
    cast = Cast([Act(2), Act(end="fails"), Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert cast.routes[2].never == {"r1"}


def test_what_fails_from_the_beginning_is_told() -> None:
    outputs, _ = carry(Cast([Act(end="fails"), Act()]))
    assert [output.finish and output.finish.reason for output in outputs] == [FinishReason.ERROR]


def test_a_call_that_cannot_be_made_leaves_nothing_behind() -> None:
    class Down(Cast):
        def generate(self, *_: object) -> Never:
            raise RuntimeError("Serve is going away")

    async def run() -> dict[str, Reception]:
        carrier = Carrier(Down([]), Patience(0.1, 1), IngressMetrics("here").streams_of("tiny"), NoOpTracer())
        with pytest.raises(RuntimeError, match="going away"):
            await anext(carrier.run(REQUEST, KIND.fingerprint))
        return carrier._channels._mailbox.waiting

    assert asyncio.run(run()) == {}


def test_a_call_that_nobody_accepts_is_made_again() -> None:
    cast = Cast([Act(end="never accepts"), Act()])
    outputs, metrics = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert set(re.findall(rb"handovers_total{.*} (.*)", render([metrics.collect()]))) == {b"0.0"}  # nobody had it
    assert [route.marks for route in cast.routes] == [cast.marks(REQUEST), b""], "its prefix would draw it there again"


def test_a_request_that_nobody_had_when_the_last_replica_went_is_told_so_at_once() -> None:
    """As whoever comes then; one that a replica had waits for the next."""
    patience, nobody = Patience(silence=0.1, give_up=60), [Act(end="never accepts"), Act()]
    cast = Cast(nobody, replicas=())
    with pytest.raises(ApiError) as caught:
        carry(cast, patience)
    assert (caught.value.status, caught.value.code, len(cast.calls)) == (503, "not_ready", 1)
    begun = Cast([Act(3), *nobody], replicas=())
    asleep = Cast(nobody, replicas=())
    for waits, patient in ((begun, patience), (asleep, replace(patience, wake=60))):
        outputs, _ = carry(waits, patient)
        assert [token for output in outputs for token in output.tokens] == undisturbed()


def test_a_stream_waits_for_a_replica_that_fits_for_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `carry_seconds` of ten minutes that is more than a thousand looks."""
    monkeypatch.setattr(handover, "LONGEST_PAUSE_SECONDS", 0)
    outputs, _ = carry(Cast([Act(2), *[Act(end="fits nobody")] * 1100, Act()]), Patience(silence=1, give_up=60))
    assert [token for output in outputs for token in output.tokens] == undisturbed()


def test_a_request_that_breaks_every_engine_does_not_go_round() -> None:
    cast = Cast([Act(3), Act(0, end="breaks")])
    with pytest.raises(ApiError, match="4 engine replicas were lost") as caught:
        carry(cast)
    assert (caught.value.status, caught.value.code) == (503, "replica_lost")
    assert len(cast.calls) == 4


class Alone(Cast):
    """The one replica that there is: each call is of the same name, and what happens comes by one line."""

    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
        call = super().generate(request, mailbox, kind, route)
        call.name, call.said = "r0", self.calls[0].said
        return call


def test_one_replica_that_loses_a_stream_again_and_again_is_one_loss() -> None:
    cast = Alone([Act(2), *[Act(0, end="aborts")] * 5, Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert len(cast.calls) == 7


def test_a_broken_engine_is_not_asked_again() -> None:
    """It takes requests on until its process ends, which would lose a stream four times before another is there."""
    cast = Cast([Act(2, end="breaks"), Act()])
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert cast.routes[1].never == {"r0"}


def test_who_may_wait_for_a_model_to_wake_does_though_it_fell_asleep_in_that_moment() -> None:
    short = Patience(silence=0.1, give_up=0.2)
    acts = [*[Act(end="never accepts")] * 2, Act()]
    with pytest.raises(ApiError, match=r"within 0.2 s"):
        carry(Cast(acts), short)
    outputs, _ = carry(Cast(acts), replace(short, wake=10))
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    with pytest.raises(ApiError, match=r"within 0.2 s"):  # a stream that has begun is not for a model that sleeps
        carry(Cast([Act(3), *acts]), replace(short, wake=10))


def test_a_stream_without_a_replica_is_given_up_in_time() -> None:
    with pytest.raises(ApiError, match=r"within 0.3 s"):
        carry(Cast([Act(3), Act(end="never accepts")]), Patience(silence=0.1, give_up=0.3))


@pytest.mark.parametrize("acts", [[], [Act(3)], [Act(end="never accepts")]])
def test_where_no_replica_will_come_any_more_nobody_waits(acts: list[Act]) -> None:
    cast = Cast([*acts, Act(end="deleted")])
    with pytest.raises(ApiError, match="stopped") as caught:
        carry(cast)
    assert (caught.value.status, caught.value.code) == (503, "not_ready")
    assert len(cast.calls) == len(acts) + 1


def test_the_first_replicas_refusal_is_the_clients_to_hear() -> None:
    async def run() -> list[object]:
        carrier = Carrier(
            Cast([Act(end="refuses")]), Patience(0.1, 1), IngressMetrics("here").streams_of("tiny"), NoOpTracer()
        )
        return [event async for update in carrier.run(REQUEST, KIND.fingerprint) for event in update.events]

    (event,) = asyncio.run(run())
    assert isinstance(event, Refusal)


def test_who_waits_in_vain_hears_why_it_was_refused() -> None:
    fits_nobody = [Act(2), Act(end="refuses"), *[Act(end="fits nobody")] * 40]
    with pytest.raises(ApiError, match=r"within 0\.2 s, and the last one said: refused: "):
        carry(Cast(fits_nobody), Patience(silence=0.1, give_up=0.2))


class Full(Cast):
    """No call finds room but those before one of them, and those behind it."""

    at = 0

    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
        class Refused(Scripted):
            async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
                raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
                yield

        call = super().generate(request, mailbox, kind, route)
        if len(self.calls) == self.at + 1:
            call = self.calls[self.at] = Refused(call.name, Act(), request, kind)
        return call


def test_a_full_server_says_so_at_once() -> None:
    cast = Full([Act()])
    with pytest.raises(ApiError) as caught:
        carry(cast)
    assert (caught.value.status, len(cast.calls)) == (429, 1)


def test_a_stream_that_was_begun_finds_its_place_though_there_is_none_for_new_ones() -> None:
    cast = Full([Act(2), Act(), Act()])
    cast.at = 1
    outputs, _ = carry(cast)
    assert [token for output in outputs for token in output.tokens] == undisturbed()
    assert len(cast.calls) == 3


def test_a_call_that_ends_without_an_end_of_its_answer_is_not_waited_for() -> None:
    """Though its replica lives, as its heartbeats show."""

    class Over(Scripted):
        async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
            yield Accepted(self.name, KIND, POSITIONS)
            for beat in range(50):
                asyncio.get_running_loop().call_later(beat * 0.02, self.say)

    goes_on_behind(Over, cause="ended early")


def test_closing_a_stream_cancels_its_call() -> None:
    cast = Cast([Act()])

    async def run() -> None:
        events = Carrier(cast, Patience(1, 1), IngressMetrics("here").streams_of("tiny"), NoOpTracer()).run(
            REQUEST, KIND.fingerprint
        )
        await anext(events)
        await events.aclose()

    asyncio.run(run())
    assert [call.cancelled for call in cast.calls] == [True]


@given(
    st.lists(st.sampled_from("abcd"), unique=True), st.frozensets(st.sampled_from("abcd")),
    st.frozensets(st.sampled_from("abcd")), st.none() | st.sampled_from("abcd"),
)  # fmt: skip
def test_a_way_is_kept(names: list[str], never: frozenset[str], avoid: frozenset[str], only: str | None) -> None:
    chosen = {names[place] for place in fitting(names, Route(never, avoid, only))}
    allowed = {name for name in names if name not in never and only in (None, name)}
    assert chosen == (allowed - avoid or allowed)
