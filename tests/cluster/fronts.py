"""A server with two replicas of a slow model, two ingresses and HAProxy before them; no page."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cluster.options import ServeOptions
from tests import plain_http
from tests.cluster.kills import ingresses, slow_model
from tests.servers import Server, running, start_with, words_of

NAME = "org/two"
INGRESSES, REPLICAS, PLACES = 2, 2, 8  # with each replica there is place for so many answers of each ingress


@contextmanager
def front_server(directory: Path) -> Iterator[Server]:
    model, adapter = slow_model(directory)
    options = ServeOptions(
        model=str(model),
        adapter=str(adapter),
        name=NAME,
        dtype="float32",
        device="cpu",
        replicas=REPLICAS,
        max_ongoing=PLACES,
        ingresses=INGRESSES,
    )
    # What processes say to each other goes past a proxy that operators have in their environment.
    with running(start_with(directory, options, cpus=4, more={"http_proxy": "http://127.0.0.1:9"})) as started:
        wait_until_direct(started)
        yield started


def both(server: Server) -> list[psutil.Process]:
    """Its ingresses, once there are two that HAProxy asks and that answer: each finds the engine by itself."""
    deadline = time.monotonic() + 240
    in_a_row = 0
    while in_a_row < 20:
        assert time.monotonic() < deadline
        there = are_asked(server) and plain_http.get(f"{server.url}/health").status_code == 200
        in_a_row = in_a_row + 1 if there else 0
        time.sleep(0.05)
    return ingresses(server)


def are_asked(server: Server) -> bool:
    """Whether there are two ingresses, and HAProxy was told of a port of each. One has its name before it listens."""
    found = ingresses(server)
    with suppress(psutil.Error, OSError, ValueError):  # one went meanwhile, or its HAProxy
        texts = [settings_of(process) for process in haproxies(server)]
        told = {int(port) for text in texts for port in re.findall(r"127\.0\.0\.1:(\d+)", text)}
        return len(found) == INGRESSES and all(told & ports_of(ingress) for ingress in found)
    return False


def ports_of(process: psutil.Process) -> set[int]:
    """Where it listens."""
    return {own.laddr.port for own in process.net_connections("tcp") if own.status == "LISTEN"}


def wait_until_direct(server: Server) -> None:
    """For a moment after the server is ready it is Serve's own proxy that stands between HAProxy and the ingresses."""
    ports = {port for ingress in both(server) for port in ports_of(ingress)}
    deadline = time.monotonic() + 240
    while True:
        assert time.monotonic() < deadline, "HAProxy does not find the ingresses"
        assert plain_http.get(f"{server.url}/health").status_code == 200
        with suppress(psutil.Error):
            opened = [connection for process in haproxies(server) for connection in process.net_connections("tcp")]
            if any(connection.raddr and connection.raddr.port in ports for connection in opened):
                return
        time.sleep(0.05)


def haproxies(server: Server) -> list[psutil.Process]:
    return [process for process in server.processes() if any("haproxy" in word for word in words_of(process)[:1])]


def settings_of(haproxy: psutil.Process) -> str:
    """What stands in its file."""
    words = words_of(haproxy)
    return Path(words[words.index("-f") + 1]).read_text()
