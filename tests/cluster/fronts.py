"""A server with two replicas of a slow model, two ingresses and HAProxy before them; no page."""

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
    """Its ingresses, once there are two that answer: each finds the engine by itself."""
    deadline = time.monotonic() + 60
    in_a_row = 0
    while in_a_row < 20:
        assert time.monotonic() < deadline
        there = len(ingresses(server)) == 2 and plain_http.get(f"{server.url}/health").status_code == 200
        in_a_row = in_a_row + 1 if there else 0
        time.sleep(0.05)
    return ingresses(server)


def wait_until_direct(server: Server) -> None:
    """For a moment after the server is ready it is Serve's own proxy that stands between HAProxy and the ingresses."""
    listens = [own for ingress in both(server) for own in ingress.net_connections("tcp") if own.status == "LISTEN"]
    ports = {own.laddr.port for own in listens}
    deadline = time.monotonic() + 20
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
