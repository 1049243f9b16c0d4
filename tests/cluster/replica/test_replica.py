"""The engine deployment itself, on one event loop, without Serve around it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve._private.config import DeploymentConfig
from transformers import PreTrainedTokenizerFast

from cluster.card import unpacked_tokenizer
from cluster.line import Accepted, Address, EventBatch, IngressCounts
from cluster.replica import replica as room
from cluster.replica.replica import EngineReplica
from tests.tiny import tiny_checkpoint
from tidar_core import SPINS
from tidar_core.config import EngineConfig
from tidar_core.request import Request, SamplingParams, StepOutput

NAME = "one"
LONG = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
BOX = Address("an ingress", "box")
Start = Callable[[], AbstractAsyncContextManager[EngineReplica]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("replica") / "model", max_positions=4096)


@pytest.fixture
def started(model: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=NAME), _deployment_config=DeploymentConfig())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the replica sets both: put back behind the test
    monkeypatch.setenv(SPINS, os.environ[SPINS])
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    line = SimpleNamespace(report=print, begin=print, advance=lambda *_: None, fail=print)  # there is no Ray to tell it
    monkeypatch.setattr(room, "ProgressLine", lambda _: line)
    config = EngineConfig(model=str(model), adapter="none", dtype="float32", device="cpu", threads=1)

    @asynccontextmanager
    async def start() -> AsyncIterator[EngineReplica]:
        made = EngineReplica.__new__(EngineReplica)
        await made.__init__(config, "tiny", 0)  # type: ignore[misc]  # as Serve does
        try:
            yield made
        finally:
            await asyncio.to_thread(made._thread.close)

    return start


async def running(replica: EngineReplica) -> int:
    load = await replica.record_autoscaling_stats()
    return int(load["answers"])


async def accepted(replica: EngineReplica, request: Request, address: Address = BOX) -> "asyncio.Task[None]":
    """Send a request, as an ingress does; the task is over when the request's own call is."""
    begun = asyncio.Event()

    async def call() -> None:
        async for said in replica.generate(request, address):
            assert isinstance(said, Accepted)
            begun.set()

    task = asyncio.create_task(call())
    await asyncio.wait_for(begun.wait(), 10)
    return task


