"""A second replica beside one that is quiet: it takes over or it goes, and what is passed on never shows it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError

from cluster.channels import Call
from cluster.engine_thread import Event, Refusal
from cluster.errors import ApiError
from cluster.handover import Carrier, News, Patience
from cluster.metrics import IngressMetrics, render
from cluster.replica import Accepted, Batch, EngineKind
from cluster.routing import Way, fitting
from tests.cluster.test_carrier import KIND, OTHER, token_after
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput, StepTrace

LENGTH = 150
PATIENCE = Patience(silence=1.5, give_up=20)
STEP_SECONDS = 0.002
Said = Event | Exception


@dataclass
class Engine:
    """A replica that says a token every few milliseconds to each request while it is awake, and else heartbeats.

    prefill: seconds before the first token. answer: what it says to a request instead, or raises. deaf: it accepts
    none.
    """

    name: str
    kind: EngineKind = KIND
    prefill: float = 0.0
    answer: Said | None = None
    deaf: bool = False
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    boxes: dict[str, asyncio.Queue[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.awake.set()

    async def hang(self, seconds: float) -> None:
        self.awake.clear()
        await asyncio.sleep(seconds)
        self.awake.set()

    def box(self, mailbox: str) -> asyncio.Queue[Event]:
        return self.boxes.setdefault(mailbox, asyncio.Queue())


@dataclass
class Asked:
    """A call for a request."""

    engine: Engine | None
    request: Request
    mailbox: str
    kind: EngineKind | None

    def cancel(self) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Accepted | Batch]:
        engine = self.engine
        if engine is None:
            raise LookupError("no replica fits the call")
        engine.asked.append(self.request)
        engine.running.add(self.request.request_id)
        try:
            await engine.awake.wait()
            if engine.deaf:
                await asyncio.sleep(60)
            if isinstance(engine.answer, Exception):
                raise engine.answer
            yield Accepted(engine.name, engine.kind)
            if self.kind not in (None, engine.kind):
                return
            if engine.answer is not None:
                engine.box(self.mailbox).put_nowait(replace(engine.answer, request_id=self.request.request_id))
                await asyncio.sleep(0.01)
                return
            await self._say_all(engine)
        finally:
            engine.running.discard(self.request.request_id)

    async def _say_all(self, engine: Engine) -> None:
        await asyncio.sleep(engine.prefill)
        known = [*self.request.prompt, *self.request.emitted]
        whole = len(self.request.prompt) + LENGTH
        step = bool(self.request.emitted)
        while len(known) < whole:
            await asyncio.sleep(STEP_SECONDS)
            await engine.awake.wait()
            known.append(token_after(known))
            finish = Finish(FinishReason.LENGTH) if len(known) == whole else None
            trace = StepTrace(int(step), 0.001, (), 0, known[-1], 4, (), None, 1, 0)
            engine.box(self.mailbox).put_nowait(StepOutput(self.request.request_id, (known[-1],), trace, finish))
            step += 1


@dataclass
class Fetched:
    """A call for what happens."""

    engine: Engine
    mailbox: str

    def cancel(self) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Accepted | Batch]:
        box = self.engine.box(self.mailbox)
        while True:
            events: list[Event] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    events.append(await box.get())
            await self.engine.awake.wait()
            yield Batch(self.engine.name, tuple(events))


@dataclass
class Stage:
    """Engines; a request goes to the one of those that its way allows that has the fewest, the first of several."""

    engines: list[Engine]
    silent: frozenset[str] = frozenset()
    metrics: IngressMetrics = field(default_factory=lambda: IngressMetrics("here"))
    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.engines)

    def silence(self, name: str) -> None:
        self.silent |= {name}

    def marks(self, request: Request) -> bytes:
        return b""

    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, way: Way) -> Call:
        there = [self.engines[place] for place in fitting(list(self.replicas), way)]
        return Asked(min(there, key=lambda one: len(one.running), default=None), request, mailbox, kind)

    def listen(self, replica: str, mailbox: str) -> Call:
        return Fetched(next(engine for engine in self.engines if engine.name == replica), mailbox)

    def carrier(self, patience: Patience = PATIENCE) -> Carrier:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        return Carrier(self, patience, self.metrics, provider.get_tracer("test"))

    def counted(self) -> tuple[int, dict[str, int]]:
        """Rivals that were begun, and hand-overs by cause."""
        begun, causes = 0, {}
        for metric in self.metrics.collect():
            for sample in metric.samples:
                if sample.name == "tidar:stream_rivals_total":
                    begun = int(sample.value)
                if sample.name == "tidar:stream_handovers_total":
                    causes[sample.labels["cause"]] = int(sample.value)
        return begun, causes

    def attempts(self) -> list[ReadableSpan]:
        """The spans of all attempts, the first that began before the others."""
        return sorted(self.spans.get_finished_spans(), key=lambda span: span.start_time or 0)


def asking(number: int) -> Request:
    return Request(f"answer-{number}", (3, 1, 4, number), SamplingParams(max_tokens=LENGTH))


@dataclass
class Reader:
    """Who reads one stream."""

    request: Request = field(default_factory=lambda: asking(0))
    outputs: list[StepOutput] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    async def read(self, carrier: Carrier) -> None:
        async for news in carrier.run(self.request):
            self.hear(news)

    def hear(self, news: News) -> None:
        self.moments.append(time.monotonic())
        if news.replica not in self.replicas[-1:]:
            self.replicas.append(news.replica)
        for event in news.events:
            assert isinstance(event, StepOutput)
            self.outputs.append(event)

    async def has(self, tokens: int) -> None:
        while len(self.outputs) < tokens:
            await asyncio.sleep(STEP_SECONDS)

    @property
    def gap(self) -> float:
        return max(late - early for early, late in zip(self.moments, self.moments[1:], strict=False))

    def check(self) -> None:
        """The stream is what it would have been."""
        known = list(self.request.prompt)
        while len(known) < len(self.request.prompt) + LENGTH:
            known.append(token_after(known))
        assert [token for output in self.outputs for token in output.tokens] == known[len(self.request.prompt) :]
        traces = [output.trace for output in self.outputs if output.trace]
        assert [trace.step for trace in traces] == list(range(len(traces)))
        assert [trace.seconds for trace in traces] == sorted(trace.seconds for trace in traces)
        assert [bool(output.finish) for output in self.outputs] == [False] * (len(self.outputs) - 1) + [True]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(run())


async def read_while_the_first_hangs(stage: Stage, seconds: float, tokens: int = 3) -> Reader:
    """One stream whose replica hangs once it has brought some tokens."""
    reader = Reader()
    reading = asyncio.create_task(reader.read(stage.carrier()))
    await reader.has(tokens)
    hanging = asyncio.create_task(stage.engines[0].hang(seconds))
    await reading
    reader.check()
    hanging.cancel()
    return reader


def test_a_rival_takes_over_long_before_the_quiet_replica_counts_as_dead() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1")
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage, 60)
        assert PATIENCE.doubt < reader.gap < PATIENCE.silence - 0.3
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
        first, second = Engine("r0"), Engine("r1", prefill=1.0)
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage, PATIENCE.doubt + 0.3)
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
        first, second = Engine("r0", prefill=2.0), Engine("r1", prefill=1.0)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await asyncio.sleep(0.2)
        await first.hang(PATIENCE.doubt + 0.3)
        await reading
        reader.check()
        assert reader.replicas == ["r0"]
        assert stage.counted() == (1, {})

    play(scene)


def test_a_rival_may_bring_the_first_token() -> None:
    async def scene() -> None:
        first, second = Engine("r0", prefill=1.0), Engine("r1", kind=OTHER)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await asyncio.sleep(0.2)
        hanging = asyncio.create_task(first.hang(60))
        await reading
        reader.check()
        assert reader.replicas == ["r1"]
        assert stage.counted() == (1, {"quiet": 1})
        hanging.cancel()

    play(scene)


def test_a_rival_that_is_not_ready_when_the_replica_counts_as_dead_goes_on_as_the_next_attempt() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", prefill=PATIENCE.silence)
        stage = Stage([first, second])
        reader = await read_while_the_first_hangs(stage, 60)
        assert reader.replicas == ["r0", "r1"]
        assert len(second.asked) == 1
        assert stage.counted() == (1, {"silent": 1})
        assert stage.silent == {"r0"}
        assert reader.gap < PATIENCE.doubt + PATIENCE.silence + 0.4, "its prefill went on"

    play(scene)


@pytest.mark.parametrize(
    "second",
    [
        {"answer": Refusal("", "too long here", None)},
        {"answer": BackPressureError(num_queued_requests=1, max_queued_requests=1)},
        {"answer": RayTaskError("generate", "a traceback", ValueError("broken"))},
        {"answer": StepOutput("", (), finish=Finish(FinishReason.ABORT))},
        {"answer": StepOutput("", (), finish=Finish(FinishReason.ERROR, error="no room"))},
        {"kind": OTHER},
        {"deaf": True},
    ],
    ids=["refuses", "full", "fails", "going", "ends of an error", "other kind", "never accepts"],
)
def test_a_rival_that_cannot_help_does_no_harm(second: dict[str, Said]) -> None:
    async def scene(seconds: float) -> None:
        useless, other = Engine("r1", **second), Engine("r2")  # type: ignore[arg-type]
        stage = Stage([Engine("r0"), useless, other])
        busy = {f"another-{number}" for number in range(9)}
        other.running |= busy

        async def change_places() -> None:
            while not useless.asked:
                await asyncio.sleep(0.01)
            other.running -= busy
            useless.running |= busy

        changing = asyncio.create_task(change_places())
        reader = await read_while_the_first_hangs(stage, seconds)
        await changing
        begun, causes = stage.counted()
        assert (begun, len(useless.asked)) == (1, 1), "no second rival for the same quiet"
        if seconds < PATIENCE.silence:
            assert (reader.replicas, causes) == (["r0"], {})
        else:
            assert (reader.replicas, causes) == (["r0", "r2"], {"silent": 1})

    async def both() -> None:
        await asyncio.gather(scene(0.9), scene(60))

    play(both)


def test_where_no_other_replica_is_heard_nothing_is_begun() -> None:
    async def alone() -> None:
        stage = Stage([Engine("r0")])
        reader = await read_while_the_first_hangs(stage, 0.9)
        assert stage.counted() == (0, {})
        assert len(stage.engines[0].asked) == 1
        assert reader.gap > 0.8

    async def beside_a_silent_one() -> None:
        stage = Stage([Engine("r0"), Engine("r1")], silent=frozenset({"r1"}))
        await read_while_the_first_hangs(stage, 0.9)
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
        # The second falls quiet first: it is the first's stream that has nowhere to go.
        later = asyncio.create_task(stage.engines[1].hang(0.9))
        await asyncio.sleep(0.2)
        await asyncio.gather(stage.engines[0].hang(0.7), later, *reading)
        for reader in readers:
            reader.check()
        assert len(stage.engines[1].asked) == 1

    play(alone)
    play(beside_a_silent_one)
    play(beside_a_quiet_one)


def test_a_reader_who_leaves_ends_both_attempts() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", prefill=5.0)
        stage = Stage([first, second])
        reader = Reader()
        reading = asyncio.create_task(reader.read(stage.carrier()))
        await reader.has(3)
        hanging = asyncio.create_task(first.hang(60))
        while not second.running:
            await asyncio.sleep(0.01)
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
        hanging.cancel()

    play(scene)


def test_the_end_of_patience_ends_the_rival() -> None:
    async def scene() -> None:
        first, second = Engine("r0"), Engine("r1", prefill=5.0)
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
