"""The router within Serve's own machinery: what becomes of calls whose way fits nobody."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.utils import generate_request_id
from ray.serve.request_router import PendingRequest

from cluster.routing import ANYWHERE, ReplicaRouter, Way

DEPLOYMENT = DeploymentID("Engine", "api")


class Running:
    """Stands for a replica, as Serve's machinery looks at it."""

    replica_id = ReplicaID("r0", DEPLOYMENT)
    routing_stats: dict[str, Any] = {}  # noqa: RUF012
    max_ongoing_requests = 100
    node_id = "node"
    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def test_a_call_that_fits_nobody_is_told_so_and_not_kept() -> None:
    async def run() -> None:
        source = DeploymentHandleSource.REPLICA
        router = ReplicaRouter(deployment_id=DEPLOYMENT, handle_source=source, use_replica_queue_len_cache=True)
        router.initialize_state()
        router.update_replicas([Running()])  # type: ignore[list-item]

        async def choose(way: Way) -> str:
            metadata = RequestMetadata(request_id="x", internal_request_id=generate_request_id())
            pending = PendingRequest(args=["a long prompt"], kwargs={"way": way}, metadata=metadata)
            async with asyncio.timeout(10):
                return (await router._choose_replica_for_request(pending)).replica_id.unique_id

        for _ in range(20):
            with pytest.raises(LookupError):
                await choose(Way(never=frozenset({"r0"})))
        assert await choose(ANYWHERE) == "r0"
        await asyncio.sleep(0.1)
        assert router._pending_requests_by_id == {}

    asyncio.run(run())
