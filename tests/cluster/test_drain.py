"""What a drain waits for, where nobody can tell it for a while."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError
from ray.util.state.exception import RayStateApiException

from cluster import drain

Says = Callable[[Callable[[], Any]], None]


@pytest.fixture
def ray_that_says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Stands for Ray: its state API answers as the given function."""

    def says(answer: Callable[[], Any]) -> None:
        monkeypatch.setattr(drain, "list_actors", lambda **_: answer())
        monkeypatch.setattr(drain, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr(drain, "running_cluster", lambda: "here:1")
        monkeypatch.setattr(drain.ray, "init", lambda **_: None)
        monkeypatch.setattr(drain.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
        monkeypatch.setattr(drain.subprocess, "run", lambda *_, **__: None)

    return says


def unreachable() -> Any:
    raise RayStateApiException("no\nanswer")


def without_gcs() -> Any:
    raise RpcError("Timed out while waiting for GCS")


def test_a_head_that_starts_anew_is_waited_for(ray_that_says: Says, capsys: pytest.CaptureFixture) -> None:
    """A pod's preStop hook that failed there would end its streams at once."""
    replica, other = SimpleNamespace(class_name="ServeReplica:api:Engine"), SimpleNamespace(class_name="Board")
    answers = iter([lambda: [replica, other], unreachable, without_gcs, lambda: [replica], lambda: [other]])
    ray_that_says(lambda: next(answers)())
    assert drain.drain(60, "node")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "draining: ServeReplica:api:Engine",
        "what is left is not known now: no answer",
        "what is left is not known now: Timed out while waiting for GCS",
    ]


def test_a_head_that_is_deleted_under_a_drain_ends_it(ray_that_says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pods' GPUs are wanted elsewhere."""
    monkeypatch.setattr(drain, "HEAD_SECONDS", 0.2)
    ray_that_says(unreachable)
    with pytest.raises(drain.HeadGone):
        drain.drain(600, "node")


def test_where_no_head_answers_the_hook_ends_by_itself() -> None:
    """Ray's own client would go on for many minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{closed.getsockname()[1]}"}
        command = [sys.executable, "-m", "cluster.drain", "--seconds", "3"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(
        "nothing can be drained any more, the cluster's head is gone: nobody answers at RAY_ADD"
    )
