"""A Ray cluster of a test's own, started by `ray start` and served by `serve deploy`, as a platform team does it."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import yaml

from cluster.operate.haproxy import free_ports
from cluster.operate.ray_cluster import OWN_PROCESSES
from tests import plain_http
from tests.manifests.coming_nodes import HEAD_ENVIRONMENT, ComingNodes
from tests.manifests.hosts import Host
from tests.servers import MARK, REPOSITORY, free_port, kill_all, marked_processes

WAIT_SECONDS = 240
PACE = "seconds-to-come"  # the file of `come_after`, in a cluster's directory
MANIFESTS = REPOSITORY / "manifests"


@dataclass(frozen=True)
class RayCluster:
    """One head node. `dashboard` is the address that `serve deploy` talks to, `environment` what a client needs,
    `head_words` what `ray` started the head with, `head_host` where, if not on this machine."""

    dashboard: str
    address: str
    environment: dict[str, str]
    directory: Path
    head_words: tuple[str, ...]
    head_host: Host | None = None

    def start_head(self) -> psutil.Process:
        """Start the head, and wait until its dashboard answers requests about Serve."""
        log = self.directory / "head.log"
        head = launch_ray(list(self.head_words), self.environment, log, self.head_host)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with suppress(httpx.HTTPError, KeyError):
                self.serve_details()
                return psutil.Process(head.pid)
            time.sleep(0.2)

    def add_node(self, cpus: int, port: int | None = None, host: Host | None = None) -> str:
        """Join another Ray node to the cluster, on this machine or a host; its id. port: its proxy's, by default the
        head's."""
        known = self.nodes()
        words = ["start", f"--address={self.address}", "--block", f"--num-cpus={cpus}", "--num-gpus=0"]
        words += [f"--dashboard-agent-listen-port={free_port()}", f"--object-store-memory={128 * 1024**2}"]
        own = {} if port is None else {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port)}
        launch_ray(words, {**self.environment, **own}, self.directory / "node.log", host)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (new := self.nodes() - known):
            assert time.monotonic() < deadline, (self.directory / "node.log").read_text()
            time.sleep(0.5)
        return new.pop()

    def nodes(self) -> set[str]:
        """The ids of all Ray nodes that are alive."""
        answer = plain_http.get(f"{self.dashboard}/nodes?view=summary", headers=bearer(self.environment), timeout=60)
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
        """What `serve deploy` asks the dashboard for."""
        where, headers = f"{self.dashboard}/api/serve/applications/", bearer(self.environment)
        answer = plain_http.put(where, json=config, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text

    def deploy_by_command(self, config: dict[str, Any]) -> None:
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
        answer = plain_http.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=60)
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


def ray_environment() -> dict[str, str]:
    """What `serve/ray.env` sets in a shell, as a platform team reads it there."""
    words = ["env", "-i", "sh", "-c", 'set -a; . "$0"; env', str(MANIFESTS / "serve" / "ray.env")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name not in ("PWD", "SHLVL", "OLDPWD", "_")}


@contextmanager
def ray_cluster(
    cpus: int = 2,
    more: Mapping[str, str] = MappingProxyType({}),
    host: Host | None = None,
    coming: ComingNodes | None = None,
) -> Iterator[RayCluster]:
    """A cluster that is a head node with a token so far, on this machine or a host, `more` in its environment; however
    the test ends, none of its processes is left. coming: the nodes that Ray's autoscaler may bring."""
    directory = Path(tempfile.mkdtemp(prefix="tidar-", dir="/tmp"))  # Ray's sockets need a short path
    mark = uuid.uuid4().hex
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **OWN_PROCESSES,  # as in the image
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.leaving:middlewares",
        MARK: mark,
        **more,
    }
    words = ["start", "--head", "--block", f"--num-cpus={cpus}", "--num-gpus=0"]
    words += [f"--object-store-memory={128 * 1024**2}"]
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    words += [f"--{name}={port}" for name, port in ports.items()] + ["--include-dashboard=true"]
    at = "127.0.0.1"
    if host is not None:
        at = host.address
        words += ["--dashboard-host=0.0.0.0"]
    if coming is not None:
        file = directory / "autoscaling.json"
        file.write_text(json.dumps(coming.config(f"{at}:{ports['port']}", directory / PACE)))
        words += [f"--autoscaling-config={file}"]
        environment |= HEAD_ENVIRONMENT
    cluster = RayCluster(
        f"http://{at}:{ports['dashboard-port']}", f"{at}:{ports['port']}", environment, directory, tuple(words), host
    )
    try:
        cluster.start_head()
        yield cluster
    finally:
        while left := marked_processes(mark):
            kill_all(left)
        shutil.rmtree(directory, ignore_errors=True)


def launch_ray(
    words: list[str], environment: dict[str, str], log: Path, host: Host | None = None
) -> subprocess.Popen[bytes]:
    """`ray` with arguments, in a group of processes of its own, on this machine or a host."""
    # To Ray the other nodes' raylets on this machine are a head that runs: it would not start one again beside them.
    code = "import functools; from ray._private import services; "
    code += "services.find_gcs_addresses = functools.lru_cache(set); "
    code += "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", code, *words]
    if host is not None:
        command = [*host.words, *command, f"--node-ip-address={host.address}"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, process_group=0)


def bearer(environment: dict[str, str]) -> dict[str, str]:
    """The header that Ray's dashboard asks for."""
    return {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
