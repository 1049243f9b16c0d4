"""What the log says of requests, and what it does not."""

import re

import pytest
from fastapi import FastAPI

from cluster.ingress.plans import completion_plan
from cluster.ingress.request_log import RequestLog
from cluster.observe.ingress_metrics import IngressMetrics
from tests.cluster.ingress.test_api import ask
from tests.cluster.ingress.test_outcomes import CARD, app_of
from tests.cluster.ingress.test_plans import BACKEND


@pytest.fixture
def api() -> FastAPI:
    return app_of(IngressMetrics("here"))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the server's log, without times, as they are written; tracebacks by their first."""
    caplog.set_level("INFO", logger="ray.serve")
    told: list[str] = []

    def note(record: object) -> bool:
        message = record.getMessage()  # type: ignore[attr-defined]
        told.append(re.sub(r"\d+\.\d{3} s", "N s", message))
        return True

    caplog.handler.addFilter(note)
    return told


def test_each_request_that_the_server_failed_is_a_line(api: FastAPI, lines: list[str]) -> None:
    for why in ("away", "gone"):
        ask(api, "POST", f"/lost/{why}?key=secret", json={"prompt": "a secret"})
    assert lines == [
        "POST /lost/{why} for tiny ended in 503 (not_ready) after N s: It is away.",
        "POST /lost/{why} for tiny ended in 503 (not_ready) after N s: It is gone.",
    ]


def test_so_is_a_stream_that_broke_off_and_what_nobody_expected(api: FastAPI, lines: list[str]) -> None:
    ask(api, "POST", "/stream/unready")
    ask(api, "POST", "/bug")
    assert lines[0] == "POST /stream/{how} for tiny ended in 503 after N s: none"
    assert lines[1] == "POST /bug failed"
    assert lines[2].startswith("POST /bug ended in 500 (internal_error) after N s: ")


def test_what_is_served_or_the_clients_own_fault_is_none(api: FastAPI, lines: list[str]) -> None:
    for path in ("/whole", "/stream/well", "/no/such/path"):
        ask(api, "POST", path)
    assert lines == []


def test_a_full_server_is_a_line_now_and_then(api: FastAPI, lines: list[str]) -> None:
    for _ in range(5):
        ask(api, "POST", "/too-many")
    (line,) = lines
    assert line.startswith("POST /too-many ended in 429 (full) after N s: The server is full")


def test_it_says_how_many_it_had_no_room_for(lines: list[str]) -> None:
    now = 0.0
    log = RequestLog(lambda: now)
    for now in (0.0, 1.0, 9.0, 11.0):  # noqa: B007  # read by the clock
        log.ended("POST /x", "tiny", 429, None, 0.5)
    assert lines == [
        "POST /x for tiny ended in 429 after N s",
        "POST /x for tiny ended in 429 after N s (3 such answers since this was told last)",
    ]


def test_an_unknown_field_is_told_once(lines: list[str]) -> None:
    log = RequestLog()

    def ignored(**fields: int) -> list[str]:
        return list(completion_plan({"prompt": "a", **fields}, CARD, BACKEND).ignored)

    for _ in range(3):
        log.ignored(ignored(top_a=1))
    log.ignored(ignored(top_a=1, top_z=1))
    log.ignored(ignored())
    assert lines == ["ignored unknown fields: 'top_a'", "ignored unknown fields: 'top_z'"]
    many = ignored(**{f"{number}" * 100: 1 for number in range(1000)})
    assert len(many) * max(map(len, many)) <= 1024
