"""The Serve config for one machine, deployed by `serve deploy` into a Ray cluster and changed under load; a node that
is drained, and one that is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.options import ServeOptions
from tests import plain_http
from tests.cluster.kills import check, lose_node, slow_model, streams_under_blows
from tests.cluster.scale_run import stream_once
from tests.manifests.balancer import balancer
from tests.manifests.ray_cluster import MANIFESTS, RayCluster, ray_cluster, ray_environment
from tests.servers import MARK, Serving, free_port
from tests.tiny import tiny_adapter, tiny_checkpoint

STREAMS = 8
TOKENS = 400
WAIT_SECONDS = 240


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers, a drafter for it, another one, and one that is made for another model."""
    directory = tmp_path_factory.mktemp("deploy")
    model, _ = slow_model(directory)
    tiny_adapter(directory / "other-adapter", model, block_length=6, seed=1)
    tiny_adapter(directory / "misfit", tiny_checkpoint(directory / "narrow", hidden=48))
    return directory


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """With what `serve/ray.env` has, but for the time that clients get to leave a node."""
    with ray_cluster(more=ray_environment() | {"RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5"}) as started:
        yield started


@pytest.fixture(scope="module")
def config(models: Path) -> dict[str, Any]:
    """The file as it is, but for what a test must choose: port, model, drafter, and one thread an engine."""
    config: dict[str, Any] = yaml.safe_load((MANIFESTS / "serve" / "one-machine.yaml").read_text())
    config["http_options"]["port"] = free_port()
    args = {"model": str(models / "tiny"), "adapter": str(models / "tiny-adapter"), "dtype": "float32", "threads": 1}
    config["applications"][0]["args"] |= args
    return config


