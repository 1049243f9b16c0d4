"""Clients are asked to leave a proxy that says no to load balancers, and a stream that could not ask holds it back."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster import leaving
from cluster.leaving import Leaving, middlewares
from cluster.request_ids import RequestIds

IDLE_SECONDS = 1.5
KEEP, CLOSE = (b"content-type", b"text/plain"), (b"connection", b"close")


class Proxy:
    """Ray's part: says whether it drains at /-/healthz, streams two pieces elsewhere, counts what is under way."""

    def __init__(self) -> None:
        self.drains, self.looks, self.under_way = False, 0, 0
        self.first, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/-/healthz":
            self.looks += 1
            await send({"type": "http.response.start", "status": 503 if self.drains else 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        self.under_way += 1
        await send({"type": "http.response.start", "status": 200, "headers": [KEEP]})
        self.first.set()
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
        self.under_way -= 1


async def receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def request(app: Leaving, sent: list[Message]) -> "asyncio.Task[None]":
    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "headers": []}
    return asyncio.ensure_future(app(scope, receive, send))


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(("drains", "headers"), [(False, [KEEP]), (True, [KEEP, CLOSE])])
def test_an_answer_ends_its_connection_while_the_proxy_drains(drains: bool, headers: list[Any]) -> None:
    async def run() -> None:
        proxy, sent = Proxy(), list[Message]()
        proxy.drains = drains
        proxy.go_on.set()
        async with asyncio.timeout(IDLE_SECONDS / 2):
            await request(Leaving(proxy, IDLE_SECONDS), sent)
        assert sent[0]["headers"] == headers
        assert b"".join(message.get("body", b"") for message in sent) == b"ab"

    asyncio.run(run())


def test_a_stream_that_began_before_is_under_way_until_its_client_had_time_to_ask_again() -> None:
    async def run() -> None:
        proxy, sent = Proxy(), list[Message]()
        app = Leaving(proxy, IDLE_SECONDS)
        stream = request(app, sent)
        await proxy.first.wait()
        proxy.drains = True
        proxy.go_on.set()
        await asyncio.sleep(0.1)
        assert sent[-1] == {"type": "http.response.body", "body": b"b"}, "the client has all of it at once"
        assert sent[0]["headers"] == [KEEP]
        assert proxy.under_way == 1

        again = list[Message]()
        await request(app, again)
        assert again[0]["headers"] == [KEEP, CLOSE]
        await stream
        assert proxy.under_way == 0

    asyncio.run(run())


def test_it_looks_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LOOK_SECONDS", 60.0)

    async def run() -> None:
        proxy = Proxy()
        proxy.go_on.set()
        app = Leaving(proxy, IDLE_SECONDS)
        for _ in range(3):
            await request(app, [])
        assert proxy.looks == 1

    asyncio.run(run())


def test_a_proxy_that_clients_leave_is_particular_about_ids_too() -> None:
    assert {one.cls for one in middlewares()} == {Leaving, RequestIds}
