"""Clients leave a Serve proxy before Ray ends it: the proxies' `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this.

A proxy whose node is drained says no at `/-/healthz`, which keeps new connections away but not requests on those that
clients keep. Ray counts requests every few seconds, kills the proxy some time after it counted none, and cuts whatever
came in between; where it always counts one, the proxy never ends. So while it says no, each answer ends its connection.
A stream that began before cannot say so any more: it counts as under way until its client's next request has come.
"""

import asyncio
import os
import time

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import request_ids

# Ray ends a proxy no earlier. Where it is longer than `keep_alive_timeout_s`, no connection is left then that was idle.
IDLE_SECONDS = float(os.environ.get("RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S", "30"))
LOOK_SECONDS = 1.0  # Ray counts every look among the proxy's requests


class Leaving:
    """Around Ray's own application of a proxy, in its process."""

    def __init__(self, app: ASGIApp, idle_seconds: float = IDLE_SECONDS):
        self._app = app
        self._idle_seconds = idle_seconds
        self._leaves = False
        self._look_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = False

        async def send_on(message: Message) -> None:
            nonlocal told
            if message["type"] == "http.response.start" and await self._leaving(scope):
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["connection"] = "close"
                told = True
            await send(message)
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and not told and await self._leaving(scope):
                await asyncio.sleep(self._idle_seconds)  # to Ray the request is under way until this returns

        await self._app(scope, receive, send_on)

    async def _leaving(self, scope: Scope) -> bool:
        """Whether the proxy says no to load balancers."""
        now = time.monotonic()
        if now < self._look_at:
            return self._leaves
        self._look_at = now + LOOK_SECONDS
        path = f"{scope.get('root_path', '')}/-/healthz"
        question = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "headers": []}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._leaves = message["status"] != 200

        await self._app(question, receive, send)
        return self._leaves


def middlewares() -> list[Middleware]:
    """What a proxy asks for when it starts: this, and what a proxy that nobody drains has."""
    return [*request_ids.middlewares(), Middleware(Leaving)]
