"""The router within Serve's own machinery: what becomes of calls whose way fits nobody."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.utils import generate_request_id
from ray.serve.config import AutoscalingConfig
from ray.serve.request_router import PendingRequest

from cluster.carry.routing import ReplicaRouter, cancelled_there, least_replicas
from cluster.line import ANYWHERE, Route

DEPLOYMENT = DeploymentID("Engine", "api")


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (DeploymentConfig(num_replicas=3), 3),
        (DeploymentConfig(num_replicas=1, autoscaling_config=AutoscalingConfig(min_replicas=2, max_replicas=8)), 2),
        (None, 0),
    ],
)
def test_the_least_that_there_shall_be_is_what_serve_has_told_the_router(
    config: DeploymentConfig | None, least: int
) -> None:
    manager = SimpleNamespace(_deployment_config=config)
    router = SimpleNamespace(_asyncio_router=SimpleNamespace(_metrics_manager=manager))
    assert least_replicas(SimpleNamespace(_router=router)) == least  # type: ignore[arg-type]
    assert least_replicas(SimpleNamespace(_router=None)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("by_its_caller", [True, False])
def test_a_call_that_the_server_cancels_fails_and_does_not_end_its_caller(by_its_caller: bool) -> None:
    async def call() -> None:
        with cancelled_there():
            if by_its_caller:
                await asyncio.Event().wait()
            raise asyncio.CancelledError

    async def run() -> None:
        calling = asyncio.create_task(call())
        await asyncio.sleep(0)
        if by_its_caller:
            calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled() == by_its_caller
        assert by_its_caller or isinstance(calling.exception(), ConnectionError)

    asyncio.run(run())


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

        async def choose(route: Route) -> str:
            metadata = RequestMetadata(request_id="x", internal_request_id=generate_request_id())
            pending = PendingRequest(args=["a long prompt"], kwargs={"route": route}, metadata=metadata)
            async with asyncio.timeout(10):
                return (await router._choose_replica_for_request(pending)).replica_id.unique_id

        for _ in range(20):
            with pytest.raises(LookupError):
                await choose(Route(never=frozenset({"r0"})))
        assert await choose(ANYWHERE) == "r0"
        await asyncio.sleep(0.1)
        assert router._pending_requests_by_id == {}

    asyncio.run(run())


class Named(Running):
    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)


def test_what_was_just_chosen_counts() -> None:
    """Marks that went somewhere draw the next there; calls and moved streams on their way are load."""

    async def run() -> None:
        source, two = DeploymentHandleSource.REPLICA, [Named("r0"), Named("r1")]

        def fresh() -> ReplicaRouter:
            router = ReplicaRouter(deployment_id=DEPLOYMENT, handle_source=source, use_replica_queue_len_cache=True)
            router.initialize_state()
            return router

        async def chosen(router: ReplicaRouter, route: Route) -> str:
            metadata = RequestMetadata(request_id="x", internal_request_id=generate_request_id())
            pending = PendingRequest(args=[], kwargs={"route": route}, metadata=metadata)
            ranks = await router.choose_replicas(two, pending)  # type: ignore[arg-type]
            return ranks[0][0].replica_id.unique_id

        router = fresh()
        assert len({await chosen(router, Route(marks=b"prefix 1")) for _ in range(4)}) == 1
        router = fresh()
        for _ in range(10):
            assert {await chosen(router, ANYWHERE), await chosen(router, ANYWHERE)} == {"r0", "r1"}
        router = fresh()
        router.replica_queue_len_cache.update(two[0].replica_id, 0)
        router.replica_queue_len_cache.update(two[1].replica_id, 8)
        assert [await chosen(router, Route(moved=True)) for _ in range(2)] == ["r0", "r1"], "shared out"
        router = fresh()
        router.replica_queue_len_cache.update(two[0].replica_id, 0)
        router.replica_queue_len_cache.update(two[1].replica_id, 8)
        assert await chosen(router, ANYWHERE) == "r0"
        assert router._candidate(two[0], [], True).moved == 0, "it is no stream from elsewhere"  # type: ignore[arg-type]
        router.on_send_request(two[0].replica_id)
        assert router._candidate(two[0], [], False).load == 1, "counted by Serve from now on, and once"  # type: ignore[arg-type]

    asyncio.run(run())
