"""API keys: who may ask. With none set, everybody."""

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ApiError
from tidar_core.config import ConfigError

METRICS = "/metrics"
OPEN = ("/", "/health")  # the page is an application of its own, and asks for a key when one is wanted


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys that open the API, and of those that open `/metrics` (the API's where there are none)."""

    api: tuple[bytes, ...] = ()
    metrics: tuple[bytes, ...] = ()

    def admit(self, path: str, given: str | None) -> bool:
        """Whether a request for `path` with the bearer token `given` may pass.

        Every key is compared, in constant time: how long it takes tells nothing of them.
        """
        wanted = (self.metrics or self.api) if path == METRICS else self.api
        if not wanted or path in OPEN:
            return True
        mine = digest(given or "")
        return bool(sum([hmac.compare_digest(mine, key) for key in wanted]))


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one a line; empty lines and lines that begin with # do not count.

    Raises ConfigError where the file cannot be read or holds no key: it would leave the server open.
    """
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from None
    keys = tuple(digest(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"the key file {path} holds no key: write one a line")
    return keys


def route_of(scope: Scope) -> str:
    """The path as routes have it: without the prefix that a Serve config may put the application under."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path.removeprefix(root) or "/" if path == root or path.startswith(f"{root}/") else path


class KeyGuard:
    """Answers 401 to a request without a key that is wanted, before anything else looks at it."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if not self._keys.admit(route_of(scope), given.strip() if scheme.lower() == "bearer" else None):
                error = ApiError(
                    401, "This server wants an API key: send it as a bearer token.", code="invalid_api_key"
                )
                response = error.response()
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
