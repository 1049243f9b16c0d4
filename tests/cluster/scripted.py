"""Replicas that do as a script says, and a stream that is carried over them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.trace import NoOpTracer, Tracer
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.carry.handover import Carrier, Patience
from cluster.line import Accepted, EngineKind, Event, EventBatch, Failure, IngressCounts, Refusal, Route
from cluster.observe.ingress_metrics import IngressMetrics
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, StepOutput, StepTrace

KIND = EngineKind("f1", "i1", "bfloat16", "cpu", "cpu kernels", True)
OTHER = EngineKind("f1", "i1", "bfloat16", "cpu", "other kernels", True)
OF_ANOTHER_MODEL = EngineKind("f2", "i2", "bfloat16", "cpu", "cpu kernels", True)
LENGTH = 12
POSITIONS, FEWER_POSITIONS = 4096, 8  # the latter are less than prompt and answer
REQUEST = Request("answer-0", (3, 1, 4), SamplingParams(max_tokens=LENGTH, temperature=0.6, top_k=20))
NOTHING_COUNTED = IngressCounts("here", 0, b"")
End = Literal[
    "dies", "silent", "breaks", "aborts", "ends early", "never accepts", "refuses", "other kind", "cancelled",
    "other model", "fails",
    "deleted", "fits nobody", "fewer positions",
]  # fmt: skip


@dataclass(frozen=True)
class Act:
    """What one replica does: so many steps of so many tokens, and then this."""

    steps: int = 100
    run: int = 1
    end: End = "dies"


def token_after(known: Sequence[int]) -> int:
    """A token that depends on all before it."""
    value = 7
    for token in known:
        value = (value * 31 + token) % 509
    return value


def undisturbed() -> list[int]:
    known = list(REQUEST.prompt)
    while len(known) < len(REQUEST.prompt) + LENGTH:
        known.append(token_after(known))
    return known[len(REQUEST.prompt) :]


@dataclass
class Scripted:
    """A replica that has one request, and acts: its call for the request, and its call for what happens to it."""

    name: str
    act: Act
    request: Request
    kind: EngineKind | None
    cancelled: bool = False
    said: asyncio.Queue[EventBatch | BaseException | None] = field(default_factory=asyncio.Queue)

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
        if self.act.end == "never accepts":
            await asyncio.sleep(60)
        if self.act.end == "fits nobody":
            raise LookupError("no replica fits the call")
        if self.act.end == "deleted":
            raise DeploymentUnavailableError(DeploymentID("Engine", "api"))
        mine = {"other kind": OTHER, "other model": OF_ANOTHER_MODEL}.get(self.act.end, KIND)
        positions = FEWER_POSITIONS if self.act.end == "fewer positions" else POSITIONS
        most = min(positions, len(REQUEST.prompt) + LENGTH)
        yield Accepted(self.name, mine, positions)
        if self.kind not in (None, mine):
            return
        if self.act.end == "refuses":
            self.say(Refusal(self.request.request_id, "too long here", None))
            return
        if self.act.end == "fails":
            finish = Finish(FinishReason.ERROR, error="what was emitted already does not follow the grammar")
            self.say(StepOutput(self.request.request_id, (), finish=finish))
            return
        known = [*self.request.prompt, *self.request.emitted]
        step = bool(self.request.emitted)
        for _ in range(self.act.steps):
            await asyncio.sleep(0)
            self.say()
            said: list[int] = []
            while len(said) < self.act.run and len(known) < most:
                said.append(token_after(known))
                known.append(said[-1])
            finish = Finish(FinishReason.LENGTH) if len(known) == most else None
            trace = StepTrace(int(step), 0.001, tuple(said[:-1]), len(said) - 1, said[-1], 4, (), None, len(said), 0)
            late = StepOutput("answer-0.-1", (99, 99, 99))
            self.say(late, StepOutput(self.request.request_id, tuple(said), trace, finish))
            step += 1
            if finish:
                return
        match self.act.end:
            case "silent":
                await asyncio.sleep(60)
            case "ends early":
                await asyncio.sleep(0)
            case "breaks":
                self.say(Failure("the engine failed"))
            case "aborts":
                self.say(StepOutput(self.request.request_id, (), finish=Finish(FinishReason.ABORT)))
            case "cancelled":
                self.said.put_nowait(asyncio.CancelledError())
                raise asyncio.CancelledError
            case "dies" | "other kind" | "other model":
                gone = ActorUnavailableError("gone", b"0" * 16)
                self.said.put_nowait(gone)
                raise gone

    def say(self, *events: Event) -> None:
        self.said.put_nowait(EventBatch(self.name, events))


@dataclass
class Listening:
    """A replica's call for what happens: it comes for as long as the replica lives."""

    replica: Scripted
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Accepted | EventBatch]:
        while True:
            said = await self.replica.said.get()
            if said is None:
                return
            if isinstance(said, BaseException):
                raise said
            yield said


@dataclass
class Cast:
    """Replicas r0, r1, … that are called one after the other, each with an act; the last act is repeated."""

    acts: Sequence[Act]
    silent: frozenset[str] = frozenset()
    replicas: tuple[str, ...] = tuple(f"r{number}" for number in range(9))
    calls: list[Scripted] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def silence(self, name: str) -> None:
        self.silent |= {name}

    def marks(self, request: Request) -> bytes:
        return b"marks of " + bytes(request.prompt)

    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Scripted:
        act = self.acts[min(len(self.calls), len(self.acts) - 1)]
        self.calls.append(Scripted(f"r{len(self.calls)}", act, request, kind))
        self.routes.append(route)
        return self.calls[-1]

    def listen(self, replica: str, mailbox: str) -> Listening:
        return Listening(next(call for call in self.calls if call.name == replica))


def carry(
    cast: Cast, patience: Patience | None = None, tracer: Tracer | None = None
) -> tuple[list[StepOutput], IngressMetrics]:
    metrics = IngressMetrics("here")
    counts = metrics.streams_of("tiny")
    carrier = Carrier(cast, patience or Patience(silence=0.1, give_up=5), counts, tracer or NoOpTracer())

    async def run() -> list[StepOutput]:
        outputs: list[StepOutput] = []
        async for update in carrier.run(REQUEST, KIND.fingerprint):
            for event in update.events:
                assert isinstance(event, StepOutput)
                outputs.append(event)
        return outputs

    return asyncio.run(run()), metrics
