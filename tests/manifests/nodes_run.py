"""Ray's own autoscaler brings a node for more engines under load, and removes it after that.

A head that runs nothing, and nodes of two CPUs, as `manifests/kuberay` has them. Fails where a stream is
lost or differs, or a node stays. For example: python -m tests.manifests.nodes_run
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.kills import slow_model
from tests.cluster.scale_run import PROMPTS, Stream, stream_once
from tests.manifests.coming_nodes import ComingNodes, NodeKind
from tests.manifests.ray_cluster import MANIFESTS, RayCluster, ray_cluster, ray_environment
from tests.servers import Serving, free_port

LONGEST_SECONDS = 400  # that anything may take here
# Room for three engines and an ingress on two nodes.
ENGINES = NodeKind({"CPU": 2}, most=2)
ENVIRONMENT = {
    "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY": "1",  # as in manifests/kuberay/base
    "RAY_SERVE_NODE_COMPACTION_DELAY_S": "10",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",
}


def config_for(directory: Path) -> dict[str, Any]:
    """The fleet's file, but for what a machine without GPUs must choose, and a quicker mind."""
    model, adapter = slow_model(directory)
    config: dict[str, Any] = yaml.safe_load((MANIFESTS / "serve" / "fleet.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": free_port()}
    (api,) = (each for each in config["applications"] if each["name"] == "api")
    config["applications"] = [api]
    api["args"] = {"model": str(model), "adapter": str(adapter), "device": "cpu", "threads": 1}
    engine, ingress = api["deployments"]
    quick = {"upscale_delay_s": 3, "downscale_delay_s": 10, "look_back_period_s": 5}
    engine["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 3} | quick
    ingress["num_replicas"] = 1
    return config


class Watch:
    """A cluster and its server, and streams that are asked for all the while."""

    def __init__(self, cluster: RayCluster, config: dict[str, Any]):
        self.cluster = cluster
        self.serving = Serving(f"http://127.0.0.1:{config['http_options']['port']}", "")
        self.streams: list[Stream] = []
        self.users = 0

    def workers(self) -> int:
        """Nodes beside the head."""
        return len(self.cluster.nodes()) - 1

    def engines(self) -> int:
        """Engines that answer, as the metrics page knows them; -1 where it cannot be had."""
        with suppress(httpx.HTTPError):
            return int(self.serving.metric("tidar:engines_ready"))
        return -1

    async def until(self, what: str, holds: Callable[[], bool]) -> float:
        """Seconds until something holds, which is looked at in a thread."""
        began = time.monotonic()
        while not await asyncio.to_thread(holds):
            assert time.monotonic() - began < LONGEST_SECONDS, f"never {what}: {self.workers()} nodes, {self.engines()}"
            await asyncio.sleep(0.5)
        seconds = round(time.monotonic() - began, 1)
        print(f"{what}: {seconds} s", flush=True)
        return seconds

    async def user(self, number: int, tokens: int) -> None:
        """One stream after the other while there are more users than this one's number, each over a new connection."""
        while self.users > number:
            async with httpx.AsyncClient(base_url=self.serving.url, timeout=LONGEST_SECONDS, trust_env=False) as client:
                self.streams.append(await stream_once(client, PROMPTS[number % len(PROMPTS)], tokens))


def workers_with(cluster: RayCluster, deployment: str) -> set[str]:
    """The nodes on which replicas of a deployment are."""
    found = cluster.application("api")["deployments"][deployment]["replicas"]
    return {replica["node_id"] for replica in found if replica.get("node_id")}


async def follow(cluster: RayCluster, config: dict[str, Any], users: int, tokens: int) -> dict[str, Any]:
    """Load comes and goes, and nodes with it."""
    watch, figures = Watch(cluster, config), dict[str, Any]()
    began = time.monotonic()
    cluster.deploy(config)
    await watch.until("the first engine, on a node that came", lambda: watch.engines() == 1)
    figures["first engine after, s"] = round(time.monotonic() - began, 1)
    assert watch.workers() == 1
    async with httpx.AsyncClient(base_url=watch.serving.url, timeout=LONGEST_SECONDS, trust_env=False) as client:
        quiet = {prompt: await stream_once(client, prompt, tokens) for prompt in PROMPTS}
    watch.users = users
    asking = [asyncio.create_task(watch.user(number, tokens)) for number in range(users)]
    figures["second node after, s"] = await watch.until("a second node", lambda: watch.workers() == 2)
    figures["engine on it after, s"] = await watch.until("an engine on it", lambda: watch.engines() >= 2)
    figures["third engine after, s"] = await watch.until("as many engines as may be", lambda: watch.engines() == 3)
    watch.users = 2  # who go on asking while engines go
    figures["engines gone after, s"] = await watch.until("one engine is left", lambda: watch.engines() == 1)
    apart = len(workers_with(cluster, "Engine") | workers_with(cluster, "Ingress")) == 2
    assert apart, "the ingress stands beside the engine that is left: there is nothing to move"
    # The nodes' proxies share a port here: the one that goes gets connections to its last moment, from which a load
    # balancer, or Kubernetes by its readiness, keeps them. So nobody asks meanwhile.
    watch.users = 0
    await asyncio.gather(*asking)
    figures["second node gone after, s"] = await watch.until("the second node is gone", lambda: watch.workers() == 1)
    async with httpx.AsyncClient(base_url=watch.serving.url, timeout=LONGEST_SECONDS, trust_env=False) as client:
        watch.streams += [await stream_once(client, prompt, tokens) for prompt in PROMPTS]
    errors = [stream.error for stream in watch.streams if stream.error is not None]
    different = sum(stream.error is None and stream.text != quiet[stream.prompt].text for stream in watch.streams)
    figures |= {"streams": len(watch.streams), "errors": len(errors), "texts that differ": different}
    assert not errors, errors[:3]
    assert not different
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=90, help="at the height of the load")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--come", type=float, default=3, help="seconds that a node takes to come")
    parser.add_argument("--idle", type=float, default=15, help="seconds after which an idle node is removed")
    chosen = parser.parse_args()
    coming = ComingNodes({"engines": ENGINES}, chosen.idle, chosen.come)
    with tempfile.TemporaryDirectory() as name:
        config = config_for(Path(name))
        with ray_cluster(cpus=0, more=ray_environment() | ENVIRONMENT, coming=coming) as cluster:
            print(json.dumps(asyncio.run(follow(cluster, config, chosen.users, chosen.tokens)), indent=2))


if __name__ == "__main__":
    main()
