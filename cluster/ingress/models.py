"""What an ingress serves, by the names that requests ask for: bases and their adapters, each on engines of its own."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from opentelemetry.trace import Tracer

from cluster.card import ModelCard
from cluster.carry.directory import Directory
from cluster.carry.handover import Carrier, Patience
from cluster.carry.routing import least_replicas
from cluster.errors import ApiError, not_ready, unknown_model
from cluster.ingress.streams import Admission
from cluster.line import ReplicaCounts
from cluster.observe.ingress_metrics import IngressMetrics
from cluster.options import ServeOptions
from cluster.wire.prompts import parse_json

SHORT_BODY = 64 * 1024
LONG_AT_ONCE = max(2, (os.cpu_count() or 1) // 4)
SETTLE_SECONDS = 60.0  # for one name's engines to come up beside another's

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """One name, and behind it: who may be called for it, how requests get there, and how many may be under way."""

    name: str
    directory: Directory
    carrier: Carrier
    admission: Admission

    @property
    def current_name(self) -> str:
        """The name that its engines answer to: the old one, until an engine of a change is there."""
        return self.directory.name or self.name

    @property
    def engines(self) -> int:
        """How many answer."""
        return len(self.directory.replicas)

    @property
    def engines_wanted(self) -> int:
        """How many there shall be at least."""
        return least_replicas(self.directory.engine)

    @property
    def sleeps(self) -> bool:
        """Whether there is none because nobody asks."""
        return self.directory.sleeps

    @property
    def most_answers(self) -> int:
        """How many may be under way at once."""
        return self.admission.most(self.engines)


class Models:
    """All names; the first is for requests that ask for none."""

    def __init__(
        self, directories: Mapping[str, Directory], options: ServeOptions, metrics: IngressMetrics, tracer: Tracer
    ):
        self._began, self._count = time.monotonic(), metrics.told_lately
        self._met: set[str] = set()
        self._long = ThreadPoolExecutor(LONG_AT_ONCE, "long-bodies")
        wake = options.wake_seconds if options.sleeps else 0.0
        patience = Patience(options.stall_seconds, options.carry_seconds, wake)
        self._served: dict[str, Served] = {}
        for name, directory in directories.items():
            carrier = Carrier(directory, patience, metrics.streams_of(name), tracer)
            self._served[name] = Served(name, directory, carrier, Admission(options.max_ongoing))
            metrics.watch(name, self._served[name])

    async def start(self) -> None:
        """Begin to look for replicas, on the running event loop."""
        await asyncio.gather(*(served.directory.start(self._count) for served in self._served.values()))

    async def stop(self) -> None:
        """End it; an ingress that is shut down waits for this."""
        self._long.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(served.directory.stop() for served in self._served.values()))

    def serves(self) -> bool:
        """Whether at least one name can be answered now. Until `SETTLE_SECONDS` after the start, every name must also
        have been answerable once."""
        found = {name for name, served in self._served.items() if served.directory.serves}
        self._met |= found
        settled = self._met == set(self._served) or time.monotonic() - self._began > SETTLE_SECONDS
        return bool(found) and settled

    def cards(self) -> list[ModelCard]:
        """Those of all that can be asked for now; one that slept whenever this ingress looked is woken, lest it is
        never listed. Raises ApiError (503) where there is none."""
        found = []
        for served in self._served.values():
            try:
                found.append(served.directory.model[0])
            except ApiError:
                served.directory.wake()
        if not found:
            raise not_ready()
        return found

    def named(self, name: str | None) -> Served:
        """Who serves a name. Raises ApiError: 404 for one that is not served; 503 for one that will be, while the
        engines behind it are still those of another."""
        if name is None:
            return next(iter(self._served.values()))
        found = [served for served in self._served.values() if served.current_name == name]
        if found:  # where names have been changed round, an old one may be left where nobody is any more
            return max(found, key=lambda served: (bool(served.directory.replicas), served.name == name))
        if name in self._served:
            if self._served[name].directory.may_wake:
                return self._served[name]
            raise not_ready()
        raise unknown_model(name, [served.current_name for served in self._served.values()])

    async def wanted(self, raw: bytes) -> tuple[Served, str | None, dict[str, Any]]:
        """Who serves what a body asks for, the name that it asks by, if any, and the body as JSON. Raises ApiError.

        What else is wrong with the body its schema finds.
        """
        value = parse_json(raw) if len(raw) <= SHORT_BODY else await self.work(len(raw), parse_json, raw)
        name = value.get("model") if isinstance(value.get("model"), str) else None
        return self.named(name), name, value

    async def work(self, size: int, call: Callable[..., T], *args: object) -> T:
        """What a call returns that takes as long as a body is, here of so many bytes: in a thread, so that streams go
        on. Long bodies wait for one another alone, and no short one behind them."""
        if size <= SHORT_BODY:
            return await asyncio.to_thread(call, *args)
        within = partial(copy_context().run, call, *args)
        return await asyncio.get_running_loop().run_in_executor(self._long, within)

    async def metrics(self) -> list[ReplicaCounts]:
        """What each replica tells. Raises ApiError (503) where a model should run and no replica of any answers."""
        told: list[ReplicaCounts] = []
        answers = await asyncio.gather(
            *(served.directory.metrics() for served in self._served.values()), return_exceptions=True
        )
        for answer in answers:
            if not isinstance(answer, BaseException):
                told += answer
            elif not isinstance(answer, ApiError):
                raise answer
        if all(isinstance(answer, ApiError) for answer in answers):
            raise not_ready()
        return told
