"""A second replica beside one that is quiet: it takes over or it goes, and what is passed on never shows it."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.trace import StatusCode
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError

from cluster.carry.channels import TICK_SECONDS
from cluster.carry.handover import Patience
from cluster.errors import ApiError
from cluster.line import Refusal
from cluster.observe.ingress_metrics import render
from tests.cluster.carry.rivals import PATIENCE, Engine, Reader, Stage, asking, play, until
from tests.cluster.scripted import OTHER
from tidar_core.request import Finish, FinishReason, StepOutput


def never() -> bool:
    return False


async def read_while_the_first_hangs(
    stage: Stage, over: Callable[[], bool] = never, further: float = 0.0, tokens: int = 3
) -> Reader:
    """One stream whose replica hangs, as by `Engine.hang_until`, once it has brought some tokens."""
    reader = Reader()
    reading = asyncio.create_task(reader.read(stage.carrier()))
    await reader.has(tokens)
    hanging = asyncio.create_task(stage.engines[0].hang_until(over, further))
    await reading
    reader.check()
    hanging.cancel()
    return reader


def test_a_rival_takes_over_long_before_the_quiet_replica_counts_as_dead() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1")
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage)
        assert PATIENCE.doubt < reader.gap
        assert reader.replicas == ["r0", "r1"]
        assert stage.counted() == (1, {"quiet": 1})
        assert stage.silent == {"r0"}
        await asyncio.sleep(0.05)
        assert not first.running, "it finds its call cancelled when it wakes"
        (moved,) = second.asked
        assert len(moved.emitted) >= 3
        assert moved.waited >= PATIENCE.doubt - 0.05
        left, taken = stage.attempts()
        assert (left.status.status_code, left.status.description) == (StatusCode.ERROR, "quiet")
        assert taken.status.status_code is StatusCode.UNSET
        assert "tidar.dropped" not in (taken.attributes or {})

    play(scene)


def test_a_replica_that_speaks_again_first_keeps_its_stream() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", may_begin=never)
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage, lambda: bool(second.asked), 0.3)
        assert reader.replicas == ["r0"]
        assert len(second.asked) == 1
        assert not second.running
        assert stage.counted() == (1, {})
        assert stage.silent == frozenset()
        _, dropped = sorted(stage.attempts(), key=lambda span: "tidar.dropped" in (span.attributes or {}))
        assert (dropped.attributes or {})["tidar.dropped"] == "spoke again"
        assert dropped.status.status_code is StatusCode.UNSET

    play(scene)


def test_a_sign_of_life_is_enough_to_keep_a_stream() -> None:
    """The first token may be long in coming where the replica is there: its heartbeats say so."""

    async def scene() -> None:
        first, second = Engine("r0", prefill=2.0), Engine("r1", may_begin=never)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await until(lambda: first.heard > 0)
        await first.hang_until(lambda: bool(second.asked), 0.3)
        await reading
        reader.check()
        assert reader.replicas == ["r0"]
        assert stage.counted() == (1, {})

    play(scene)


def test_a_rival_may_bring_the_first_token() -> None:
    async def scene() -> None:
        first, second = Engine("r0", may_begin=never), Engine("r1", kind=OTHER)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await until(lambda: first.heard > 0)
        hanging = asyncio.create_task(first.hang_until(never))
        await reading
        reader.check()
        assert reader.replicas == ["r1"]
        assert stage.counted() == (1, {"quiet": 1})
        hanging.cancel()

    play(scene)


def test_a_rival_that_is_not_ready_when_the_replica_counts_as_dead_goes_on_as_the_next_attempt() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", may_begin=lambda: "r0" in stage.silent)
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage)
        assert reader.replicas == ["r0", "r1"]
        assert len(second.asked) == 1, "its prefill went on"
        assert stage.counted() == (1, {"silent": 1})
        assert stage.silent == {"r0"}

    play(scene)


USELESS: dict[str, dict[str, Any]] = {
    "refuses": {"answer": Refusal("", "too long here", None)},
    "full": {"answer": BackPressureError(num_queued_requests=1, max_queued_requests=1)},
    "fails": {"answer": RayTaskError("generate", "a traceback", ValueError("broken"))},
    "going": {"answer": StepOutput("", (), finish=Finish(FinishReason.ABORT))},
    "ends of an error": {"answer": StepOutput("", (), finish=Finish(FinishReason.ERROR, error="no room"))},
    "other kind": {"kind": OTHER},
    "never accepts": {"deaf": True},
}


def test_a_rival_that_cannot_help_does_no_harm() -> None:
    """All at once, since each is but waiting."""

    async def scene(case: str, wakes: bool) -> None:
        useless, other = Engine("r1", **USELESS[case]), Engine("r2")
        stage = Stage([Engine("r0"), useless, other])
        busy = {f"another-{number}" for number in range(9)}
        other.running |= busy

        async def change_places() -> None:
            await until(lambda: bool(useless.asked))
            other.running -= busy
            useless.running |= busy

        changing = asyncio.create_task(change_places())
        reader = await read_while_the_first_hangs(stage, lambda: wakes and bool(useless.asked), 0.4)
        await changing
        begun, causes = stage.counted()
        assert (begun, len(useless.asked)) == (1, 1), f"{case}: no second rival for the same quiet"
        if wakes:
            assert (reader.replicas, causes) == (["r0"], {}), case
        else:
            assert (reader.replicas, causes) == (["r0", "r2"], {"silent": 1}), case

    async def all_of_them() -> None:
        await asyncio.gather(*(scene(case, wakes) for case in USELESS for wakes in (True, False)))

    play(all_of_them)


def test_who_refused_a_rival_is_not_asked_for_the_next() -> None:
    async def scene() -> None:
        first, another_kind, fits = Engine("r0"), Engine("r1", kind=OTHER), Engine("r2")
        reader = Reader()
        reading = asyncio.create_task(reader.read(Stage([first, another_kind, fits]).carrier()))
        await reader.has(3)
        await first.hang_until(lambda: bool(another_kind.asked), 0.3)
        await reader.has(len(reader.outputs) + 3)
        hanging = asyncio.create_task(first.hang_until(never))
        await reading
        reader.check()
        hanging.cancel()
        assert (reader.replicas, len(another_kind.asked), len(fits.asked)) == (["r0", "r2"], 1, 1)

    play(scene)


def test_where_no_other_replica_is_heard_nothing_is_begun() -> None:
    async def alone() -> None:
        stage = Stage([Engine("r0")])
        reader = await read_while_the_first_hangs(stage, lambda: True, 0.9)
        assert stage.counted() == (0, {})
        assert len(stage.engines[0].asked) == 1
        assert reader.gap > 0.8

    async def beside_a_silent_one() -> None:
        stage = Stage([Engine("r0"), Engine("r1")], silent=frozenset({"r1"}))
        await read_while_the_first_hangs(stage, lambda: True, 0.9)
        assert stage.counted() == (0, {})
        assert not stage.engines[1].asked

    async def beside_a_quiet_one() -> None:
        stage = Stage([Engine("r0"), Engine("r1")])
        carrier = stage.carrier()
        readers = [Reader(asking(number)) for number in range(2)]
        reading = []
        for reader in readers:
            reading.append(asyncio.create_task(reader.read(carrier)))
            await reader.has(3)
        # The second falls quiet first, by as many ticks: it is the first's stream that has nowhere to go.
        first, second = stage.engines
        second.awake.clear()
        for _ in range(2):
            await asyncio.sleep(TICK_SECONDS)
        await first.hang(0.7)
        await asyncio.gather(second.hang(0.1), *reading)
        for reader in readers:
            reader.check()
        assert len(stage.engines[1].asked) == 1

    async def all_of_them() -> None:
        await asyncio.gather(alone(), beside_a_silent_one(), beside_a_quiet_one())

    play(all_of_them)


def test_a_reader_who_leaves_ends_both_attempts() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", may_begin=never)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await reader.has(3)
        hanging = asyncio.create_task(first.hang(60))
        await until(lambda: bool(second.running))
        reading.cancel()
        await asyncio.wait({reading})
        await asyncio.sleep(0.05)
        assert not first.running
        assert not second.running
        hanging.cancel()

    play(scene)


def test_a_short_patience_begins_no_rivals() -> None:
    """What counts as death before a heartbeat may be late is not doubted first."""

    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1")
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier(Patience(silence=0.5, give_up=5))))
        await reader.has(3)
        hanging = asyncio.create_task(first.hang(60))
        await reading
        reader.check()
        assert stage.counted() == (0, {"silent": 1})
        hanging.cancel()

    play(scene)


def test_a_rival_does_not_count_as_a_loss() -> None:
    """One that has brought a token is followed however many replicas were lost before."""

    async def scene() -> None:
        stage = Stage([Engine("r0"), Engine("r1")])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier(Patience(1.5, 5, losses=1))))
        await reader.has(3)
        hanging = asyncio.create_task(stage.engines[0].hang(60))
        await reading
        reader.check()
        assert reader.replicas == ["r0", "r1"]
        hanging.cancel()

    play(scene)


def test_the_end_of_patience_ends_the_rival() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", may_begin=never)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier(Patience(1.5, 5, losses=1))))
        await reader.has(3)
        hanging = asyncio.create_task(first.hang(60))
        with pytest.raises(ApiError, match="1 engine replicas were lost"):
            await reading
        await asyncio.sleep(0.05)
        assert not first.running
        assert not second.running
        hanging.cancel()

    play(scene)


@pytest.mark.parametrize("seed", range(2))
def test_however_replicas_pause_every_stream_is_the_same(seed: int) -> None:
    draw = random.Random(seed)

    async def scene() -> None:
        stage = Stage([Engine(f"r{number}", prefill=0.05 + 0.2 * number) for number in range(3)])
        carrier = stage.carrier()
        over = asyncio.Event()

        async def disturb(engine: Engine) -> None:
            while not over.is_set():
                await engine.hang(draw.choice((0.1, 0.6, 0.7, 0.9, 1.2)))
                await asyncio.sleep(draw.uniform(0.05, 0.4))

        async def read(reader: Reader) -> None:
            await asyncio.sleep(draw.uniform(0, 1))
            await reader.read(carrier)

        disturbing = [asyncio.create_task(disturb(engine)) for engine in stage.engines]
        begun, causes = 0, dict[str, int]()
        while not begun > sum(causes.values()) > 0:  # until some took over and some did not
            readers = [Reader(asking(number)) for number in range(30)]
            await asyncio.gather(*(read(reader) for reader in readers))
            for reader in readers:
                reader.check()
            begun, causes = stage.counted()
        over.set()
        await asyncio.gather(*disturbing)
        await asyncio.sleep(0.1)
        assert not any(engine.running for engine in stage.engines)
        assert render([stage.metrics.collect()])

    play(scene)
