"""The ASGI layer around Gradio: the page's own head, strict headers, the address without its last slash, and nothing
of Gradio's that the page does not use.

Gradio's page comes with tags that speak of Gradio (link previews, a manifest at the server's root) and without an
icon; it offers no place for tags that must be there before its own script has run. Its interface takes bodies of any
size, files and connections without end, from anybody, on a node that decodes as well.
"""

import re

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

GRADIOS_OWN_TAGS = re.compile(rb'<meta\s+(?:property|name)="(?:og|twitter):[^>]*>\s*|<link\s+rel="manifest"[^>]*>\s*')

# Where Gradio believes to be, by a Host that a proxy may not have handed on; its script takes one that is relative to
# the page as well.
ROOT = re.compile(rb'"root":("https?://[^"]*")')

# What the page asks for, and what Gradio's script asks for where its page has no configuration in it.
USED = re.compile(r"/(?:(?:assets|files|static)/.*|theme\.css|config|favicon\.ico|gradio_api/info)?")

# Even if text of a model became script, it could reach no other host. Gradio needs inline and evaluated script.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; "
        "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Shell:
    """ASGI middleware: puts `head` into the page, sets `HEADERS` on every response, adds a missing last slash, lets
    nothing through but reading what is `USED`.

    Gradio resolves its assets against the page's address, so `/playground` must become `/playground/`; the redirect
    is relative, since behind a proxy the application does not know its public scheme and host.
    """

    def __init__(self, app: ASGIApp, head: str):
        self.app = app
        self.head = head.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path and not USED.fullmatch(path):
            await Response("Not found", 404, HEADERS)(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            await Response("Method not allowed", 405, {**HEADERS, "Allow": "GET, HEAD"})(scope, receive, send)
        elif path == "":
            await self._add_slash(scope, send)
        elif path == "/":
            await self._send_page(scope, receive, send)
        else:
            await self.app(scope, receive, _with_headers(send))

    async def _add_slash(self, scope: Scope, send: Send) -> None:
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        location = scope["path"].rpartition("/")[2].encode() + b"/" + query
        headers = [(b"location", location), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"accept-encoding"]}
        start: Message = {}
        body = b""

        async def collect(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
            if message["type"] != "http.response.body":
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            page = self._own_page(body)
            headers = MutableHeaders(scope=start)
            headers["Content-Length"] = str(len(page))
            headers["Cache-Control"] = "no-cache"
            await _with_headers(send)(start)
            await send({"type": "http.response.body", "body": page})

        await self.app(plain, receive, collect)

    def _own_page(self, html: bytes) -> bytes:
        root = ROOT.search(html)
        head, end, rest = (html.replace(root[1], b'"."') if root else html).partition(b"</head>")
        return GRADIOS_OWN_TAGS.sub(b"", head) + self.head + end + rest if end else html


def _with_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sender
