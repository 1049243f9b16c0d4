"""The routes without a replica behind them, and when something nobody expected happens."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.card import tokenizer_backend
from cluster.carry.directory import Directory, Wake
from cluster.ingress import answering
from cluster.ingress.api import build_api
from cluster.ingress.models import Models
from cluster.options import ServeOptions
from cluster.wire.openapi import BODIES
from cluster.wire.schemas import TidarOptions
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import tiny_tokenizer

LIMIT = 2000
JSON = {"Content-Type": "application/json"}


class NoReplica:
    """A deployment handle of a cluster that has no replica."""

    def broadcast(self, name: str) -> Any:
        raise ConnectionError("no replica")


@pytest.fixture
def api() -> FastAPI:
    return build_api({"tiny": Directory(NoReplica())}, ServeOptions(max_body_bytes=LIMIT))  # type: ignore[arg-type]


def ask(api: FastAPI, method: str, path: str, **fields: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://tidar") as client:
            return await client.request(method, path, **fields)

    return asyncio.run(call())


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/a/b"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/tokenize"),
    ],
)
def test_without_a_replica_it_is_503(api: FastAPI, method: str, path: str) -> None:
    response = ask(api, method, path, **({"json": {"prompt": "a"}} if method == "POST" else {}))
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert error_of(response)["code"] == "not_ready"


def test_health_and_metrics_without_a_replica(api: FastAPI) -> None:
    health = ask(api, "GET", "/health")
    assert (health.status_code, health.text.count("\n")) == (503, 1)
    assert ask(api, "GET", "/metrics").status_code == 503


@pytest.mark.parametrize("path", ["/health", "/"])
@pytest.mark.parametrize("serves", [True, False])
def test_probes_that_ask_for_the_head_alone_are_told_the_same(
    api: FastAPI, path: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "serves", lambda _: serves)
    whole, head = (ask(api, method, path) for method in ("GET", "HEAD"))
    assert (head.status_code, head.headers) == (whole.status_code, whole.headers)
    described = ask(api, "GET", "/openapi.json").json()["paths"]
    assert list(described["/health"]) == ["get"]


def test_routes_that_are_not_there(api: FastAPI) -> None:
    missing = ask(api, "GET", "/v1/nothing")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "invalid_request_error")
    wrong = ask(api, "GET", "/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    error_of(wrong)
    assert ask(api, "GET", "/docs").status_code == 404


def test_the_root_leads_to_the_playground(api: FastAPI) -> None:
    response = ask(api, "GET", "/")
    assert response.status_code == 307
    assert response.headers["location"] == "playground/", "relative, whatever prefix a proxy has taken from the path"


def test_without_a_playground_the_root_says_what_is_there() -> None:
    api = build_api({"tiny": Directory(NoReplica())}, ServeOptions(playground=False))  # type: ignore[arg-type]
    response = ask(api, "GET", "/")
    assert (response.status_code, response.text.count("\n")) == (200, 1)
    assert "/v1" in response.text
    assert ask(api, "GET", "/openapi.json").status_code == 200


def test_what_no_other_server_has_is_described(api: FastAPI) -> None:
    own = ask(api, "GET", "/openapi.json").json()["components"]["schemas"]["TidarOptions"]["properties"]
    assert own.keys() == TidarOptions.model_fields.keys()
    assert all(field["description"] for field in own.values())


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b" " * 100


def test_a_body_over_the_limit_is_413_stated_or_not(api: FastAPI) -> None:
    for content in (b" " * (LIMIT + 1), parts(2 * LIMIT)):
        response = ask(api, "POST", "/v1/completions", content=content, headers=JSON)
        assert response.status_code == 413
        assert str(LIMIT) in error_of(response)["message"]
    assert ask(api, "POST", "/v1/completions", content=b"{}".ljust(LIMIT), headers=JSON).status_code == 503


@pytest.mark.parametrize(
    ("stated", "status"), [("9" * 4401, 413), (str(LIMIT + 1), 413), ("0" * 4400 + "2", 503), ("0", 503), ("-1", 400)]
)
def test_a_length_of_any_number_of_digits_is_read(api: FastAPI, stated: str, status: int) -> None:
    response = ask(api, "POST", "/v1/completions", content=b"{}", headers={**JSON, "Content-Length": stated})
    assert response.status_code == status
    error_of(response)


async def halting(pieces: int, seconds: float) -> AsyncIterator[bytes]:
    for piece in (*[b" "] * pieces, b"{}"):
        yield piece
        await asyncio.sleep(seconds)


def test_a_body_that_stops_coming_is_408(api: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "SILENT_SECONDS", 0.05)
    response = ask(api, "POST", "/v1/completions", content=halting(3, 60.0), headers=JSON)
    assert (response.status_code, response.headers["connection"]) == (408, "close")
    assert error_of(response)["code"] == "body_timeout"
    assert "0.05 seconds" in error_of(response)["message"]


def test_a_slow_body_is_read_as_long_as_it_comes(api: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "SILENT_SECONDS", 5.0)
    limits: list[float] = []

    def noted(seconds: float) -> asyncio.Timeout:
        limits.append(seconds)
        return asyncio.timeout(seconds)

    monkeypatch.setattr(answering, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": noted}))
    assert ask(api, "POST", "/v1/completions", content=halting(3, 0.0), headers=JSON).status_code == 503
    assert len(limits) > 4, "anew for each piece, and for the end"
    assert set(limits) == {5.0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": "1" * 5000}, "prompt"), ({"messages": [{"role": "user", "content": "1" * 5000}]}, "messages")],
)
def test_tokens_of_what_no_model_could_read_are_not_counted(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_for(tiny_tokenizer())

    async def known(_: Directory) -> Any:
        return card, tokenizer_backend(card)

    monkeypatch.setattr(Directory, "known", known)
    api = build_api({"tiny": Directory(NoReplica())}, ServeOptions())  # type: ignore[arg-type]
    refused = ask(api, "POST", "/tokenize", json=fields)
    assert refused.status_code == 400
    assert (error_of(refused)["param"], error_of(refused)["code"]) == (param, "context_length_exceeded")
    assert ask(api, "POST", "/tokenize", json=fields | {"truncate_prompt_tokens": 5}).json()["count"] == 5


def test_what_asks_for_no_model_that_is_served_wakes_none_and_is_not_its(monkeypatch: pytest.MonkeyPatch) -> None:
    async def woken(_: Directory) -> Any:
        raise AssertionError("woken")

    for method in ("awake", "known"):
        monkeypatch.setattr(Directory, method, woken)
    sleeps = Directory(NoReplica(), Wake(seconds=1.0, most=1))  # type: ignore[arg-type]
    api = build_api({"tiny": sleeps}, ServeOptions())
    for path in BODIES:
        unread = ask(api, "POST", path, content=b"[1]", headers=JSON)
        assert (unread.status_code, error_of(unread)["message"]) == (400, "the body must be a JSON object")
        foreign = ask(api, "POST", path, json={"model": "other"})
        assert (foreign.status_code, error_of(foreign)["code"]) == (404, "model_not_found")
    page = ask(api, "GET", "/metrics").text.splitlines()
    counted = [line for line in page if line.startswith("tidar:http_responses_total") and not line.endswith(" 0.0")]
    assert [line.split('code="')[1][:3] for line in counted if 'model_name=""' in line] == ["400", "404"]
    assert len(counted) == 2


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_page_of_another_site_may_send_unasked_is_refused(api: FastAPI, kind: str | None) -> None:
    for path in BODIES:
        headers = {} if kind is None else {"Content-Type": kind}
        response = ask(api, "POST", path, content=b"{}", headers=headers)
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]
        assert ask(api, "POST", path, content=b"{}", headers=JSON | headers).status_code == (415 if headers else 503)


def test_a_compressed_body_is_refused_as_one(api: FastAPI) -> None:
    for packed, status in (("gzip", 415), ("zstd", 415), ("identity", 503)):
        headers = JSON | {"Content-Encoding": packed}
        response = ask(api, "POST", "/v1/completions", content=b"{}", headers=headers)
        assert response.status_code == status
        assert (packed in error_of(response)["message"]) == (status == 415)


def test_no_other_origin_is_let_in(api: FastAPI) -> None:
    response = ask(api, "GET", "/health", headers={"Origin": "http://elsewhere"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_an_unexpected_error_says_nothing_of_itself(monkeypatch: pytest.MonkeyPatch, api: FastAPI) -> None:
    async def broken(_: Directory) -> Any:
        raise KeyError("a secret")

    monkeypatch.setattr(Directory, "metrics", broken)
    response = ask(api, "GET", "/metrics")
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text
    assert "Traceback" not in response.text