def url(config: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{config['http_options']['port']}"


def changed(config: dict[str, Any], replicas: int, adapter: Path) -> dict[str, Any]:
    """The config with another number of engines, and another drafter."""
    made = deepcopy(config)
    made["applications"][0]["deployments"][0]["num_replicas"] = replicas
    made["applications"][0]["args"]["adapter"] = str(adapter)
    return made


@dataclass
class Load:
    """What came of streams that were asked for without a pause."""

    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stop: bool = False


@asynccontextmanager
async def under_load(base: str) -> AsyncIterator[Load]:
    """Streams, always as many at once, while the block runs; those under way are read to their end."""
    load = Load()

    async def reader(client: httpx.AsyncClient) -> None:
        while not load.stop:
            told = await stream_once(client, "a", TOKENS)
            if told.error is None:
                load.texts.append(told.text)
            else:
                load.errors.append(told.error)

    async with httpx.AsyncClient(base_url=base, timeout=WAIT_SECONDS) as client, asyncio.TaskGroup() as readers:
        for _ in range(STREAMS):
            readers.create_task(reader(client))
        try:
            yield load
        finally:
            load.stop = True


async def engines(client: httpx.AsyncClient) -> set[str]:
    """The replicas that /metrics shows."""
    page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return {line.split('engine="')[1].split('"')[0] for line in lines}


async def wanted(client: httpx.AsyncClient) -> list[float]:
    """How many engines there shall be, as each ingress that /metrics shows knows it."""
    page = (await client.get("/metrics")).text
    return [float(line.split()[-1]) for line in page.splitlines() if line.startswith("tidar:engines_wanted{")]


async def until_engines(client: httpx.AsyncClient, count: int, not_among: set[str]) -> set[str]:
    """The replicas, once there are `count` of them and none that is excluded."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            seen = await engines(client)
            if len(seen) == count and not seen & not_among:
                return seen
            await asyncio.sleep(0.5)


def test_it_answers_and_is_changed_without_cutting_a_stream(
    cluster: RayCluster, config: dict[str, Any], models: Path
) -> None:
    cluster.deploy_by_command(config)
    cluster.wait_for("api", "RUNNING")
    cluster.wait_for("playground", "RUNNING")

    twice = changed(config, replicas=2, adapter=models / "tiny-adapter")
    other = changed(config, replicas=2, adapter=models / "other-adapter")

    async def drafter(client: httpx.AsyncClient) -> tuple[str, int]:
        (model,) = (await client.get("/v1/models")).json()["data"]
        return model["tidar"]["adapter"], model["tidar"]["block_length"]

    async def change() -> None:
        async with httpx.AsyncClient(base_url=url(config), timeout=WAIT_SECONDS) as client:
            assert (await client.get("/playground/")).status_code == 200
            async with asyncio.timeout(WAIT_SECONDS):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.2)
            body = {"prompt": "a", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            text = answer["choices"][0]["text"]
            assert answer["usage"]["completion_tokens"] == TOKENS
            assert await drafter(client) == ("tiny-adapter", 4)
            (first,) = await until_engines(client, 1, set())
            assert await wanted(client) == [1]

            began = time.monotonic()
            async with under_load(url(config)) as load:
                await asyncio.to_thread(cluster.deploy, twice)
                two = await until_engines(client, 2, set())
                assert first in two, "more replicas are no reason to replace the one that is there"
                assert await wanted(client) == [2]

                print(f"a second replica after {time.monotonic() - began:.1f} s")
                await asyncio.to_thread(cluster.deploy, other)
                await until_engines(client, 2, two)
                await asyncio.to_thread(cluster.wait_for, "api", "RUNNING")
                async with asyncio.timeout(WAIT_SECONDS):
                    while await drafter(client) != ("other-adapter", 6) or len(load.texts) < 3 * STREAMS:
                        await asyncio.sleep(0.5)
            print(f"both replaced after {time.monotonic() - began:.1f} s")
            assert load.errors == []
            assert set(load.texts) == {text}
            print(f"{len(load.texts)} streams of {TOKENS} tokens while replicas were added and replaced, 0 errors")

    asyncio.run(change())


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"adaptor": "none"}, "unknown key 'adaptor': did you mean 'adapter'?"),
        ({"adapter": "misfit"}, "adapter misfit does not fit: made for narrow with hidden_size 48, tiny has 384; "),
    ],
)
def test_a_mistake_is_one_line_and_what_runs_goes_on(
    cluster: RayCluster, config: dict[str, Any], models: Path, args: dict[str, Any], line: str
) -> None:
    wrong = deepcopy(config)
    if args.get("adapter"):
        args = {"adapter": str(models / args["adapter"])}
    wrong["applications"][0]["args"] |= args
    cluster.deploy(wrong)
    with pytest.raises(AssertionError) as failed:
        cluster.wait_for("api", "never")
    heading, said = str(failed.value).splitlines()
    assert heading.startswith("Deploying app 'api' failed"), "Ray's own words"
    assert said.startswith(line)
    body = {"prompt": "a", "max_tokens": 4}
    assert plain_http.post(f"{url(config)}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_node_is_drained_without_cutting_a_stream(cluster: RayCluster, config: dict[str, Any], models: Path) -> None:
    port = free_port()
    node = cluster.add_node(cpus=1, port=port)
    thrice = changed(config, replicas=3, adapter=models / "other-adapter")

    def replicas_there() -> list[str]:
        deployments = cluster.application("api")["deployments"].values()
        return [one["replica_id"] for entry in deployments for one in entry["replicas"] if one.get("node_id") == node]

    async def empty() -> None:
        async with httpx.AsyncClient(base_url=url(config), timeout=WAIT_SECONDS) as client:
            await asyncio.to_thread(cluster.deploy, thrice)
            three = await until_engines(client, 3, set())
            assert replicas_there()
            assert node in cluster.serve_details()["proxies"]
            async with balancer(config["http_options"]["port"], port) as front, under_load(front.url) as load:
                while len(load.texts) < STREAMS:
                    await asyncio.sleep(0.2)
                assert front.open[port] >= STREAMS // 2, "clients keep connections to the proxy that will go"
                draining = asyncio.create_task(asyncio.to_thread(cluster.drain, node, 300))
                while replicas_there():
                    await asyncio.sleep(0.5)
                emptied = len(load.texts)
                said = await draining
                while len(load.texts) < emptied + STREAMS:
                    await asyncio.sleep(0.2)
                assert front.open[port] == 0
            assert load.errors == []
            assert len(set(load.texts)) == 1
            assert said.splitlines()[-1] == "empty"
            assert node not in cluster.serve_details()["proxies"]
            assert await engines(client) < three
            print(f"{len(load.texts)} streams of {TOKENS} tokens while a node was emptied, 0 errors")

    asyncio.run(empty())


def test_a_node_may_be_lost(cluster: RayCluster, config: dict[str, Any], models: Path) -> None:
    """The last test here, since two engines are left of three."""
    thrice = changed(config, replicas=3, adapter=models / "other-adapter")
    cluster.deploy(thrice)
    cluster.add_node(cpus=1, port=free_port())

    async def three() -> None:
        async with httpx.AsyncClient(base_url=url(config), timeout=WAIT_SECONDS) as client:
            await until_engines(client, 3, set())

    asyncio.run(three())
    serving = Serving(url(config), cluster.environment[MARK])
    # Two of the engines are the head's, and older.
    told, blows = streams_under_blows(serving, 4 * STREAMS, 3, TOKENS, 1, lose_node, spared=2)
    assert len(blows) == 1
    assert check(told, ServeOptions(**thrice["applications"][0]["args"]), blows) > 0
