"""API keys: who may ask. With none set, everybody. A file of keys that changes is read again, so that a key can be
taken back while the server runs."""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ApiError
from tidar_core.config import ConfigError
from tidar_core.model.sources import from_home

METRICS = "/metrics"
LOOK_SECONDS = 1.0  # between two looks at a file
OPEN = ("/", "/health")  # the page is an application of its own, and asks for a key when one is wanted

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys that open the API, and of those that open `/metrics` (the API's where there are none)."""

    api: tuple[bytes, ...] = ()
    metrics: tuple[bytes, ...] = ()

    def admit(self, path: str, given: str | None) -> bool:
        """Whether a request for `path` with the bearer token `given` may pass.

        Every key is compared, in constant time: how long it takes tells nothing of them.
        """
        if not wants_key(path, bool(self.api), bool(self.metrics)):
            return True
        wanted = (self.metrics or self.api) if path == METRICS else self.api
        mine = digest(given or "")
        return bool(sum([hmac.compare_digest(mine, key) for key in wanted]))


def wants_key(path: str, api: bool, metrics: bool) -> bool:
    """Whether requests for `path` want a key, where there are some for the API, or for `/metrics`."""
    return path not in OPEN and (api or (metrics and path == METRICS))


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one a line; empty lines and lines that begin with # do not count.

    Raises ConfigError where the file cannot be read, holds no key, which would leave the server open, or one that a
    request's header cannot bring as it is.
    """
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in from_home(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from None
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"the key file {path} holds no key: write one a line")
    for number, key in keys.items():
        if not key.isascii():
            raise ConfigError(f"line {number} of the key file {path} would open nothing: write keys in ASCII alone")
    return tuple(map(digest, keys.values()))


@dataclass(slots=True)
class KeyFile:
    """The keys of a file as it is now. Raises ConfigError where it is of no use at first; where it is later, or is
    being written, the keys that were read last go on counting, with a line in the log."""

    path: str | None
    clock: Callable[[], float] = time.monotonic
    _keys: tuple[bytes, ...] = field(init=False)
    _seen: tuple[int, ...] | None = field(init=False)
    _looked: float = field(init=False)

    def __post_init__(self) -> None:
        self._seen, self._looked = _state(self.path), self.clock()
        self._keys = read_keys(self.path)

    def keys(self) -> tuple[bytes, ...]:
        """Digests, as `read_keys` gives them."""
        if self.path is not None and self.clock() - self._looked >= LOOK_SECONDS:
            self._looked, seen = self.clock(), _state(self.path)
            if seen != self._seen:
                self._seen = seen
                try:
                    self._keys = read_keys(self.path)
                except ConfigError as error:
                    log.warning("%s; the keys that were read before go on counting", error)
        return self._keys


def _state(path: str | None) -> tuple[int, ...] | None:
    """What differs once a file has changed; None where there is none."""
    if path is None:
        return None
    try:
        found = os.stat(from_home(path))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def route_of(scope: Scope) -> str:
    """The path as routes have it: without the prefix that a Serve config may put the application under."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path.removeprefix(root) or "/" if path == root or path.startswith(f"{root}/") else path


class KeyGuard:
    """Answers 401 to a request without a key that is wanted, before any route sees it."""

    def __init__(self, app: ASGIApp, api: KeyFile, metrics: KeyFile):
        self._app = app
        self._api, self._metrics = api, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            keys = Keys(self._api.keys(), self._metrics.keys())
            if not keys.admit(route_of(scope), given.strip() if scheme.lower() == "bearer" else None):
                error = ApiError(
                    401, "This server requires an API key: send it as a bearer token.", code="invalid_api_key"
                )
                response = error.response()
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
