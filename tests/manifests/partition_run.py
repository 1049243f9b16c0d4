"""A node that nobody reaches any more, though all on it goes on: its cable is pulled under streams.

A head that runs nothing and two more Ray nodes, each a host with an address of its own, with an ingress and an engine
each, as `manifests/serve/fleet.yaml` has it. Streams run through the proxies of both nodes; then one is cut off, and
after a while it is back. Needs root and `ip`. For example: python -m tests.manifests.partition_run --cut 8
"""

import argparse
import asyncio
import json
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.manifests.head_run import ASK, config_for
from tests.manifests.hosts import Host, hosts
from tests.manifests.ray_cluster import ray_cluster

STREAMS = 12  # through each node
RUNNING = re.compile(r'^vllm:num_requests_running\{engine="(\w+)".*\} ([0-9.]+)$', re.MULTILINE)


@dataclass
class Stream:
    """What a client saw. moments: when parts of the answer came."""

    text: str = ""
    moments: list[float] = field(default_factory=list)
    done: bool = False
    error: str | None = None

    async def run(self, url: str, tokens: int) -> None:
        body = {**ASK, "max_tokens": tokens, "stream": True}
        try:
            async with (
                httpx.AsyncClient(timeout=300) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    self.error = (await response.aread()).decode()
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    self.moments.append(time.monotonic())
                    self.done = self.done or line == "data: [DONE]"
                    chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
                    self.error = self.error or chunk.get("error")
                    self.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
        except httpx.HTTPError as error:
            self.error = type(error).__name__

    @property
    def gap(self) -> float:
        return max((late - early for early, late in zip(self.moments, self.moments[1:], strict=False)), default=0.0)


async def running(url: str) -> dict[str, float]:
    """Requests that run, by the engines that an ingress reaches."""
    async with httpx.AsyncClient(timeout=30) as client:
        page = (await client.get(f"{url}/metrics")).raise_for_status().text
    return {name: float(count) for name, count in RUNNING.findall(page)}


async def answered(urls: list[str], seconds: float) -> bool:
    """Whether a short request to each address is answered before the time is over."""
    until = time.monotonic() + seconds
    for url in urls:
        while True:
            try:
                async with httpx.AsyncClient(timeout=10) as client:
                    answer = await client.post(f"{url}/v1/completions", json={**ASK, "max_tokens": 4})
                if answer.status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.2)
    return True


async def run(stays: Host, goes: Host, port: int, tokens: int, cut: float) -> dict[str, Any]:
    urls = [f"http://{host.address}:{port}" for host in (stays, goes)]
    assert await answered(urls, 120)
    while len(await running(urls[0])) < 2:
        await asyncio.sleep(0.5)
    here, there = ([Stream() for _ in range(STREAMS)] for _ in urls)
    tasks = [asyncio.create_task(stream.run(urls[0], tokens)) for stream in here]
    others = [asyncio.create_task(stream.run(urls[1], tokens)) for stream in there]
    while sum(len(stream.moments) > 5 for stream in (*here, *there)) < 2 * STREAMS:
        await asyncio.sleep(0.1)
    before = await running(urls[0])
    goes.cut()
    began, orphans_gone, seen = time.monotonic(), None, []
    while time.monotonic() - began < cut:
        reached = await running(urls[0])
        seen.append(reached)
        left = sum(not task.done() for task in tasks)
        if orphans_gone is None and len(reached) == 1 and sum(reached.values()) <= left:
            orphans_gone = time.monotonic() - began
        await asyncio.sleep(0.5)
    under_way = sum(not task.done() for task in tasks)
    goes.mend()
    back = time.monotonic()
    await asyncio.gather(*tasks)
    served = await answered(urls, 120)
    took = time.monotonic() - back
    while sum((await running(urls[0])).values()) and time.monotonic() - back < 60:
        await asyncio.sleep(0.5)
    idle = time.monotonic() - back
    await asyncio.wait(others, timeout=5)
    cut_short = sum(not task.done() for task in others)
    for task in others:
        task.cancel()
    return {
        "streams through the node that stays": STREAMS,
        "running before, by engine": before,
        "running while it was cut off, by engine reached": seen[:: max(1, len(seen) // 8)],
        "whole": sum(stream.done and stream.error is None for stream in here),
        "texts": len({stream.text for stream in here}),
        "errors": [stream.error for stream in here if stream.error],
        "longest gap, s": round(max(stream.gap for stream in here), 2),
        "what the cut-off node had asked for was ended after, s": orphans_gone and round(orphans_gone, 1),
        "cut off, s": round(back - began, 1),
        "streams under way when it came back": under_way,
        "both nodes answer": served, "after, s": round(took, 1),
        "no engine works for nobody after, s": round(idle, 1),
        "streams through the node that was cut off: whole": sum(stream.done and not stream.error for stream in there),
        "under way": cut_short,
        "their errors": [stream.error for stream in there if stream.error],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2500, help="of each stream")
    parser.add_argument("--cut", type=float, default=15, help="seconds without a cable")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hosts(3) as (first, stays, goes):
        config = config_for(Path(name))
        config["http_options"]["host"] = "0.0.0.0"
        for deployment in config["applications"][0]["deployments"]:
            deployment["max_replicas_per_node"] = 1
        grpc = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
        with ray_cluster(cpus=0, more=grpc, host=first) as cluster:
            for host in (stays, goes):
                cluster.add_node(cpus=2, host=host)
            cluster.deploy(config)
            cluster.wait_for("api", "RUNNING")
            port = config["http_options"]["port"]
            print(json.dumps(asyncio.run(run(stays, goes, port, chosen.tokens, chosen.cut)), indent=2))


if __name__ == "__main__":
    main()
