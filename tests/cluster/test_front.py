"""A server with several ingresses and replicas: what reaches them, when it is full, and how it ends."""

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import AsyncExitStack, suppress

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.app import DRAIN_SECONDS
from tests import plain_http
from tests.cluster.fronts import INGRESSES, NAME, PLACES, REPLICAS, both
from tests.servers import STOP_SECONDS, Server, words_of

TOLD_SECONDS = 20  # for each replica to have heard of what each ingress counted


def test_options_reach_the_replicas(front: Server) -> None:
    both(front)  # an ingress may have been killed by the test before
    said = front.log.read_text()
    assert "playground" not in said
    assert plain_http.get(f"{front.url}/playground/").status_code == 404
    assert f"{NAME} is served in float32 on cpu" in said
    (model,) = plain_http.get(f"{front.url}/v1/models").json()["data"]
    assert model["id"] == NAME
    replicas: set[str] = set()
    for _ in range(100):
        if len(replicas) == 2:
            break
        body = {"prompt": "a", "max_tokens": 1, "stream": True, "tidar": {"trace": True}}
        first = plain_http.post(f"{front.url}/v1/completions", json=body).text.splitlines()[0]
        replicas.add(json.loads(first.removeprefix("data: "))["tidar"]["replica"])
    assert len(replicas) == 2


def test_whichever_ingress_is_asked_its_page_counts_what_all_answered(front: Server) -> None:
    """Prometheus asks one address, and comes to one ingress by chance."""
    both(front)

    def counted() -> dict[str, float]:
        samples = [
            sample
            for family in text_string_to_metric_families(plain_http.get(f"{front.url}/metrics").text)
            for sample in family.samples
            if sample.name == "tidar:http_responses_total" and sample.labels["code"] == "400"
        ]
        found: dict[str, float] = {}
        for sample in samples:
            ingress = sample.labels["ingress"]
            found[ingress] = found.get(ingress, 0.0) + sample.value
        return found

    before = counted()
    for _ in range(20):
        assert plain_http.post(f"{front.url}/v1/completions", json={"prompt": 7.5}).status_code == 400
    deadline, gained = time.monotonic() + TOLD_SECONDS, [[0.0]]
    while not all(sum(gains) == 20 for gains in gained) and time.monotonic() < deadline:
        pages = [counted() for _ in range(10)]  # each tells what it counted every second
        gained = [[count - before.get(ingress, 0.0) for ingress, count in page.items()] for page in pages]
    assert all(sum(gains) == 20 for gains in gained), (before, pages)
    assert all(sum(gain > 0 for gain in gains) == INGRESSES for gains in gained), (before, pages)


def test_each_ingress_tells_how_many_engines_there_are_and_shall_be(front: Server) -> None:
    both(front)
    deadline = time.monotonic() + TOLD_SECONDS
    seen: dict[str, list[float]] = {}
    while seen != {"tidar:engines_ready": [REPLICAS] * INGRESSES, "tidar:engines_wanted": [REPLICAS] * INGRESSES}:
        assert time.monotonic() < deadline, seen
        page = plain_http.get(f"{front.url}/metrics").text
        families = {family.name: family.samples for family in text_string_to_metric_families(page)}
        names = ("tidar:engines_ready", "tidar:engines_wanted")
        seen = {name: [sample.value for sample in families[name]] for name in names}


def test_no_process_runs_that_nobody_asks_anything(front: Server) -> None:
    running = [" ".join(words_of(process)) for process in front.processes()]
    assert any("raylet" in words for words in running)
    assert [words for words in running if "monitor.py" in words or "dashboard.py" in words] == []


def test_no_process_of_serve_holds_what_only_the_page_needs(front: Server) -> None:
    held: dict[int, set[str]] = {}
    for process in front.processes():
        with suppress(psutil.NoSuchProcess):  # one that Ray ended meanwhile
            held[process.pid] = {file.path for file in process.memory_maps()}
    assert any("/ray/_raylet" in path for paths in held.values() for path in paths)
    assert [pid for pid, paths in held.items() if any("/pandas/" in path for path in paths)] == []


def test_a_full_server_says_so_and_stays_in_health(front: Server) -> None:
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    short = {"prompt": "a", "max_tokens": 1}

    async def refused_while_full(client: httpx.AsyncClient) -> bool:
        async with AsyncExitStack() as streams:
            for _ in range(INGRESSES * REPLICAS * PLACES + 8):  # a stream may end before the next begins
                response = await streams.enter_async_context(client.stream("POST", "/v1/completions", json=long))
                if response.status_code != 200:
                    break
            else:
                return False
            await response.aread()
            assert response.status_code == 429, response.text
            assert response.headers["retry-after"]
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
        return True

    async def has_room(client: httpx.AsyncClient) -> bool:
        for _ in range(100):
            response = await client.post("/v1/completions", json={**short, "prompt": ["a"] * 4})
            if response.status_code == 200:
                return True
            await asyncio.sleep(0.05)
        return False

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=front.url, timeout=120) as client:
            for _ in range(5):
                refused = await refused_while_full(client)
                assert await has_room(client)  # the long ones went away
                if refused:
                    return
            raise AssertionError("the server was never full")

    asyncio.run(ask())


def test_while_it_stops_a_stream_is_let_end_and_requests_are_told_so_at_once(front_to_stop: Server) -> None:
    server = front_to_stop
    told: list[httpx.Response] = []
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        body = {"prompt": [5, 6], "max_tokens": 2}
        while not ended.is_set():
            began = time.monotonic()
            with suppress(httpx.TransportError):  # none listens any more
                told.append(plain_http.post(f"{server.url}/v1/completions", json=body, timeout=30))
            waits.append(time.monotonic() - began)
            time.sleep(0.02)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with plain_http.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        os.killpg(server.process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches HAProxy and ingresses too
        rest = [line for line in lines if line]
    assert server.process.wait(STOP_SECONDS) == 0
    ended.set()
    for client in clients:
        client.join()
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    refusals = [answer for answer in told if answer.status_code != 200]
    assert len(refusals) < len(told), "none was answered before"
    assert refusals
    for answer in refusals:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
        assert answer.json()["error"]["code"] in ("not_ready", "lost")
    assert max(waits) < 0.9 * DRAIN_SECONDS, "one was kept until the ingress was killed"
    assert server.processes() == []
    said = server.log.read_text()
    assert said.splitlines()[-2:] == ["stopping", "stopped"]
    assert "Traceback" not in said
