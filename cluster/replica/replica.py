"""The engine deployment: one engine a GPU, or one in all where there is none."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve._private.config import DeploymentConfig

from cluster.card import ModelCard, PackedCard, pack_card
from cluster.line import (
    ANYWHERE,
    HEARTBEAT_SECONDS,
    PUBLISHED_MARKS,
    Accepted,
    Address,
    Alive,
    EngineKind,
    Event,
    EventBatch,
    Failure,
    IngressCounts,
    Refusal,
    ReplicaCounts,
    Route,
)
from cluster.observe.replica_metrics import ReplicaMetrics, Timing
from cluster.replica.engine_thread import EngineThread, StepCounts
from cluster.replica.progress import ProgressLine
from tidar_core import SPINS, SPINS_OF_AN_ENGINE_ALONE
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.imports import quick_imports
from tidar_core.request import FinishReason, Request

if TYPE_CHECKING:
    from tidar_core.engine import Engine

log = logging.getLogger("ray.serve")
LAST_WORDS_SECONDS = 0.5  # for the failure to reach the clients
# Without any request, and a call for events ends: Serve waits for calls before it takes a replica away.
IDLE_SECONDS = 1.0
UNHEARD_SECONDS = 60.0
# An ingress that shows no sign of life for so many ticks is gone; one that showed one a few ticks ago is there.
TICK_SECONDS, GONE_TICKS, THERE_TICKS = 1.0, 10, 2
STEP_SECONDS = 120.0  # an engine that takes longer over a step hangs
# An engine's threads wait for each other awake, but for microseconds only: proxy and ingress want the same processors,
# and the system moves a thread that lost its own only to one that rests. A replica inherits what an engine alone uses
# from the process that started Ray, so that only what somebody else chose counts as a choice.
SPINS_BESIDE_OTHERS = "1000"


@dataclass(slots=True)
class ReplicaMailbox:
    """The events of all requests that were sent under one address. requests: those in flight. heard: somebody
    listens."""

    heard: bool = False
    requests: dict[str, "Subscriber"] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, event: Event) -> None:
        self.events.append(event)
        self.filled.set()

    def close(self) -> None:
        """Nobody will fetch what comes: the requests end."""
        for subscriber in self.requests.values():
            subscriber.over.set()

    async def take(self) -> tuple[Event, ...]:
        """All events since the last call, waiting for one; none where nothing happens for a heartbeat."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self.filled.wait()
        self.filled.clear()
        taken, self.events = tuple(self.events), []
        return taken


@dataclass(slots=True)
class Subscriber:
    """A request in flight, as the event loop sees it. over: nothing more is done for it, whether it `ended` or not."""

    timing: Timing
    mailbox: ReplicaMailbox
    ended: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


