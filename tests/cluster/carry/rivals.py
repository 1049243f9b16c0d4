"""A stage for streams and their second attempts: engines that pause, break or fall silent, and readers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.carry.channels import Call
from cluster.carry.handover import Carrier, Patience, Update
from cluster.carry.routing import fitting
from cluster.line import Accepted, EngineKind, Event, EventBatch, Route
from cluster.observe.ingress_metrics import IngressMetrics
from tests.cluster.scripted import KIND, POSITIONS, token_after
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput, StepTrace

LENGTH = 150
PATIENCE = Patience(silence=1.5, give_up=20)
STEP_SECONDS = 0.002
Said = Event | Exception


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(STEP_SECONDS)


@dataclass
class Engine:
    """A replica that says a token every few milliseconds to each request while it is awake, and else heartbeats.

    prefill: seconds before the first token; may_begin: whether that may come then. answer: what it says to a request
    instead, or raises. deaf: it accepts none. heard: how often somebody took what it had to say.
    """

    name: str
    kind: EngineKind = KIND
    prefill: float = 0.0
    may_begin: Callable[[], bool] = lambda: True
    answer: Said | None = None
    deaf: bool = False
    heard: int = 0
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

    async def hang_until(self, over: Callable[[], bool], further: float = 0.0) -> None:
        """However long that takes, and so many seconds: who listens counts ticks, which take longer on a busy
        machine."""
        self.awake.clear()
        await until(over)
        await self.hang(further)

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

    async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
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
            yield Accepted(engine.name, engine.kind, POSITIONS)
            if self.kind not in (None, engine.kind):
                return
            if engine.answer is not None:
                own = {"request_id": self.request.request_id}
                answer = engine.answer
                named = answer._replace(**own) if isinstance(answer, StepOutput) else replace(answer, **own)
                engine.box(self.mailbox).put_nowait(named)
                await asyncio.sleep(0.01)
                return
            await self._say_all(engine)
        finally:
            engine.running.discard(self.request.request_id)

    async def _say_all(self, engine: Engine) -> None:
        await asyncio.sleep(engine.prefill)
        await until(engine.may_begin)
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

    async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
        box = self.engine.box(self.mailbox)
        while True:
            events: list[Event] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    events.append(await box.get())
            await self.engine.awake.wait()
            yield EventBatch(self.engine.name, tuple(events))
            self.engine.heard += 1


@dataclass
class Stage:
    """Engines; a request goes to the one of those that its route allows that has the fewest, the first of several."""

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

    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Call:
        there = [self.engines[place] for place in fitting(list(self.replicas), route)]
        return Asked(min(there, key=lambda one: len(one.running), default=None), request, mailbox, kind)

    def listen(self, replica: str, mailbox: str) -> Call:
        return Fetched(next(engine for engine in self.engines if engine.name == replica), mailbox)

    def carrier(self, patience: Patience = PATIENCE) -> Carrier:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        return Carrier(self, patience, self.metrics.streams_of("tiny"), provider.get_tracer("test"))

    def counted(self) -> tuple[int, dict[str, int]]:
        """Rivals that were begun, and hand-overs by cause."""
        begun, causes = 0, {}
        for metric in self.metrics.collect():
            for sample in metric.samples:
                if sample.name == "tidar:stream_rivals_total":
                    begun = int(sample.value)
                if sample.name == "tidar:stream_handovers_total" and sample.value:
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
        async for update in carrier.run(self.request, KIND.fingerprint):
            self.hear(update)

    def hear(self, update: Update) -> None:
        self.moments.append(time.monotonic())
        if update.replica not in self.replicas[-1:]:
            self.replicas.append(update.replica)
        for event in update.events:
            assert isinstance(event, StepOutput)
            self.outputs.append(event)

    async def has(self, tokens: int) -> None:
        await until(lambda: len(self.outputs) >= tokens)

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
        async with asyncio.timeout(120):
            await scene()

    asyncio.run(run())
