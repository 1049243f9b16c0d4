"""Several streams that become one, and how often a stream gets a chunk."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import pytest

from cluster.carry.handover import Update
from cluster.errors import ApiError
from cluster.ingress.streams import LONGEST_INTERVAL_SECONDS, Admission, Pace, finished_well, merge, pieces_of
from cluster.line import Refusal
from cluster.wire.answer import Answer, Piece, ResponseOptions, requests_for
from tests.cluster.wire.test_answer import CARD, ids, output
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput


def test_events_that_end_an_answer_badly() -> None:
    for event, status in (
        (Refusal("a", "too much", "max_tokens"), 400),
        (StepOutput("a", (), finish=Finish(FinishReason.ERROR, error="no memory")), 500),
    ):
        with pytest.raises(ApiError) as caught:
            finished_well(event)
        assert caught.value.status == status


async def source(name: str, count: int, closed: list[str], fail: bool = False) -> AsyncGenerator[str, None]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield f"{name}{number}"
        if fail:
            raise ApiError(503, "gone")
    finally:
        closed.append(name)


def test_merged_streams_keep_their_order() -> None:
    async def run() -> tuple[list[str], list[str]]:
        closed: list[str] = []
        items = [item async for item in merge([source("a", 3, closed), source("b", 5, closed)])]
        return items, closed

    items, closed = asyncio.run(run())
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert [item for item in items if item[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_closing_the_merged_stream_closes_all(streams: int) -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        merged = merge([source(f"s{number}", 1000, closed) for number in range(streams)])
        await anext(merged)
        await merged.aclose()
        return list(closed)

    assert sorted(asyncio.run(run())) == [f"s{number}" for number in range(streams)]


def test_one_streams_error_ends_the_others() -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        with pytest.raises(ApiError, match="gone"):
            async for _ in merge([source("a", 2, closed, fail=True), source("b", 1000, closed)]):
                pass
        return list(closed)

    assert sorted(asyncio.run(run())) == ["a", "b"]


def test_a_request_at_fault_is_told_so_after_it_was_let_in() -> None:
    finish = Finish(FinishReason.ERROR, error="the grammar cannot be used", param="grammar")
    with pytest.raises(ApiError) as caught:
        finished_well(StepOutput("answer-0", (), finish=finish))
    assert (caught.value.status, caught.value.param) == (400, "grammar")


def test_places_are_given_back_however_a_request_ends() -> None:
    admission = Admission(per_replica=2)
    with admission.enter(3, replicas=2):
        with pytest.raises(ApiError, match="full"), admission.enter(2, replicas=2):
            pass
        with pytest.raises(ValueError, match="oops"), admission.enter(1, replicas=2):
            raise ValueError("oops")
        assert admission.under_way == 3
    assert admission.under_way == 0
    with admission.enter(100, replicas=1):
        assert admission.under_way == 100


class Told:
    """A carrier that brings what the test says."""

    def __init__(self, *updates: tuple[StepOutput | Refusal, ...]):
        self._updates = updates

    async def run(self, request: Request, base: str) -> AsyncGenerator[Update, None]:
        for events in self._updates:
            yield Update("r1", events)


def pieces_from(told: Told, pace: Pace | None = None, trace: bool = False) -> tuple[list[Piece], ApiError | None]:
    async def run() -> tuple[list[Piece], ApiError | None]:
        found: list[Piece] = []
        requests = requests_for("answer", [(1, 2, 3)], [SamplingParams(max_tokens=50)])
        answer = Answer(CARD, requests, ResponseOptions(trace=trace))
        try:
            async for piece in pieces_of(answer, told, Admission(4), 1, pace):  # type: ignore[arg-type]
                found.append(piece)
        except ApiError as error:
            return found, error
        return found, None

    return asyncio.run(run())


STEPS = [output(ids(word)) for word in ("the", " quick", " brown")]
LAST = output(ids(" fox"), Finish(FinishReason.LENGTH))


@pytest.mark.parametrize("trace", [False, True])
def test_steps_that_come_together_are_one_piece_unless_they_are_traced(trace: bool) -> None:
    apart, _ = pieces_from(Told(*[(step,) for step in (*STEPS, LAST)]), trace=trace)
    together, _ = pieces_from(Told(tuple(STEPS), (LAST,)), trace=trace)
    assert "".join(piece.text for piece in together) == "".join(piece.text for piece in apart)
    assert [piece.finish for piece in together][-1] == Finish(FinishReason.LENGTH)
    assert len(together) == (4 if trace else 2)
    assert all((piece.trace is not None) == trace for piece in together)


def test_what_came_before_an_error_is_told_first() -> None:
    broken = StepOutput("answer-0", (), None, Finish(FinishReason.ERROR, error="it broke"))
    pieces, error = pieces_from(Told((*STEPS, broken)))
    assert "".join(piece.text for piece in pieces) == "the quick brown"
    assert error is not None
    assert error.status == 500


def test_a_pace_is_shared_by_streams_alone_and_never_slow() -> None:
    pace = Pace(100)
    assert pace.interval("cpu") == 0
    with pace.stream(), pace.stream():
        assert pace.interval("cpu") == pytest.approx(0.02)
    assert pace.interval("cpu") == 0
    assert 0 < LONGEST_INTERVAL_SECONDS <= 0.25
    with ExitStack() as many:
        for _ in range(1000):
            many.enter_context(pace.stream())
        assert pace.interval("cpu") == LONGEST_INTERVAL_SECONDS
    for device in ("cpu", "cuda"):
        with (unset := Pace(0)).stream():
            assert unset.interval(device) > 0


def test_a_stream_counts_from_its_first_piece_to_its_end() -> None:
    pace, seen = Pace(1000), []

    class Looking(Told):
        async def run(self, request: Request, base: str) -> AsyncGenerator[Update, None]:
            async for update in super().run(request, base):
                seen.append(pace.interval("cpu") > 0)
                yield update

    pieces_from(Looking(*[(step,) for step in (*STEPS, LAST)]), pace)
    assert seen == [False, True, True, True]
    assert pace.interval("cpu") == 0
