"""What the Ray that `tidar up` starts writes into files: bounded, and nothing for a request."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import OWN_PROCESSES, ray_cluster
from tests import plain_http
from tests.servers import MARK, REPOSITORY, Server, end_all, free_port, words_of

ROTATED, FILES = 4096, 3  # of each log as the test asks for it, the one that is written among them
REQUESTS = 5
# A worker that says more than its files may hold, and requests that Serve's own proxy answers.
TALK = """
import json, sys
from contextlib import suppress
from pathlib import Path
import httpx, ray
from cluster.operate.deploy import start_proxies
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import ray_cluster

@ray.remote(num_cpus=0)
def talk():
    for _ in range(1000):
        print("x" * 99, flush=True)
        print("y" * 99, file=sys.stderr, flush=True)

port, requests = map(int, sys.argv[1:])
with Interrupts() as interrupts, ray_cluster(None, lambda line: None, interrupts):
    ray.get(talk.remote())
    start_proxies("127.0.0.1", port)
    for _ in range(requests):
        httpx.get(f"http://127.0.0.1:{port}/", timeout=60)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {}
    for file in filter(Path.is_file, logs.rglob("*")):
        with suppress(FileNotFoundError):  # a full one gets another name
            texts[str(file.relative_to(logs))] = file.read_text(errors="replace")
    print(json.dumps(texts))
"""


def written(tmp_path: Path) -> dict[str, str]:
    """The logs of a Ray of our own by their names, as `TALK` leaves them."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY), "RAY_ROTATION_MAX_BYTES": str(ROTATED)}
    words = [sys.executable, "-c", TALK, str(free_port()), str(REQUESTS)]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert not end_all(mark)
    assert done.returncode == 0, done.stderr
    logs: dict[str, str] = json.loads(done.stdout)
    return logs


def test_they_are_cut_and_no_request_is_in_them(tmp_path: Path) -> None:
    logs = written(tmp_path)
    for letter in "xy":
        (name,) = {name.partition(".")[0] for name, text in logs.items() if f"{letter * 99}\n" in text}
        kept = [text for other, text in logs.items() if other.partition(".")[0] == name and letter * 99 in text]
        assert len(kept) == FILES
        assert all(len(text) <= ROTATED for text in kept)
    assert any("HTTP port" in text for name, text in logs.items() if "proxy" in name)
    assert not [name for name, text in logs.items() if " GET " in text]


def test_how_much_they_hold_is_the_operators_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **_: read.append(dict(os.environ)))
    for name in OWN_PROCESSES:
        monkeypatch.setenv(name, "")  # so that it is as before again after this
        monkeypatch.delenv(name)
    with Interrupts() as interrupts, ray_cluster("10.0.0.1:6379", lambda line: None, interrupts):
        pass
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", "7")
    with Interrupts() as interrupts, ray_cluster(None, lambda line: None, interrupts):
        pass
    joined, own = ([each.get(f"RAY_ROTATION_{name}") for name in ("MAX_BYTES", "BACKUP_COUNT")] for each in read)
    assert joined == [None, None]
    assert own == ["16777216", "7"]


def test_no_request_to_a_server_is_in_them(server: Server) -> None:
    sign = uuid.uuid4().hex
    body = {"prompt": sign, "max_tokens": 2}
    for _ in range(REQUESTS):
        plain_http.post(f"{server.url}/v1/completions", params={"q": sign}, headers={"x-request-id": sign}, json=body)
        plain_http.get(f"{server.url}/playground/", params={"q": sign}, headers={"x-request-id": sign})
    time.sleep(1.0)
    texts = [file.read_text(errors="replace") for file in logs_of(server).rglob("*") if file.is_file()]
    assert any("Ingress" in text for text in texts)
    assert not [text for text in texts if sign in text]


def logs_of(server: Server) -> Path:
    """The directory where its Ray writes its logs."""
    said: list[psutil.Process] = server.processes()
    (logs,) = {
        word.partition("=")[2] for process in said for word in words_of(process) if word.startswith("--log_dir=")
    }
    return Path(logs)
