"""Many browsers at once at a real server, each with its own answer."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests import plain_http
from tests.playground.asking import shown
from tests.playground.conftest import visit
from tests.servers import Server

SESSIONS = 20
TOKENS = 200


@pytest.fixture
def contexts(chromium: Browser) -> Iterator[list[BrowserContext]]:
    made: list[BrowserContext] = []
    yield made
    for context in made:
        context.close()


@contextmanager
def looking(server: Server) -> Iterator[list[float]]:
    """How many requests run, looked at over and over. A look that fails fails the block."""
    found: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            found.append(server.metric("vllm:num_requests_running"))
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        looker = pool.submit(look)
        try:
            yield found
        finally:
            over.set()
        looker.result()


def whole(address: str, text: str) -> str:
    """The answer that a session should see, asked for without a browser."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
    answer = plain_http.post(f"{address}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def test_twenty_sessions_at_once(chromium: Browser, contexts: list[BrowserContext], server: Server) -> None:
    visits = []
    for _ in range(SESSIONS):
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 720}))
        visits.append(visit(contexts[-1], server.url))
    questions = [f"Question {number}: what is {number} times {number}?" for number in range(SESSIONS)]
    for opened, question in zip(visits, questions, strict=True):
        opened.page.fill("#t-max", str(TOKENS))
        opened.page.fill("#t-prompt", question)
    began = time.monotonic()
    with looking(server) as running:
        for opened in visits:
            opened.page.evaluate("document.querySelector('#t-ask').requestSubmit()")
        for opened in visits:
            opened.page.wait_for_selector(".facts, #t-problem:visible", timeout=120_000)
    print(f"{SESSIONS} answers in {time.monotonic() - began:.1f} s, {max(running):.0f} at once when looked at")
    assert max(running) >= 3, "they wait for one another"
    answers = [shown(opened.page) for opened in visits]
    with ThreadPoolExecutor(SESSIONS) as pool:
        assert answers == list(pool.map(partial(whole, server.url), questions))
    assert len(set(answers)) > SESSIONS // 2, "they are different answers"
    for opened, question in zip(visits, questions, strict=True):
        assert opened.page.locator(".asked").text_content() == question
        assert opened.complaints == []
        assert opened.foreign(server.url) == []
