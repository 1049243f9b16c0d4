"""The calls that bring what happens: one a replica, and what becomes of requests when one ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field

import pytest

from cluster.carry.channels import TICK_SECONDS, Channels, LookAgain, Lost, Reception, next_arrival
from cluster.line import Accepted, Event, EventBatch, Failure
from tidar_core.request import StepOutput

ENDS = None
GIVE_UP = 2.0  # seconds that a replica is waited for which is the only one
Said = Event | Exception | None


@dataclass
class Line:
    """A replica's call: brings what the test says, `ENDS` by itself or as an exception says."""

    replica: str
    mailbox: str
    said: asyncio.Queue[Said] = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
        while (said := await self.said.get()) is not ENDS:
            if isinstance(said, Exception):
                raise said
            yield EventBatch(self.replica, (said,))


@dataclass
class Lines:
    made: list[Line] = field(default_factory=list)

    def __call__(self, replica: str, mailbox: str) -> Line:
        self.made.append(Line(replica, mailbox))
        return self.made[-1]


def play(
    scene: Callable[[Channels, Lines], Awaitable[None]],
    silence: float = 5.0,
    doubt: float | None = None,
    *,
    there: Callable[[], Collection[str]] = lambda: {"r0", "r1", "r2"},
) -> Lines:
    lines = Lines()

    async def run() -> None:
        async with asyncio.timeout(60):
            await scene(Channels(lines, doubt or silence, silence, GIVE_UP, there), lines)

    asyncio.run(run())
    return lines


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def heard(reception: Reception) -> object:
    return await reception.arrived.get()


def token(request_id: str, value: int) -> StepOutput:
    return StepOutput(request_id, (value,))


def test_what_came_while_the_event_loop_was_held_up_is_heard_though_the_time_is_over() -> None:
    async def run() -> str:
        arrivals: asyncio.Queue[str] = asyncio.Queue()

        async def speak() -> None:
            await asyncio.sleep(TICK_SECONDS / 2)
            arrivals.put_nowait("a word")

        waiting, speaking = (asyncio.ensure_future(each) for each in (next_arrival(arrivals, 0, "silent"), speak()))
        await asyncio.sleep(0)
        time.sleep(2 * TICK_SECONDS)
        await speaking
        return await waiting  # type: ignore[no-any-return]

    assert asyncio.run(run()) == "a word"


def test_all_requests_at_a_replica_come_by_one_call() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        one, two, other = (channels.expect(name) for name in ("one", "two", "other"))
        for reception, replica in ((one, "r0"), (two, "r0"), (other, "r1")):
            channels.accepted(reception, replica)
        await settle()
        first, second = lines.made
        for event in (token("two", 1), token("one", 2), token("nobody", 9), token("two", 3)):
            first.said.put_nowait(event)
        second.said.put_nowait(token("other", 4))
        assert await heard(one) == token("one", 2)
        assert [await heard(two), await heard(two)] == [token("two", 1), token("two", 3)]
        assert await heard(other) == token("other", 4)

    lines = play(scene)
    assert [line.replica for line in lines.made] == ["r0", "r1"]
    assert lines.made[0].mailbox == lines.made[1].mailbox


def test_events_of_a_replica_that_has_not_the_request_are_left_out() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        one, other = channels.expect("one"), channels.expect("other")
        channels.accepted(one, "r0")
        channels.accepted(other, "r1")
        await settle()
        lines.made[1].said.put_nowait(token("one", 9))
        lines.made[1].said.put_nowait(token("other", 1))
        lines.made[0].said.put_nowait(token("one", 2))
        assert await heard(other) == token("other", 1)
        assert await heard(one) == token("one", 2)

    play(scene)


