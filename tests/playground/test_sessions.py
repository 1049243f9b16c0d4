"""Many browsers at once at a real server, each with its own answer; and a server that is started anew."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.playground.asking import shown
from tests.playground.conftest import visit
from tests.servers import Server, running, start, tiny_model

SESSIONS = 20
TOKENS = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def options(directory: Path) -> tuple[str, ...]:
    model, adapter = tiny_model(directory)
    return ("--model", str(model), "--adapter", str(adapter), "--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def server(directory: Path, options: tuple[str, ...]) -> Iterator[Server]:
    with running(start(directory, *options)) as started:
        yield started


@pytest.fixture
def contexts(chromium: Browser) -> Iterator[list[BrowserContext]]:
    made: list[BrowserContext] = []
    yield made
    for context in made:
        context.close()


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
    for opened in visits:
        opened.page.evaluate("document.querySelector('#t-ask').requestSubmit()")
    busiest = server.metric("vllm:num_requests_running")
    for opened in visits:
        opened.page.wait_for_selector(".facts, #t-problem:not([hidden])", timeout=120_000)
    print(f"{SESSIONS} answers in {time.monotonic() - began:.1f} s, {busiest:.0f} at once when looked at")
    answers = [shown(opened.page) for opened in visits]
    assert answers == [whole(server.url, question) for question in questions]
    assert len(set(answers)) > SESSIONS // 2, "they are different answers"
    for opened, question in zip(visits, questions, strict=True):
        assert opened.page.locator(".asked").text_content() == question
        assert opened.complaints == []
        assert opened.foreign(server.url) == []


def test_a_restart_of_the_server_is_survived_by_a_reload(
    contexts: list[BrowserContext], chromium: Browser, server: Server, directory: Path, options: tuple[str, ...]
) -> None:
    """The last test of this server: it is stopped, and another takes its port."""
    contexts.append(chromium.new_context())
    page = visit(contexts[-1], server.url).page
    ask(page, "Before?")
    assert shown(page) == whole(server.url, "Before?")
    assert server.interrupt() == 0
    page.fill("#t-prompt", "Meanwhile?")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-problem")).to_contain_text("cannot be reached")
    expect(page.locator("#t-prompt")).to_have_value("Meanwhile?")
    with running(start(directory, *options, port=int(server.url.rpartition(":")[2]))) as anew:
        page.reload()
        page.wait_for_selector("#t-served[data-state=up]", timeout=60_000)
        ask(page, "After?")
        assert shown(page) == whole(anew.url, "After?")


def ask(page: Page, text: str) -> None:
    page.fill("#t-max", str(TOKENS))
    page.fill("#t-prompt", text)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts", timeout=60_000)
