"""Which replica a call goes to: the less busy of two by chance, past those that its caller names.

Ray Serve builds the router once for each process that calls, from a copy of this module, so what a call wishes travels
with the call itself: as the keyword argument `way`, which the replica's methods take and leave alone.
"""

import random
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


@dataclass(frozen=True, slots=True)
class Way:
    """Names of replicas: `never` go there, `avoid` while there is another, `only` this one."""

    never: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    only: str | None = None


ANYWHERE = Way()


def ask(engine: DeploymentHandle, method: str, *args: object, way: Way = ANYWHERE) -> DeploymentResponse[Any]:
    """Call a replica's method. The answer raises LookupError where no replica fits the way."""
    # Serve's routers tell calls apart by the id of the HTTP request that they are made for, which several may share.
    response = Context().run(engine.options(method_name=method).remote, *args, way=way)
    assert isinstance(response, DeploymentResponse)
    return response


def listen(
    engine: DeploymentHandle, method: str, *args: object, way: Way = ANYWHERE
) -> DeploymentResponseGenerator[Any]:
    """As `ask`, for a method that is an async generator."""
    response = Context().run(engine.options(method_name=method, stream=True).remote, *args, way=way)
    assert isinstance(response, DeploymentResponseGenerator)
    return response


def fitting(names: list[str], way: Way) -> list[int]:
    """The places of those names that a call may go to."""
    places = [
        place for place, name in enumerate(names) if name not in way.never and (way.only is None or name == way.only)
    ]
    return [place for place in places if names[place] not in way.avoid] or places


class ReplicaRouter(RequestRouter):
    """Serve's interface: it offers two, Serve takes the one with the shorter queue."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        way = ANYWHERE
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            way = pending_request.kwargs.get("way", ANYWHERE)
        places = fitting([replica.replica_id.unique_id for replica in candidate_replicas], way)
        if not places and pending_request is not None and not pending_request.future.done():
            # Serve would ask again and again, and let others wait behind it.
            pending_request.future.set_exception(LookupError("no replica fits the call"))
            return [candidate_replicas]
        return [[candidate_replicas[place] for place in random.sample(places, min(2, len(places)))]]
