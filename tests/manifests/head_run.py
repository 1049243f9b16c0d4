"""The head dies under streams: its state lies in Redis, so the rest goes on, and the new head finds it.

A head that runs nothing, and two more Ray nodes with an engine each, as `manifests/serve/fleet.yaml` has it. Needs
`redis-server` on PATH. For example: python -m tests.manifests.head_run
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.cluster.kills import REPLICA_TITLE
from tests.manifests.ray_cluster import MANIFESTS, RayCluster, ray_cluster
from tests.servers import free_port, kill_all, marked_processes, tiny_model, words_of

STREAMS = 24
ASK = {"prompt": "a", "temperature": 0, "ignore_eos": True}


@contextmanager
def redis() -> Iterator[str]:
    """A Redis of its own, without a disk; its address."""
    port = free_port()
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def config_for(directory: Path) -> dict[str, Any]:
    """The fleet's file, but for what a machine without GPUs must choose."""
    model, adapter = tiny_model(directory, hidden=384, intermediate=1024)
    config: dict[str, Any] = yaml.safe_load((MANIFESTS / "serve" / "fleet.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": free_port()}
    (api,) = (each for each in config["applications"] if each["name"] == "api")
    config["applications"] = [api]
    api["args"] = {"model": str(model), "adapter": str(adapter), "device": "cpu", "threads": 1}
    engine, ingress = api["deployments"]
    del engine["autoscaling_config"]
    engine["num_replicas"], ingress["num_replicas"] = 2, 2
    return config


class Watch:
    """Streams and short requests through the proxies of nodes that stay; all proxies share this machine's port."""

    def __init__(self, port: int, tokens: int):
        self._port, self._tokens = port, tokens
        self.errors: list[str] = []
        self.texts: list[str] = []
        self.moments: list[float] = []
        self.under_way = 0

    async def stream(self, avoided: psutil.Process) -> None:
        """One stream, over a connection that does not end at the process `avoided`."""
        body = json.dumps({**ASK, "max_tokens": self._tokens, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: tidar\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + body)
            heard = await reader.read(1 << 16)
            mine = writer.get_extra_info("sockname")[1]
            if mine not in {at.raddr.port for at in avoided.net_connections("tcp") if at.raddr}:
                break
            writer.close()
        self.under_way += 1
        with suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                heard += part
                self.moments.append(time.monotonic())
        writer.close()
        lines = [line[6:] for line in heard.decode().split("\n") if line.startswith("data: ")]
        chunks = [json.loads(line) for line in lines if line.startswith("{")]
        if not lines or lines[-1].strip() != "[DONE]" or any("error" in chunk for chunk in chunks):
            self.errors.append(heard.decode()[-300:])
        else:
            self.texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]))


async def answered(port: int, seconds: float) -> tuple[int, int]:
    """New requests, one after the other, each over a connection of its own: how many were asked and answered."""
    asked = right = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        asked += 1
        async with httpx.AsyncClient(timeout=30) as client:
            try:
                answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json={**ASK, "max_tokens": 8})
                right += answer.status_code == 200
            except httpx.HTTPError:
                pass
        await asyncio.sleep(0.2)
    return asked, right


def proxy_of(head: psutil.Process) -> psutil.Process:
    return next(child for child in head.children(recursive=True) if "ProxyActor" in " ".join(words_of(child)))


async def run(cluster: RayCluster, head: psutil.Process, port: int, tokens: int, away: float) -> dict[str, Any]:
    """Streams begin, the head is killed, stays away, comes back; then an engine is killed."""
    proxy, watch = proxy_of(head), Watch(port, tokens)
    while len(set(await answered(port, 3))) > 1:
        pass
    streams = [asyncio.create_task(watch.stream(proxy)) for _ in range(STREAMS)]
    while watch.under_way < STREAMS:
        await asyncio.sleep(0.1)
    began = time.monotonic()
    kill_all((*head.children(recursive=True), head))
    asked, right = await answered(port, away)
    under_way = sum(not task.done() for task in streams)
    back = time.monotonic()
    await asyncio.to_thread(cluster.start_head)
    await asyncio.to_thread(cluster.wait_for, "api", "RUNNING")
    running = time.monotonic() - back
    await asyncio.gather(*streams)
    mark = cluster.environment["TIDAR_TEST_MARK"]
    engines = {each for each in marked_processes(mark) if REPLICA_TITLE in " ".join(words_of(each))}
    next(iter(engines)).kill()
    died = time.monotonic()
    while len({each for each in marked_processes(mark) if REPLICA_TITLE in " ".join(words_of(each))} - engines) < 1:
        assert time.monotonic() < died + 120, "the new head does not replace an engine"
        await asyncio.sleep(0.5)
    replaced = time.monotonic() - died
    after, after_right = await answered(port, 10)
    gaps = [late - early for early, late in zip(watch.moments, watch.moments[1:], strict=False)]
    return {
        "streams": STREAMS, "errors": len(watch.errors), "texts": len(set(watch.texts)),
        "longest silence of all streams, s": round(max(gaps), 2),
        "streams under way when the head came back": under_way, "without a head, s": round(back - began, 1),
        "requests without a head": asked, "of these answered": right,
        "RUNNING after the new head's start, s": round(running, 1),
        "engine replaced by the new head after, s": round(replaced, 1),
        "requests afterwards": after, "answered": after_right,
        "first error": watch.errors[:1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3800, help="of each stream")
    parser.add_argument("--away", type=float, default=20, help="seconds without a head")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, redis() as address:
        config = config_for(Path(name))
        with ray_cluster(cpus=0, more={"RAY_REDIS_ADDRESS": address}) as cluster:
            for _ in range(2):
                cluster.add_node(cpus=2)
            cluster.deploy(config)
            cluster.wait_for("api", "RUNNING")
            port = config["http_options"]["port"]
            head = next(
                each for each in marked_processes(cluster.environment["TIDAR_TEST_MARK"]) if "--head" in words_of(each)
            )
            print(json.dumps(asyncio.run(run(cluster, head, port, chosen.tokens, chosen.away)), indent=2))


if __name__ == "__main__":
    main()
