"""What Serve may call a request: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this, or `leaving`, which has it.

Serve names a request by the client's `X-Request-Id`, whatever that is: in each of its log lines, and in the answer. One
that would be no name there is left out before Serve sees it, and Serve makes one itself.
"""

import re

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-request-id"
FIT = re.compile(r"[A-Za-z0-9_.:/+=@~-]{1,128}")


class RequestIds:
    """Around Serve's own application of a proxy, or of an ingress that is one itself."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(scope=scope)
            given = headers.getlist(HEADER)
            if len(given) > 1 or not all(map(FIT.fullmatch, given)):
                del headers[HEADER]
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What a proxy asks for when it starts."""
    return [Middleware(RequestIds)]
