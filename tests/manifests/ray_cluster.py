"""A Ray cluster of a test's own, started by `ray start` and served by `serve deploy`, as a platform team does it."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.servers import MARK, REPOSITORY, Server, free_port

WAIT_SECONDS = 240
MANIFESTS = REPOSITORY / "manifests"


@dataclass(frozen=True)
class RayCluster:
    """One head node. `dashboard` is the address that `serve deploy` talks to, `environment` what a client needs."""

    dashboard: str
    address: str
    environment: dict[str, str]
    directory: Path

    def add_node(self, cpus: int) -> str:
        """Join another Ray node to the cluster, on this machine; its id."""
        known = self.nodes()
        words = ["start", f"--address={self.address}", "--block", f"--num-cpus={cpus}", "--num-gpus=0"]
        words += [f"--dashboard-agent-listen-port={free_port()}", f"--object-store-memory={128 * 1024**2}"]
        launch_ray(words, self.environment, self.directory / "node.log")
        deadline = time.monotonic() + WAIT_SECONDS
        while not (new := self.nodes() - known):
            assert time.monotonic() < deadline, (self.directory / "node.log").read_text()
            time.sleep(0.5)
        return new.pop()

    def nodes(self) -> set[str]:
        """The ids of all Ray nodes that are alive."""
        answer = httpx.get(f"{self.dashboard}/nodes?view=summary", headers=bearer(self.environment), timeout=60)
        found = [node["raylet"] for node in answer.raise_for_status().json()["data"]["summary"]]
        return {raylet["nodeId"] for raylet in found if raylet["state"] == "ALIVE"}

    def drain(self, node: str, seconds: int) -> str:
        """`python -m cluster.drain`, as a pod's preStop hook runs it; what it said."""
        command = [sys.executable, "-m", "cluster.drain", "--node", node, "--seconds", str(seconds)]
        environment = {**self.environment, "RAY_ADDRESS": self.address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, config: dict[str, Any]) -> None:
        """`serve deploy` of the config, written to a file."""
        file = self.directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", self.dashboard]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def application(self, name: str) -> dict[str, Any]:
        """What Serve says of an application: status, message, deployments."""
        found: dict[str, Any] = self.serve_details()["applications"].get(name, {})
        return found

    def serve_details(self) -> dict[str, Any]:
        """Everything that Serve says of itself."""
        headers = bearer(self.environment)
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=60)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def wait_for(self, name: str, status: str) -> dict[str, Any]:
        """The application once it has the status. Fails at once where it cannot be deployed any more."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (seen := self.application(name)).get("status") != status:
            assert seen.get("status") != "DEPLOY_FAILED", seen["message"]
            assert time.monotonic() < deadline, f"{name} is not {status}: {yaml.safe_dump(seen)}"
            time.sleep(0.5)
        return seen


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A head node with two CPUs and a token; however the test ends, none of its processes is left."""
    directory = Path(tempfile.mkdtemp(prefix="tidar-", dir="/tmp"))  # Ray's sockets need a short path
    dashboard, mark = free_port(), uuid.uuid4().hex
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "3",
        MARK: mark,
    }
    words = ["start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={128 * 1024**2}"]
    ports = {
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
    }
    words += [f"--{name}={port}" for name, port in ports.items()] + ["--include-dashboard=true"]
    log = directory / "head.log"
    head = launch_ray(words, environment, log)
    processes = Server("", log, mark, head).processes
    try:
        started(head, dashboard, environment, log)
        yield RayCluster(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{ports['port']}", environment, directory)
    finally:
        while left := processes():
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        head.wait()
        shutil.rmtree(directory, ignore_errors=True)


def launch_ray(words: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`ray` with arguments, in a group of processes of its own."""
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def bearer(environment: dict[str, str]) -> dict[str, str]:
    """The header that Ray's dashboard asks for."""
    return {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}


def started(head: subprocess.Popen[bytes], dashboard: int, environment: dict[str, str], log: Path) -> None:
    """Until the dashboard answers requests about Serve."""
    headers = bearer(environment)
    url = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(url, headers=headers, timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