def test_events_that_come_before_the_acceptance_count_where_they_are_of_who_accepts() -> None:
    """A call that Serve sent again may have begun at another replica too."""

    async def scene(channels: Channels, lines: Lines) -> None:
        one, two, again = (channels.expect(name) for name in ("one", "two", "again"))
        channels.accepted(one, "r0")
        await settle()
        for event in (token("two", 1), token("again", 1), token("two", 2)):
            lines.made[0].said.put_nowait(event)
        await settle()
        assert channels.accepted(two, "r0") == [token("two", 1), token("two", 2)]
        assert channels.accepted(again, "r1") == []
        lines.made[0].said.put_nowait(token("two", 3))
        assert await heard(two) == token("two", 3)
        assert again.arrived.empty()

    play(scene)


def test_a_call_that_ends_by_itself_is_made_again_while_somebody_waits() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        one = channels.expect("one")
        channels.accepted(one, "r0")
        await settle()
        lines.made[0].said.put_nowait(ENDS)
        await settle()
        lines.made[1].said.put_nowait(token("one", 1))
        assert await heard(one) == token("one", 1)
        channels.forget(one)
        lines.made[1].said.put_nowait(ENDS)
        await settle()
        assert len(lines.made) == 2
        two = channels.expect("two")
        channels.accepted(two, "r0")
        await settle()
        assert len(lines.made) == 3

    lines = play(scene)
    assert len({line.mailbox for line in lines.made}) == 1, "nothing was lost, so the name may stay"


def test_what_a_failed_call_may_have_taken_with_it_is_lost_and_later_requests_have_another_name() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        one, elsewhere, late = (channels.expect(name) for name in ("one", "elsewhere", "late"))
        channels.accepted(one, "r0")
        channels.accepted(elsewhere, "r1")
        await settle()
        lines.made[0].said.put_nowait(ConnectionError("gone"))
        came = await heard(one)
        assert isinstance(came, Lost)
        assert came.cause == "ConnectionError"
        assert elsewhere.arrived.empty()
        with pytest.raises(Lost) as caught:
            channels.accepted(late, "r0")
        assert caught.value.replica == "r0"
        again = channels.expect("again")
        channels.accepted(again, "r0")
        await settle()
        lines.made[1].said.put_nowait(token("elsewhere", 1))
        assert await heard(elsewhere) == token("elsewhere", 1)

    lines = play(scene)
    assert [line.replica for line in lines.made] == ["r0", "r1", "r0"]
    assert lines.made[2].mailbox != lines.made[0].mailbox


@pytest.mark.parametrize("failure", [None, Failure("the engine failed")])
def test_a_replica_that_falls_silent_or_breaks_loses_all_its_requests(failure: Failure | None) -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        receptions = [channels.expect(str(number)) for number in range(3)]
        for reception in receptions:
            channels.accepted(reception, "r0")
        await settle()
        if failure is not None:
            lines.made[0].said.put_nowait(failure)
        for reception in receptions:
            came = await heard(reception)
            assert isinstance(came, Lost)
            assert came.cause == ("silent" if failure is None else "engine failed")

    lines = play(scene, silence=0.2)
    assert [line.cancelled for line in lines.made] == [True]


def test_a_replica_that_says_nothing_for_a_while_is_quiet_until_it_speaks() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        one, two, other = (channels.expect(name) for name in ("one", "two", "other"))
        for reception, replica in ((one, "r0"), (two, "r0"), (other, "r1")):
            channels.accepted(reception, replica)
        await settle()
        lines.made[0].said.put_nowait(token("one", 1))
        assert await heard(one) == token("one", 1)
        for reception in (one, two):
            assert await heard(reception) == LookAgain()
        assert channels.quiet == {"r0"}
        lines.made[0].said.put_nowait(token("one", 2))
        assert [await heard(one), await heard(one)] == [LookAgain(), token("one", 2)]
        assert await heard(two) == LookAgain()
        assert channels.quiet == frozenset()
        assert other.arrived.empty()
        assert not any(line.cancelled for line in lines.made)

    play(scene, doubt=0.3)


