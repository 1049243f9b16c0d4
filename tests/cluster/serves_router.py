"""Ray Serve's default router, for comparison: it chooses by load alone, but goes to the replica that is named where one
is, as it must for a replica's events to be fetched from there."""

# Not public, but what Serve takes where a deployment names no router.
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from cluster.carry.routing import fitting
from cluster.line import ANYWHERE


class ServesRouter(PowerOfTwoChoicesRequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        route = pending_request.kwargs.get("route", ANYWHERE) if pending_request is not None else ANYWHERE
        if route.only is None or pending_request is None:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        return [[candidate_replicas[place] for place in fitting(names, route)]]
