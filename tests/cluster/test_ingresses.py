"""Two ingresses before one engine, of which one dies."""

import json
import threading
import time

import httpx
import pytest

from cluster.options import ServeOptions
from tests.cluster.kills import ingresses, slow_model
from tests.servers import Server, running, start_with

STREAMS, TOKENS = 12, 2000
NOTICED_SECONDS = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("ingresses")
    model, adapter = slow_model(directory)
    options = ServeOptions(model=str(model), adapter=str(adapter), dtype="bfloat16", device="cpu", ingresses=2)
    with running(start_with(directory, options, cpus=4)) as started:
        wait_for_both(started)
        yield started


def wait_for_both(server: Server) -> None:
    """The server says that it is ready when one of them is; each finds the engine by itself."""
    deadline = time.monotonic() + 30
    in_a_row = 0
    while in_a_row < 20:
        assert time.monotonic() < deadline
        in_a_row = in_a_row + 1 if httpx.get(f"{server.url}/health").status_code == 200 else 0
        time.sleep(0.05)


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
            with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
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


def test_the_engine_ends_what_a_dead_ingress_asked_for_and_nothing_else(server: Server) -> None:
    clients = [Client(server, number) for number in range(STREAMS)]
    for client in clients:
        client.start()
    wait_for_running(server, STREAMS, 20)
    ingresses(server)[0].kill()
    time.sleep(1.0)  # for the clients to see it
    left = [client for client in clients if client.is_alive()]
    assert 0 < len(left) < STREAMS
    wait_for_running(server, len(left), NOTICED_SECONDS)
    for client in clients:
        client.join()
    assert [client.tokens for client in left] == [TOKENS] * len(left)
    assert sum(client.tokens is not None for client in clients) == len(left)