def test_a_quiet_replica_that_stays_so_or_dies_is_lost_and_quiet_no_more() -> None:
    async def scene(channels: Channels, lines: Lines) -> None:
        for place, (end, cause) in enumerate([(None, "silent"), (ConnectionError("gone"), "ConnectionError")]):
            one = channels.expect(f"one-{place}")
            channels.accepted(one, "r0")
            await settle()
            lines.made[place].said.put_nowait(token(one.request_id, 1))
            assert [await heard(one), await heard(one)] == [token(one.request_id, 1), LookAgain()]
            if end is not None:
                lines.made[place].said.put_nowait(end)
            lost = await heard(one)
            assert isinstance(lost, Lost)
            assert lost.cause == cause
            assert channels.quiet == frozenset()

    play(scene, silence=0.5, doubt=0.2)


@pytest.mark.parametrize("spoke", [True, False])
@pytest.mark.parametrize("doubt", [0.2, None])
def test_the_only_replica_is_waited_for(spoke: bool, doubt: float | None) -> None:
    """As where a burst of requests keeps it busy: its streams would come back to it, behind them all."""

    async def scene(channels: Channels, lines: Lines) -> None:
        one = channels.expect("one")
        channels.accepted(one, "r0")
        await settle()
        if spoke:
            lines.made[0].said.put_nowait(token("one", 1))
            assert await heard(one) == token("one", 1)
        await asyncio.sleep(GIVE_UP / 2)
        lines.made[0].said.put_nowait(token("one", 2))
        came = await heard(one)
        while came == LookAgain():
            came = await heard(one)
        assert came == token("one", 2)
        assert channels.quiet == frozenset()
        began = asyncio.get_running_loop().time()
        while not isinstance(came, Lost):
            came = await heard(one)
        assert came.cause == "silent"
        assert asyncio.get_running_loop().time() - began > GIVE_UP * 0.8

    lines = play(scene, silence=0.4, doubt=doubt, there=lambda: {"r0"})
    assert [line.cancelled for line in lines.made] == [True]


def test_the_only_replica_is_left_once_there_is_another() -> None:
    there = {"r0"}

    async def scene(channels: Channels, lines: Lines) -> None:
        one = channels.expect("one")
        channels.accepted(one, "r0")
        await settle()
        await asyncio.sleep(0.8)
        assert one.arrived.empty()
        there.add("r1")
        async with asyncio.timeout(5):
            assert isinstance(await heard(one), Lost)

    play(scene, silence=0.4, doubt=0.2, there=lambda: there)


def test_a_call_that_was_just_made_is_not_doubted() -> None:
    """It has a way to go before the replica can say anything."""

    async def scene(channels: Channels, lines: Lines) -> None:
        one = channels.expect("one")
        channels.accepted(one, "r0")
        lost = await heard(one)
        assert isinstance(lost, Lost)
        assert lost.cause == "silent"

    play(scene, silence=0.5, doubt=0.2)


def test_a_replica_whose_call_ends_by_itself_while_it_is_quiet_is_quiet_no_more() -> None:
    """As where the last request there ended in that moment: else new ones would avoid it while there is work."""

    async def scene(channels: Channels, lines: Lines) -> None:
        one, next_one = channels.expect("one"), channels.expect("next one")
        channels.accepted(one, "r0")
        await settle()
        lines.made[0].said.put_nowait(token("one", 1))
        assert [await heard(one), await heard(one)] == [token("one", 1), LookAgain()]
        assert channels.quiet == {"r0"}
        channels.forget(one)
        channels.accepted(next_one, "r0")
        lines.made[0].said.put_nowait(ENDS)
        await settle()
        lines.made[1].said.put_nowait(token("next one", 2))
        assert [await heard(next_one), await heard(next_one)] == [LookAgain(), token("next one", 2)]
        assert channels.quiet == frozenset()

    play(scene, doubt=0.3)
