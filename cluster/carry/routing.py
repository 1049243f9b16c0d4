"""Which replica a call goes to: where its prompt's longest prefix lies, past those replicas that its caller names.

`affinity` has the rule; here it meets Ray Serve. Where a prompt is new, or too busy is who knows it, the less busy of
two by chance is taken; streams that move together are shared out. Ray Serve builds the router once for each process
that calls, from a copy of this module, so what a call wishes travels with the call itself: as the keyword argument
`route`, which the replica's methods take and leave alone.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.carry.affinity import MOVED_SECONDS, Candidate, Prefixes, Recent, best
from cluster.line import ANYWHERE, Route
from tidar_core.prefixes import split_marks

UNDERWAY_SECONDS = 0.5  # between choosing a replica and the call's being counted there


def ask(engine: DeploymentHandle, method: str, *args: object, route: Route = ANYWHERE) -> DeploymentResponse[Any]:
    """Call a replica's method. The answer raises LookupError where no replica fits the route."""
    # Serve's routers tell calls apart by the id of the HTTP request that they are made for, which several may share.
    response = Context().run(engine.options(method_name=method).remote, *args, route=route)
    assert isinstance(response, DeploymentResponse)
    return response


def listen(
    engine: DeploymentHandle, method: str, *args: object, route: Route = ANYWHERE
) -> DeploymentResponseGenerator[Any]:
    """As `ask`, for a method that is an async generator."""
    response = Context().run(engine.options(method_name=method, stream=True).remote, *args, route=route)
    assert isinstance(response, DeploymentResponseGenerator)
    return response


@contextmanager
def cancelled_there() -> Iterator[None]:
    """Around a call of a replica that is awaited: the server may cancel it, for which Serve raises what a task ends of
    that is cancelled itself. Raises ConnectionError instead."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionError("cancelled by the server") from error


def least_replicas(engine: DeploymentHandle) -> int:
    """How many replicas a deployment shall have, or have at least where they follow the load, by the config that Serve
    keeps its callers told of; 0 until it has, or where another version of it keeps that elsewhere."""
    try:
        router: Any = engine._router
        config = router._asyncio_router._metrics_manager._deployment_config
        scaling = config.autoscaling_config
        return int(config.num_replicas if scaling is None else scaling.min_replicas)
    except AttributeError:
        return 0


def fitting(names: list[str], route: Route) -> list[int]:
    """The places of those names that a call may go to."""
    places = [
        place
        for place, name in enumerate(names)
        if name not in route.never and (route.only is None or name == route.only)
    ]
    return [place for place in places if names[place] not in route.avoid] or places


class ReplicaRouter(RequestRouter):
    """Serve's interface: ranks of replicas, of which Serve takes the first that answers.

    It finds a call's `Route` among the call's own arguments, under the name `route`, which is why every method of
    `EngineReplica` takes one. One router lives for each process that calls, on one event loop.
    """

    def initialize_state(self, **_: Any) -> None:
        """Serve's constructor."""
        self._prefixes = Prefixes()
        self._moved = Recent(MOVED_SECONDS)  # streams, with all that they had said elsewhere
        self._chosen = Recent(UNDERWAY_SECONDS)  # calls; one that is cancelled meanwhile is never counted there
        self._chance = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        route = ANYWHERE
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            route = pending_request.kwargs.get("route", ANYWHERE)
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        places = fitting(names, route)
        if not places and pending_request is not None and not pending_request.future.done():
            # Serve would ask again and again, let others wait behind it, and keep it for good though it has an answer.
            pending_request.future.set_exception(LookupError("no replica fits the call"))
            self._remove_pending_request_from_indices(pending_request)
            return [candidate_replicas]
        if route.only is not None or not places:
            return [[candidate_replicas[place] for place in places]]
        self._prefixes.keep(names)
        marks = split_marks(route.marks)
        candidates = [self._candidate(candidate_replicas[place], marks, route.moved) for place in places]
        first = places[best(candidates, self._chance)]
        # Noted at once: of many prompts that begin alike, the next is looked at before this one is on its way.
        self._prefixes.sent(names[first], marks)
        self._chosen.note(names[first])
        if route.moved:
            self._moved.note(names[first])
        others = [place for place in places if place != first]
        return [
            [candidate_replicas[first]],
            [candidate_replicas[place] for place in self._chance.sample(others, min(2, len(others)))],
        ]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Serve counts the call from now on."""
        super().on_send_request(replica_id)
        self._chosen.drop_one(replica_id.unique_id)

    def _candidate(self, replica: RunningReplica, marks: list[bytes], moved: bool) -> Candidate:
        name = replica.replica_id.unique_id
        told = self._prefixes.read(name, replica.routing_stats)
        counted = self.replica_queue_len_cache.get(replica.replica_id)
        load = self._chosen.count(name) + (told.load if counted is None else counted)
        return Candidate(load, told.pages, self._prefixes.depth(name, marks), self._moved.count(name) if moved else 0)