@pytest.mark.parametrize(("chosen", "read"), [(None, "1000"), ("77", "77")])
def test_an_engines_threads_soon_rest_unless_somebody_chose_otherwise(chosen: str | None, read: str) -> None:
    # As the processes are: one starts Ray, whose workers inherit its environment and make replicas.
    replica = "from cluster.replica.replica import prepare_threads; prepare_threads(3); import torch"
    starter = f"import tidar_core, subprocess, sys; subprocess.run([sys.executable, '-c', {replica!r}], check=True)"
    environment = {name: value for name, value in os.environ.items() if name != SPINS} | {"OMP_DISPLAY_ENV": "verbose"}
    if chosen is not None:
        environment[SPINS] = chosen
    run = subprocess.run(
        [sys.executable, "-c", starter], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"GOMP_SPINCOUNT = '{read}'" in run.stderr
    assert "OMP_NUM_THREADS = '3'" in run.stderr


def test_an_answer_comes_by_the_mailbox_and_ends_both_calls(started: Start) -> None:
    async def run() -> None:
        async with started() as replica:
            short = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
            task = await accepted(replica, Request("a", (5, 6, 7), short))
            events = [event async for batch in replica.listen(BOX) for event in batch.events]
            await asyncio.wait_for(task, 10)
            assert all(isinstance(event, StepOutput) for event in events)
            assert sum(len(event.tokens) for event in events) == 5
            assert await running(replica) == 0

    asyncio.run(run())


def test_a_call_that_is_sent_again_ends_in_the_engine_too(started: Start) -> None:
    """Serve sends a call again whose line was cut: the engine ends what the first began when the second is there."""

    async def run() -> None:
        async with started() as replica:
            other = await accepted(replica, Request("other", (5, 6, 7), LONG))  # keeps the engine at work
            first = replica.generate(Request("a", (5, 6, 7), LONG), BOX)
            await anext(first)
            await asyncio.sleep(0.05)
            await first.aclose()
            again = await accepted(replica, Request("a", (5, 6, 7), LONG))
            await asyncio.wait_for(again, 10)
            other.cancel()
            async with asyncio.timeout(10):
                while replica._thread.stats is None or replica._thread.stats.running:
                    await asyncio.sleep(0.05)
            assert await running(replica) == 0

    asyncio.run(run())


@pytest.mark.parametrize("fetches", [False, True], ids=["cut off", "dead, its call goes on"])
def test_what_a_silent_ingress_asked_for_ends_and_other_requests_go_on(
    started: Start, monkeypatch: pytest.MonkeyPatch, fetches: bool
) -> None:
    monkeypatch.setattr(room, "TICK_SECONDS", 3600.0)  # a tick comes with each batch: how fast answers are is no matter

    async def run() -> None:
        async with started() as replica:
            gone, there = Address("gone", "box"), Address("there", "box")
            left = [await accepted(replica, Request(f"a{i}", (5, 6, 7), LONG), gone) for i in range(2)]
            task = await accepted(replica, Request("b", (5, 6, 7), LONG), there)
            calls = replica.listen(gone)
            await anext(calls)
            fetching = asyncio.create_task(exhaust(calls)) if fetches else None
            tokens, when_they_ended = 0, 0
            async for batch in replica.listen(there):
                await replica.alive("there", None)
                replica._tick()
                tokens += sum(len(event.tokens) for event in batch.events if isinstance(event, StepOutput))
                if not all(one.done() for one in left):
                    when_they_ended = tokens
            assert when_they_ended < 1000  # they would have gone on as long as the other
            assert tokens == LONG.max_tokens
            await asyncio.wait_for(task, 10)
            assert await running(replica) == 0
            if fetching is not None:
                await asyncio.wait_for(fetching, 10)

    asyncio.run(run())


def test_an_ingress_that_comes_back_from_a_silence_hears_of_new_requests_at_once(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mailbox was taken away meanwhile: the call that still fetches from it would bring nothing."""

    async def run() -> None:
        async with started() as replica:
            back = Address("back", "box")
            before = await accepted(replica, Request("before", (5, 6, 7), LONG), back)
            old_call = replica.listen(back)
            await anext(old_call)
            await replica.alive("there", None)
            for _ in range(room.GONE_TICKS + 1):
                replica._silences["there"] = 0
                replica._tick()
            await asyncio.wait_for(before, 10)
            monkeypatch.setattr(room, "IDLE_SECONDS", 60.0)
            after = await accepted(replica, Request("after", (5, 6, 7), LONG), back)
            await asyncio.wait_for(exhaust(old_call), 10)
            tokens = 0
            async for batch in replica.listen(back):
                tokens += sum(len(event.tokens) for event in batch.events if isinstance(event, StepOutput))
                if after.done():
                    break
            assert tokens == LONG.max_tokens

    asyncio.run(run())


def test_a_card_brings_its_tokenizer_to_whoever_does_not_have_it(started: Start) -> None:
    async def run() -> None:
        async with started() as replica:
            packed = await replica.describe("")
            assert unpacked_tokenizer(packed)("a b c") == replica_tokenizer(replica)("a b c")
            assert (await replica.describe(packed.digest)).tokenizer == b""
            assert (await replica.describe("another's")) == packed

    def replica_tokenizer(replica: EngineReplica) -> PreTrainedTokenizerFast:
        engine = replica._thread.ready.result()
        return engine.tokenizer

    asyncio.run(run())


def test_a_replica_that_nobody_looks_at_any_more_goes_on(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve has taken it away, and waits for its answers to end."""
    monkeypatch.setattr(room, "TICK_SECONDS", 0.02)

    async def run() -> None:
        async with started() as replica:
            tasks = [await accepted(replica, Request(name, (5, 6, 7), LONG), Address(name, "box")) for name in "ab"]
            await replica.alive("a", None)
            other = asyncio.create_task(exhaust(replica.listen(Address("b", "box"))))
            tokens = 0
            async for batch in replica.listen(Address("a", "box")):
                tokens += sum(len(event.tokens) for event in batch.events if isinstance(event, StepOutput))
            assert tokens == LONG.max_tokens
            await asyncio.wait_for(asyncio.gather(other, *tasks), 10)

    asyncio.run(run())


def test_what_an_ingress_counted_is_passed_on_until_it_is_gone(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TICK_SECONDS", 0.02)

    async def run() -> None:
        async with started() as replica:
            first, later, other = (IngressCounts(*told, b"") for told in (("a", 1), ("a", 2), ("b", 1)))
            for name, counts in (("line a", first), ("line b", other), ("line a", later), ("line c", None)):
                await replica.alive(name, counts)
            assert set((await replica.metrics()).ingresses) == {later, other}
            async with asyncio.timeout(10):
                while (await replica.metrics()).ingresses != (other,):
                    await replica.alive("line b", other)
                    await asyncio.sleep(0.01)

    asyncio.run(run())


async def exhaust(batches: AsyncIterator[EventBatch]) -> None:
    async for _ in batches:
        pass


def test_the_end_of_listening_ends_the_requests(started: Start) -> None:
    async def run() -> None:
        async with started() as replica:
            task = await accepted(replica, Request("a", (5, 6, 7), LONG))
            async with aclosing(replica.listen(BOX)) as batches:
                await anext(batches)
            await asyncio.wait_for(task, 10)
            assert await running(replica) == 0

    asyncio.run(run())


def test_a_second_listener_is_refused(started: Start) -> None:
    async def run() -> None:
        async with started() as replica:
            task = await accepted(replica, Request("a", (5, 6, 7), LONG))
            async with aclosing(replica.listen(BOX)) as batches:
                await anext(batches)
                with pytest.raises(LookupError, match="already"):
                    await anext(replica.listen(BOX))
            await asyncio.wait_for(task, 10)

    asyncio.run(run())


def test_a_stream_of_another_kind_of_engine_is_not_gone_on_with(started: Start) -> None:
    async def run() -> None:
        async with started() as replica:
            other = room.EngineKind("another", "", "float32", "cpu", "", True)
            said = [each async for each in replica.generate(Request("a", (5, 6, 7), LONG), BOX, other)]
            assert [each.kind == other for each in said] == [False]
            assert await running(replica) == 0

    asyncio.run(run())
