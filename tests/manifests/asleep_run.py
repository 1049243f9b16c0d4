"""A model that sleeps while nobody asks, on nodes that go meanwhile: what who asks then waits for.

The ingress has a node of its own. Three times all else goes, and several requests at once wake the model: the node
comes first, then the engine. Then a node dies while the engine starts on it, and at last none comes. Fails where a
request gets another answer than it should. For example: python -m tests.manifests.asleep_run
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.operate.status import read_page
from tests import plain_http
from tests.cluster.kills import REPLICA_TITLE, lose_node
from tests.cluster.scale_run import PROMPTS, Stream, stream_once
from tests.manifests.coming_nodes import ComingNodes, NodeKind, come_after
from tests.manifests.nodes_run import ENVIRONMENT, LONGEST_SECONDS, Watch, config_for
from tests.manifests.ray_cluster import PACE, RayCluster, ray_cluster, ray_environment
from tests.servers import MARK, marked_processes, words_of

TOKENS = 40
KINDS = {"front": NodeKind({"CPU": 1, "front": 1}, most=1), "engines": NodeKind({"CPU": 1, "engine": 1}, most=2)}


def config_asleep(directory: Path, wake_seconds: float) -> dict[str, Any]:
    """The fleet's file as `nodes_run` changes it, with a model that sleeps, and its ingress on nodes that no engine
    needs."""
    config = config_for(directory)
    (api,) = config["applications"]
    api["args"] |= {"min_replicas": 0, "max_replicas": 2, "wake_seconds": wake_seconds, "start_retries": 20}
    api["args"] |= {"downscale_delay_s": 5, "downscale_to_zero_delay_s": 10}
    engine, ingress = api["deployments"]
    del engine["autoscaling_config"]
    engine["ray_actor_options"] = {"num_cpus": 1, "resources": {"engine": 1}}
    ingress["ray_actor_options"] = {"num_cpus": 1, "resources": {"front": 1}}
    return config


def titled(cluster: RayCluster, title: str) -> list[psutil.Process]:
    """The cluster's processes whose title has these words."""
    return [one for one in marked_processes(cluster.environment[MARK]) if title in " ".join(words_of(one))]


async def ask_at_once(watch: Watch) -> tuple[float, list[Stream]]:
    """Streams of all prompts, and one more request whose client gives up: seconds until the last had its answer."""
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=watch.serving.url, timeout=LONGEST_SECONDS, trust_env=False) as client:
        hasty = asyncio.create_task(stream_once(client, PROMPTS[0], TOKENS))
        asked = [asyncio.create_task(stream_once(client, prompt, TOKENS)) for prompt in PROMPTS]
        await asyncio.sleep(2)
        hasty.cancel()
        page = await asyncio.to_thread(plain_http.get, f"{watch.serving.url}/metrics", timeout=30)
        told = {name: shortage.words() for name, shortage in read_page(page.text, 0.0).short.items()}
        health = await asyncio.to_thread(plain_http.get, f"{watch.serving.url}/health", timeout=30)
        print(f"meanwhile: /health {health.status_code}, `tidar status` {told}", flush=True)
        streams = await asyncio.gather(*asked)
    return round(time.monotonic() - began, 1), streams


def check(streams: list[Stream], quiet: dict[str, str]) -> None:
    """Raises AssertionError where one is not what it was when nothing happened; notes it for later where it is."""
    assert not [stream.error for stream in streams if stream.error is not None], streams
    for stream in streams:
        assert stream.text == quiet.setdefault(stream.prompt, stream.text)


async def follow(cluster: RayCluster, config: dict[str, Any], wake_seconds: float) -> dict[str, Any]:
    """All of it, in turn."""
    watch, figures, quiet = Watch(cluster, config), dict[str, Any](), dict[str, str]()
    cluster.deploy(config)
    await watch.until("the first engine, on a node that came", lambda: watch.engines() == 1)

    async def asleep() -> None:
        await watch.until("it sleeps", lambda: watch.engines() == 0)
        # Not as the dashboard tells: it has left out a node for a moment that was there. And the nodes' proxies share a
        # port here: that of a node that goes takes connections to its last moment.
        processes = ("raylet/raylet ", "ray::ProxyActor")
        await watch.until("its node is gone", lambda: all(len(titled(cluster, one)) == 2 for one in processes))

    woken = []
    for _ in range(3):
        await asleep()
        seconds, streams = await ask_at_once(watch)
        print(f"woken and answered: {seconds} s", flush=True)
        check(streams, quiet)
        woken.append(seconds)
    figures["a request that wakes the model is answered after, s"] = statistics.median(woken)

    await asleep()
    asked = asyncio.create_task(ask_at_once(watch))
    await watch.until("an engine starts", lambda: bool(titled(cluster, REPLICA_TITLE)))
    (engine,) = titled(cluster, REPLICA_TITLE)
    lose_node(engine)
    seconds, streams = await asked
    check(streams, quiet)
    figures["the same where the node dies as the engine starts, s"] = seconds

    await asleep()
    come_after(math.inf, cluster.directory / PACE)
    seconds, streams = await ask_at_once(watch)
    refused = {stream.error for stream in streams}
    figures["where no node comes it is refused after, s"] = seconds
    figures["with"] = sorted(map(str, refused))
    assert len(refused) == 1
    assert f"was up within {wake_seconds:g} s" in figures["with"][0]
    come_after(1, cluster.directory / PACE)
    seconds, streams = await ask_at_once(watch)
    check(streams, quiet)
    figures["once nodes come again, after, s"] = seconds
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--come", type=float, default=10, help="seconds that a node takes to come")
    parser.add_argument("--idle", type=float, default=10, help="seconds after which an idle node is removed")
    parser.add_argument("--wake", type=float, default=90, help="seconds for which a request waits")
    chosen = parser.parse_args()
    coming = ComingNodes(KINDS, chosen.idle, chosen.come)
    with tempfile.TemporaryDirectory() as name:
        config = config_asleep(Path(name), chosen.wake)
        with ray_cluster(cpus=0, more=ray_environment() | ENVIRONMENT, coming=coming) as cluster:
            print(json.dumps(asyncio.run(follow(cluster, config, chosen.wake)), indent=2))


if __name__ == "__main__":
    main()