def prepare_threads(threads: int) -> None:
    """What OpenMP reads once, when torch is first imported. Ray had set its threads to the CPUs that were asked for."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if os.environ[SPINS] == SPINS_OF_AN_ENGINE_ALONE:
        os.environ[SPINS] = SPINS_BESIDE_OTHERS


def most_of(deployment: DeploymentConfig) -> int:
    """Replicas that a deployment may have; a Serve config says more of that than the options that it was built by."""
    scaling = deployment.autoscaling_config
    return scaling.max_replicas if scaling is not None else int(deployment.num_replicas or 1)


def share_of_node(device: str, engines: int) -> int:
    """CPU threads of an engine that shares this node: with as many others as come to each of the nodes that are there
    by now and that engines may run on, and no more than find room on it."""

    def fits(offered: dict[str, float]) -> bool:
        return bool(offered.get("CPU")) and (device == "cpu" or bool(offered.get("GPU")))

    nodes = [node for node in ray.nodes() if node["Alive"] and fits(node["Resources"])]
    here = ray.get_runtime_context().get_node_id()
    (offered,) = (node["Resources"] for node in nodes if node["NodeID"] == here)
    engines_here = -(-engines // len(nodes))
    if device == "cuda":
        engines_here = min(engines_here, int(offered["GPU"]))
    return max(1, int(offered["CPU"] // engines_here))


class EngineReplica:
    """Serves one engine to any number of ingresses. Everything but the engine's thread runs on one event loop.

    route: read by the router before the call gets here (`cluster.carry.routing`); a method may check it.
    """

    async def __init__(self, config: EngineConfig, name: str, others: int):  # type: ignore[misc]  # Serve awaits it
        """others: how many engines there may be of other names."""
        context = serve.get_replica_context()
        self._name = name
        self._replica = context.replica_id.unique_id
        self._loop = asyncio.get_running_loop()
        self._subscribers: dict[str, Subscriber] = {}
        self._mailboxes: dict[Address, ReplicaMailbox] = {}
        self._silences: dict[str, int] = {}  # ticks since an ingress gave a sign of life
        self._ingress_counts: dict[str, IngressCounts] = {}  # by the name that it gives with its signs
        progress = ProgressLine(self._replica)
        engines = others + most_of(context._deployment_config)
        prepare_threads(config.threads or share_of_node(config.device, engines))

        def load() -> "Engine":
            with quick_imports():
                from tidar_core.engine import keep_loaded, load_engine

                engine = load_engine(config, progress.report, progress.advance, stage=progress.begin, for_grammars=True)
            keep_loaded()
            return engine

        self._thread = EngineThread(load, self._deliver)
        try:
            engine = await asyncio.wrap_future(self._thread.ready)
        except ConfigError as error:
            progress.fail(str(error))
            raise
        except Exception as error:
            progress.fail(f"the engine could not be started: {error}")
            raise
        info = engine.info
        self._kind = EngineKind(
            info.fingerprint, info.identity, info.dtype, info.device, info.arithmetic, info.exact, info.mask_token
        )
        card = ModelCard(
            name=name,
            root=config.model,
            created=int(time.time()),
            fingerprint=info.fingerprint,
            adapter=info.adapter,
            dtype=info.dtype,
            device=info.device,
            exact=info.exact,
            block_length=info.block_length,
            max_model_len=info.max_model_len,
            page_size=info.page_size,
            vocab_size=info.vocab_size,
            eos_ids=info.eos_ids,
            drafts=config.drafts,
            sampling_defaults=info.sampling_defaults,
            step_cost=info.cost.describe(),
            tokenizer=engine.tokenizer,
        )
        self._card, self._max_model_len = pack_card(card), card.max_model_len
        self._full_batch = info.cost.full_batch(info.max_running)
        self._metrics = ReplicaMetrics(name, self._replica, info.block_length)
        self._loop.call_later(TICK_SECONDS, self._tick)

    async def generate(
        self, request: Request, address: Address, kind: EngineKind | None = None, route: Route = ANYWHERE
    ) -> AsyncGenerator[Accepted, None]:
        """Take a request on: says so, and ends when the request has ended, by its finish, a `Refusal` or a `Failure`.
        Its events are for `listen` to fetch, at the address.

        A request that began at an engine of another `kind` is not gone on with. Closing or cancelling this ends the
        request in the engine before the next step, and so does the silence of the ingress while another is heard: cut
        off by the network, or dead where Serve's calls do not go by gRPC, it cancels nothing. Raises LookupError for a
        request that is here already.
        """
        if request.request_id in self._subscribers:  # Serve sends a call again whose line was cut
            raise LookupError(f"{request.request_id} is under way already")
        accepted = Accepted(self._replica, self._kind, self._max_model_len)
        if kind not in (None, self._kind):
            yield accepted
            return
        self._silences[address.ingress] = 0
        box = self._mailboxes.setdefault(address, ReplicaMailbox())
        timing = Timing(
            time.monotonic(), len(request.prompt), prompt_counted=route.counted, resumed=bool(request.emitted)
        )
        subscriber = Subscriber(timing, box)
        self._subscribers[request.request_id] = box.requests[request.request_id] = subscriber
        self._metrics.arrived(timing)
        self._thread.submit(request)
        try:
            yield accepted
            await subscriber.over.wait()
        finally:
            del self._subscribers[request.request_id], box.requests[request.request_id]
            if not box.heard:
                self._loop.call_later(UNHEARD_SECONDS, self._sweep, address)
            if not subscriber.ended:
                self._thread.abort(request.request_id)
                self._metrics.ended(FinishReason.ABORT, subscriber.timing, time.monotonic())

    async def listen(self, address: Address, route: Route = ANYWHERE) -> AsyncGenerator[EventBatch, None]:
        """Everything that happens to the requests that were sent under an address, an item a step; ends once there have
        been none for a while. Where it ends otherwise, who would have listened is gone: they end with it.

        Raises LookupError where the call was meant for another replica, as from a router that does not keep to routes,
        and where somebody listens already: Serve sends a call again whose line was cut, and two would share the events.
        """
        if route.only not in (None, self._replica):
            raise LookupError(f"{self._replica} is not {route.only}")
        box = self._mailboxes.setdefault(address, ReplicaMailbox())
        if box.heard:
            raise LookupError("this mailbox is listened to already")
        box.heard = True
        busy = time.monotonic()
        try:
            while box.events or box.requests or time.monotonic() - busy < IDLE_SECONDS:
                if self._mailboxes.get(address) is not box and not box.events:  # taken away in a silence that is over
                    return
                if box.requests:
                    busy = time.monotonic()
                events = await box.take()
                if not events and self._thread.step_seconds() > STEP_SECONDS:
                    events = (Failure("the engine hangs"),)
                yield EventBatch(self._replica, events)
        finally:
            box.close()
            if self._mailboxes.get(address) is box:
                del self._mailboxes[address]

    async def describe(self, known: str | None, route: Route = ANYWHERE) -> PackedCard:
        """What an ingress must know of the model. known: the digest of the tokenizer that it has, "" where it has none,
        None for who needs none."""
        return replace(self._card, tokenizer=b"") if known in (None, self._card.digest) else self._card

    async def alive(self, ingress: str, counts: IngressCounts | None, route: Route = ANYWHERE) -> Alive:
        """Raises where the engine failed or hangs. To ask is a sign of life of the ingress, which tells its counts with
        it, for `metrics` to pass on."""
        self._silences[ingress] = 0
        if counts is not None:
            self._ingress_counts[ingress] = counts
        self.check_health()
        return Alive(self._replica, self._max_model_len)

    async def metrics(self, route: Route = ANYWHERE) -> ReplicaCounts:
        """All Prometheus series of this replica, and those of the ingresses that it hears."""
        stats = self._thread.stats
        assert stats is not None  # set before the constructor was left
        return ReplicaCounts(self._metrics.collect(stats), tuple(self._ingress_counts.values()))

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Serve tells the routers of this replica (`cluster.carry.affinity`)."""
        marks = await asyncio.wrap_future(self._thread.prefix_marks(PUBLISHED_MARKS))
        stats = self._thread.stats
        assert stats is not None
        return {
            "marks": marks,
            "load": len(self._subscribers),
            "pages": round(stats.pages_used / stats.pages_total, 2),  # rounded: Serve passes on what changed
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve tells the policy of this replica: the fields of `cluster.autoscaling.Reading`."""
        stats = self._thread.stats
        assert stats is not None
        since = stats.waiting_since
        return {
            "answers": len(self._subscribers),
            "batch": self._full_batch,
            "pages": stats.pages_used / stats.pages_total,
            "wait": 0.0 if since is None else time.monotonic() - since,
        }

    def check_health(self) -> None:
        """Ray restarts the replica once this raises a few times in a row."""
        if self._thread.failure is not None:
            raise RuntimeError(self._thread.failure)
        if self._thread.step_seconds() > STEP_SECONDS:
            raise RuntimeError(f"the engine has been busy with one step for more than {STEP_SECONDS:g} s")

    def _sweep(self, address: Address) -> None:
        """Throw a mailbox away that nobody came for: whose it was is gone."""
        box = self._mailboxes.get(address)
        if box is not None and not box.heard and not box.requests:
            del self._mailboxes[address]

    def _tick(self) -> None:
        """End the requests of an ingress that has been silent for long while another one is heard.

        If no ingress is heard, nothing is ended: this replica itself may be cut off, or it is being shut down and ends
        its last answers. Ticks are counted, not time: while this event loop is held up nobody can be heard.
        """
        self._loop.call_later(TICK_SECONDS, self._tick)
        self._silences = {ingress: ticks + 1 for ingress, ticks in self._silences.items()}
        if min(self._silences.values(), default=0) > THERE_TICKS:
            return
        gone = {ingress for ingress, ticks in self._silences.items() if ticks > GONE_TICKS}
        for address, box in list(self._mailboxes.items()):
            if address.ingress in gone:
                log.warning("an ingress is gone: %d requests of it end", len(box.requests))
                del self._mailboxes[address]
                box.close()
        for ingress in gone:
            del self._silences[ingress]
            self._ingress_counts.pop(ingress, None)

    def _deliver(self, events: Sequence[Event], counts: StepCounts) -> None:
        self._loop.call_soon_threadsafe(self._spread, events, counts)

    def _spread(self, events: Sequence[Event], counts: StepCounts) -> None:
        now = time.monotonic()
        if counts.rows:
            self._metrics.passed(counts.rows)
        for request_id, since in counts.begun:
            if request_id in self._subscribers:
                self._metrics.begun(self._subscribers[request_id].timing, since)
        for event in events:
            if isinstance(event, Failure):
                for subscriber in self._subscribers.values():
                    self._end(subscriber, event, FinishReason.ERROR, now)
                # Its short queue would draw requests until the health checks notice: better gone, and started anew.
                self._loop.call_later(LAST_WORDS_SECONDS, os._exit, 1)
                continue
            found = self._subscribers.get(event.request_id)
            if found is None:  # aborted meanwhile
                continue
            if isinstance(event, Refusal) or (event.finish is not None and event.finish.param is not None):
                self._end(found, event, None, now)  # the request's own fault: no failure of the engine's
                continue
            if event.finish is not None and event.finish.reason is FinishReason.ABORT:
                # Of an earlier call by the same name, whose line was cut: this one has begun meanwhile, and ends too.
                found.mailbox.push(event)
                found.over.set()
                continue
            self._metrics.stepped(event, found.timing, now)
            if event.finish is None:
                found.mailbox.push(event)
            else:
                self._end(found, event, event.finish.reason, now)

    def _end(self, subscriber: Subscriber, event: Event, reason: FinishReason | None, now: float) -> None:
        """The last event of a request; counted by its reason, where it has one."""
        if subscriber.ended:
            return
        subscriber.ended = True
        subscriber.over.set()
        if reason is not None:
            self._metrics.ended(reason, subscriber.timing, now)
        subscriber.mailbox.push(event)
