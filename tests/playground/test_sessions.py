"""Many browsers at once at a real server, each with its own answer; and a server that is started anew."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.playground.asking import shown
from tests.playground.conftest import visit
from tests.servers import Server, tiny_server

SESSIONS = 20
TOKENS = 200


@pytest.fixture
def server_to_stop(server: Server) -> Server:
    """The server that many tests share, for the last of them."""
    return server


@pytest.fixture
def contexts(chromium: Browser) -> Iterator[list[BrowserContext]]:
    made: list[BrowserContext] = []
    yield made
    for context in made:
        context.close()


@contextmanager
def looking(server: Server) -> Iterator[list[float]]:
    """How many requests run, looked at over and over."""
    found: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            found.append(server.metric("vllm:num_requests_running"))

    looker = threading.Thread(target=look)
    looker.start()
    yield found
    over.set()
    looker.join()


def whole(address: str, text: str) -> str:
    """The answer that a session should see, asked for without a browser."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
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
    assert answers == [whole(server.url, question) for question in questions]
    assert len(set(answers)) > SESSIONS // 2, "they are different answers"
    for opened, question in zip(visits, questions, strict=True):
        assert opened.page.locator(".asked").text_content() == question
        assert opened.complaints == []
        assert opened.foreign(server.url) == []


def test_a_restart_of_the_server_is_survived_by_a_reload(
    contexts: list[BrowserContext], chromium: Browser, server_to_stop: Server, tmp_path: Path
) -> None:
    """Another server takes the port of the one that is stopped."""
    server = server_to_stop
    contexts.append(chromium.new_context())
    page = visit(contexts[-1], server.url).page
    ask(page, "Before?")
    assert shown(page) == whole(server.url, "Before?")
    assert server.interrupt() == 0
    page.fill("#t-prompt", "Meanwhile?")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-problem")).to_contain_text("cannot be reached")
    expect(page.locator("#t-prompt")).to_have_value("Meanwhile?")
    with tiny_server(tmp_path, port=int(server.url.rpartition(":")[2])) as anew:
        page.reload()
        page.wait_for_selector("#t-served[data-state=up]", timeout=60_000)
        ask(page, "After?")
        assert shown(page) == whole(anew.url, "After?")


def ask(page: Page, text: str) -> None:
    page.fill("#t-max", str(TOKENS))
    page.fill("#t-prompt", text)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts", timeout=60_000)
