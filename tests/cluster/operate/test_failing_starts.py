"""What keeps Ray, or Serve's proxy, from starting: one line, with what to do about it."""

import re
import shutil
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private.application_state import ApplicationStatusInfo, StatusOverview
from ray.serve._private.common import DeploymentStatusInfo
from ray.serve.schema import ApplicationStatus, DeploymentStatus, DeploymentStatusTrigger

from cluster.operate import deploy
from cluster.operate.deploy import start_proxies
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import mend_of, ray_cluster, running_cluster
from tests.servers import free_port
from tidar_core.config import ConfigError


def test_a_proxy_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where somebody takes the port between the look at it and the proxy's start."""
    said = "HAProxy crashed during startup:\nsome listeners did not start"

    def fail(**_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(serve, "start", fail)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):  # our own HAProxy's, which came too late
        with pytest.raises(ConfigError, match=r"proxy does not start \(some listeners did not start\)$"):
            start_proxies("127.0.0.1", port)
        for told in (
            f"cannot bind socket (Address already in use) for [127.0.0.1:{port}]\nsome listeners did not start",
            f"Failed to bind to address '127.0.0.1:{port}'.",  # where HAProxy is not in front
        ):
            said = told
            with pytest.raises(ConfigError, match=f"port {port} .* cannot be used"):
                start_proxies("127.0.0.1", port)
        said = "cannot bind socket (Address already in use) for [127.0.0.1:20810]\nsome listeners did not start"
        with pytest.raises(ConfigError, match=r"^127.0.0.1:20810 was taken by another program meanwhile: try again$"):
            start_proxies("127.0.0.1", port)


@pytest.mark.parametrize("said", ["was killed by `ray.kill`.", "never ran - it was cancelled", "Timed out"])
def test_a_proxy_that_is_late(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError(f"The actor {said}")

    monkeypatch.setattr(serve, "start", fail)
    with pytest.raises(ConfigError, match="try again, with less going on"):
        start_proxies("127.0.0.1", free_port())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), "exceed 107 bytes; set RAY_TMPDIR to a shorter path"),
        (Exception("The current node timed out during startup.\nLook at its logs."), "timed out during startup."),
        (
            RuntimeError("Failed to start GCS.  Last 1 lines of error files:\n a C b\n.Please check /a/gcs.out for it"),
            "Failed to start GCS: see /a/gcs.out",
        ),
    ],
)
def test_a_ray_that_does_not_start(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with (
        Interrupts() as interrupts,
        pytest.raises(ConfigError, match=f"^Ray could not be started: .*{line}$"),
        ray_cluster(None, print, interrupts),
    ):
        pass


def test_a_ray_that_has_no_place_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    error = Exception("Timed out waiting for file gcs_server_port")
    assert mend_of(error) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=4096 if place == tmp_path else 1e12))
    assert mend_of(error).startswith(f"; no space is left in {tmp_path}/ray: ")


@pytest.mark.parametrize(
    "address", ["ray://x:1", "http://127.0.0.1:8265", "head", "127.0.0.1:", "127.0.0.1:99999", ":6379"]
)
def test_an_address_that_is_no_heads(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    line = f"RAY_ADDRESS is {address}: give HOST:PORT of the cluster's head, as HOST:6379"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        running_cluster()


def test_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(address: str) -> str:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=r"^nobody answers at .*: start that cluster, or unset it") as told:
            running_cluster()
        return str(told.value)

    since = time.monotonic()
    assert "(Connection refused)" in refusal(f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as opened:
        for _ in range(8):  # of what it does not accept the queue is full then, and whoever comes next hears nothing
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        host, port = full.getsockname()
        assert "(timed out)" in refusal(f"{host}:{port}")
    assert time.monotonic() - since < 60, "the system alone would try for minutes"


def test_what_serve_says_of_a_start_that_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster whose GPUs others have."""

    def state(status: ApplicationStatus, said: str = "") -> dict[str, StatusOverview]:
        deployments = [
            DeploymentStatusInfo(name, how, DeploymentStatusTrigger.UNSPECIFIED, message)
            for name, how, message in (
                ("Ingress", DeploymentStatus.HEALTHY, "all is well"),
                ("Engine", DeploymentStatus.UPDATING, ""),
                ("Engine-other", DeploymentStatus.UPDATING, said),
            )
        ]
        return {"api": StatusOverview(ApplicationStatusInfo(status), "api", deployments)}

    long = "Deployment 'Engine' in application 'api' has 1 replicas that have taken more than 30s to initialize."
    states = [
        {},
        state(ApplicationStatus.DEPLOYING),
        state(ApplicationStatus.DEPLOYING, f"{long} This may be caused by a slow __init__ or reconfigure method."),
        *[state(ApplicationStatus.DEPLOYING, 'A replica waits\n for {"GPU": 1}.\n')] * 2,
        state(ApplicationStatus.RUNNING),
    ]
    monkeypatch.setattr(deploy, "states_of_applications", partial(next, iter(states)))
    monkeypatch.setattr(deploy, "PATIENT_SECONDS", -1.0)
    monkeypatch.setattr(deploy, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(deploy, "unhealthy", lambda url: None)
    said: list[str] = []
    board: Any = SimpleNamespace(news=list)
    deploy.wait_until_ready(["api"], board, "http://a", said.append, Interrupts())
    waits = "still waiting for the api application to start"
    assert said == [waits, waits + ': A replica waits for {"GPU": 1}.']
