"""What goes wrong well: keys that are wanted, refusals, streams that break off, a server that is gone."""

import re

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from playground.files import read_files
from tests.playground.asking import TEXT, TOKENS, ask, shown, texts
from tests.playground.conftest import Visit, visit
from tests.playground.recorded import MODEL, RecordedServer, Recording, event, plain_steps, recording

UNREADABLE = "The server's answer cannot be read. Is there a proxy in between that wants you to sign in?"


def not_the_api(sent: str, wanted: str) -> str:
    return (
        f"What answered is not the server's API (it sent {sent}, not {wanted}): "
        "sign in if a proxy in between wants it, or check the address."
    )


def test_a_wanted_key_is_asked_for_and_kept(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.wanted_key = "sk-1"
    recorded.play(recording(plain_steps(TOKENS)))
    opened = visit(context, recorded.address)
    page = opened.page
    expect(page.locator("#t-key")).to_be_focused()
    expect(page.locator("#t-served")).to_have_text("Waiting for an API key")
    expect(page.locator("#t-problem")).to_be_hidden()
    page.fill("#t-key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#t-problem")).to_have_text("Incorrect API key provided.")
    expect(page.locator("#t-key")).to_be_focused()
    assert page.evaluate("localStorage.getItem('tidar.api_key')") is None
    page.fill("#t-key", "sk-1")
    page.keyboard.press("Enter")
    expect(page.locator("#t-key-form")).to_be_hidden()
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    ask(page, "Go")
    page.wait_for_selector(".facts")
    assert recorded.keys[-1] == "Bearer sk-1"
    page.reload()
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    assert page.evaluate("localStorage.getItem('tidar.api_key')") == "sk-1"
    page.click("#t-forget")
    expect(page.locator("#t-key")).to_be_focused()
    assert page.evaluate("localStorage.getItem('tidar.api_key')") is None
    # The key runs out in the middle: the question comes back, so that nothing has to be written twice.
    page.fill("#t-key", "sk-1")
    page.keyboard.press("Enter")
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    recorded.wanted_key = "sk-2"
    ask(page, "Still there?")
    expect(page.locator("#t-key")).to_be_focused()
    expect(page.locator("#t-prompt")).to_have_value("Still there?")


def test_a_key_is_that_of_every_tab(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.wanted_key = "sk-1"
    one, other = [visit(context, recorded.address).page for _ in range(2)]
    expect(one.locator("#t-key-form")).to_be_visible()
    other.fill("#t-key", "sk-1")
    other.press("#t-key", "Enter")
    expect(one.locator("#t-served")).to_contain_text("SmolLM2")
    expect(one.locator("#t-key-form")).to_be_hidden()
    one.click("#t-forget")
    expect(other.locator("#t-served")).to_have_text("Waiting for an API key")
    expect(other.locator("#t-key-form")).to_be_visible()


KEPT = "['tidar.api_key', 'tidar.metrics_key'].map((name) => localStorage.getItem(name))"


def test_a_request_without_the_key_does_not_cost_the_key(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.wanted_key = "sk-1"
    held: list[Route] = []
    context.route("**/v1/models", lambda route: held.append(route), times=1)
    with context.expect_event("request", lambda request: request.url.endswith("/v1/models")):
        one = visit(context, recorded.address).page
    other = visit(context, recorded.address).page
    other.fill("#t-key", "sk-1")
    other.press("#t-key", "Enter")
    expect(one.locator("#t-served")).to_contain_text("SmolLM2")
    with one.expect_response(lambda response: response.status == 401):
        held[0].continue_()
    one.wait_for_timeout(200)
    expect(one.locator("#t-key-form")).to_be_hidden()
    expect(one.locator("#t-served")).to_contain_text("SmolLM2")
    expect(other.locator("#t-key-form")).to_be_hidden()
    assert one.evaluate(KEPT) == ["sk-1", None]


def test_a_question_asked_with_the_old_key_does_not_cost_the_new_one(
    context: BrowserContext, recorded: RecordedServer
) -> None:
    recorded.wanted_key = "sk-1"
    one = visit(context, recorded.address).page
    one.fill("#t-key", "sk-1")
    one.press("#t-key", "Enter")
    expect(one.locator("#t-served")).to_contain_text("SmolLM2")
    held: list[Route] = []
    context.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    recorded.play(recording(plain_steps(TOKENS)))
    with one.expect_request("**/v1/chat/completions"):
        ask(one, "Go")
    recorded.wanted_key = "sk-2"
    other = visit(context, recorded.address).page
    expect(one.locator("#t-key-form")).to_be_visible()
    other.fill("#t-key", "sk-2")
    other.press("#t-key", "Enter")
    expect(one.locator("#t-served")).to_contain_text("SmolLM2")
    held[0].continue_()
    expect(one.locator("#t-problem")).to_have_text("This was asked with the key that was here before. Ask again.")
    expect(one.locator("#t-key-form")).to_be_hidden()
    assert one.evaluate(KEPT) == ["sk-2", None]
    one.press("#t-prompt", "Enter")
    one.wait_for_selector(".facts")


def test_all_keys_are_forgotten_together(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.metrics_key = "mk-1"
    page = visit(context, recorded.address).page
    expect(page.locator("#t-forget")).to_be_hidden()
    page.click("#tab-cluster")
    page.fill("#c-key", "mk-1")
    page.press("#c-key", "Enter")
    expect(page.locator("#c-key-form")).to_be_hidden()
    page.click("#tab-chat")
    page.click("#t-forget")
    expect(page.locator("#t-forget")).to_be_hidden()
    assert page.evaluate(KEPT) == [None, None]
    page.evaluate("for (const name of ['api', 'metrics']) localStorage.setItem(`tidar.${name}_key`, 'k')")
    page.reload()
    page.click("#t-forget")
    expect(page.locator("#t-forget")).to_be_hidden()
    assert page.evaluate(KEPT) == [None, None]


@pytest.mark.parametrize("key", ["sk-1\u200b", "sk 1", "ключ", " "])
def test_a_key_that_is_none_is_not_taken(context: BrowserContext, recorded: RecordedServer, key: str) -> None:
    recorded.wanted_key = "sk-1"
    page = visit(context, recorded.address).page
    expect(page.locator("#t-key")).to_be_focused()
    page.fill("#t-key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#t-problem")).to_contain_text("That is no key:")
    expect(page.locator("#t-key")).to_be_focused()
    assert page.evaluate("localStorage.getItem('tidar.api_key')") is None
    page.fill("#t-key", " sk-1 ")
    page.keyboard.press("Enter")
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    expect(page.locator("#t-problem")).to_be_hidden()
    # One that was kept before keys were looked at.
    page.evaluate("key => localStorage.setItem('tidar.api_key', key)", key)
    page.reload()
    expect(page.locator("#t-key")).to_be_focused()
    expect(page.locator("#t-problem")).to_be_hidden()


def refusal(status: int, message: str, **headers: str) -> Recording:
    return Recording(status=status, body={"error": {"message": message, "type": "x"}}, headers=headers)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            refusal(400, "max_tokens is too large:\n <img src=x onerror=alert(1)>"),
            "max_tokens is too large: <img src=x onerror=alert(1)>",
        ),
        (refusal(429, "The server is full.", **{"Retry-After": "3"}), "The server is full. Try again in 3 s."),
        (refusal(503, "Not now.", **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "Not now."),
        (Recording(status=502, body={"detail": "?"}), "The server answered 502 Bad Gateway."),
        (Recording([event({"error": {"message": "The engine\nstopped."}})]), "The engine stopped."),
        (Recording([], end=""), "The connection closed before the answer was complete."),
        (
            Recording(["<!doctype html>Sign in"], end="", media_type="text/html; charset=utf-8"),
            not_the_api("text/html", "text/event-stream"),
        ),
        (Recording(["data: <!doctype html>\n\n"]), UNREADABLE),
        (Recording(["data: null\n\n"]), UNREADABLE),
    ],
)
def test_an_error_is_one_line(context: BrowserContext, recorded: RecordedServer, answer: Recording, line: str) -> None:
    recorded.play(answer)
    opened = visit(context, recorded.address)
    page = opened.page
    ask(page, "Will it?")
    expect(page.locator("#t-problem")).to_have_text(line)
    expect(page.locator("#t-problem")).to_have_attribute("role", "alert")
    expect(page.locator("#t-prompt")).to_have_value("Will it?")
    expect(page.locator(".welcome")).to_be_visible()
    assert page.locator(".answered, #t-problem img").count() == 0
    # And the next question works.
    recorded.play(recording(plain_steps(TOKENS)))
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts")
    expect(page.locator("#t-problem")).to_be_hidden()
    assert opened.dialogs == []


def test_a_question_that_fails_stays_beside_the_next_one(context: BrowserContext, recorded: RecordedServer) -> None:
    page = visit(context, recorded.address).page
    held: list[Route] = []
    context.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    recorded.play(refusal(429, "The server is full."), recording(plain_steps(TOKENS)))
    with page.expect_request("**/v1/chat/completions"):
        ask(page, "The first?")
    page.fill("#t-prompt", "The next")
    held[0].continue_()
    expect(page.locator("#t-problem")).to_have_text("The server is full.")
    expect(page.locator("#t-prompt")).to_have_value("The next")
    assert texts(page.locator(".asked")) == ["The first?"]
    page.get_by_role("button", name="Again, question 1").click()
    expect(page.locator(".facts")).to_contain_text("finished")
    expect(page.locator("#t-prompt")).to_have_value("The next")
    assert texts(page.locator(".asked")) == ["The first?"]


def test_what_is_being_written_is_no_part_of_an_example(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    opened.page.fill("#t-prompt", "My own")
    opened.page.locator(".examples button").first.click()
    opened.page.wait_for_selector(".facts")
    expect(opened.page.locator("#t-prompt")).to_have_value("My own")


SIGN_IN = "<!doctype html>Sign in"


@pytest.mark.parametrize(
    ("sent", "line"), [("text/html", not_the_api("text/html", "application/json")), ("application/json", UNREADABLE)]
)
def test_a_page_in_the_place_of_the_models_is_one_line(
    context: BrowserContext, recorded: RecordedServer, sent: str, line: str
) -> None:
    context.route("**/v1/models", lambda route: route.fulfill(body=SIGN_IN, content_type=sent))
    page = visit(context, recorded.address).page
    expect(page.locator("#t-problem")).to_have_text(line)
    expect(page.locator("#t-served")).to_have_text("No answer from the server")


def test_a_page_in_the_place_of_the_metrics_is_one_line(opened: Visit) -> None:
    opened.page.route("**/metrics", lambda route: route.fulfill(body=SIGN_IN, content_type="text/html"))
    opened.page.click("#tab-cluster")
    expect(opened.page.locator("#c-state")).to_contain_text(not_the_api("text/html", "text/plain"))


CUT = """async ([file]) => {
  const { listModels } = await import(file);
  const own = window.fetch;
  const start = (out) => out.error(new TypeError("network error"));
  const headers = { "Content-Type": "application/json" };
  window.fetch = async () => new Response(new ReadableStream({ start }), { headers });
  return listModels(location.href, "").catch((error) => error.message).finally(() => (window.fetch = own));
}"""


def test_a_list_of_models_that_breaks_off_is_one_line(blank: Page) -> None:
    line = blank.evaluate(CUT, [f"/playground/{read_files().address}/stream.js"])
    assert line == "The connection broke before the answer was complete."


def test_an_error_in_the_middle_keeps_the_text(opened: Visit, recorded: RecordedServer) -> None:
    begun = recording(plain_steps(TOKENS)).events[:3]
    recorded.play(Recording([*begun, event({"error": {"message": "The replica died."}})]))
    ask(opened.page, "Go")
    expect(opened.page.locator("#t-problem")).to_have_text("The replica died.")
    assert TEXT.startswith(shown(opened.page))
    assert shown(opened.page)
    expect(opened.page.locator("[data-badge]")).to_have_text("as far as it came")
    expect(opened.page.locator(".facts")).to_contain_text("broken off")


def test_a_question_that_comes_back_under_another_tab_can_be_read(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording([event({"error": {"message": "The replica died."}})]))
    page = opened.page
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    with page.expect_request("**/v1/chat/completions"):
        ask(page, "Go")
    page.click("#tab-race")
    held[0].continue_()
    expect(page.locator("#t-problem")).to_have_text("The replica died.")
    page.click("#tab-chat")
    expect(page.locator("#t-prompt")).to_have_value("Go")
    assert page.locator("#t-prompt").evaluate("one => one.clientHeight") > 24


def test_an_error_is_closed_by_hand_and_with_its_tab(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording([event({"error": {"message": "The replica died."}})]))
    page = opened.page
    problem = page.locator("#t-problem")
    for leave, then in (("#t-close", "tab-chat"), ("#tab-race", "tab-race")):
        ask(page, "Go")
        expect(problem).to_have_text("The replica died.")
        page.focus(leave)
        page.keyboard.press("Enter")
        expect(problem).to_be_hidden()
        assert page.evaluate("document.activeElement.id") == then


def test_a_model_that_is_served_no_more_is_looked_up_anew(context: BrowserContext, recorded: RecordedServer) -> None:
    page = visit(context, recorded.address).page
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    recorded.model = MODEL | {"id": "recorded/Another"}
    recorded.play(refusal(404, "The model does not exist."), recording(plain_steps(TOKENS)))
    ask(page, "Who is there?")
    expect(page.locator("#t-problem")).to_have_text("The model does not exist.")
    expect(page.locator("#t-served")).to_contain_text("Another")
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts")
    assert recorded.bodies[-1]["model"] == "recorded/Another"


def test_a_model_that_comes_back_is_the_one_that_is_shown(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.others[:] = ["recorded/Second"]
    page = visit(context, recorded.address).page
    page.select_option("#t-model", "recorded/Second")
    for others, shown_name in (([], MODEL["id"]), (["recorded/Second"], "recorded/Second")):
        recorded.others[:] = others
        recorded.play(refusal(404, "The model does not exist."))
        ask(page, "Who is there?")
        expect(page.locator("#t-model option")).to_have_count(1 + len(others))
        expect(page.locator("#t-model")).to_have_value(shown_name)
        expect(page.locator("#t-served")).to_contain_text(shown_name.rpartition("/")[2])
        page.click("#t-close")
    recorded.play(recording(plain_steps(TOKENS)))
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts")
    assert recorded.bodies[-1]["model"] == "recorded/Second"


WAYS = [("chat", "#t-send", "#t-stop"), ("race", "#r-start", "#r-stop"), ("cluster", "#b-start", "#b-stop")]


@pytest.mark.parametrize(("tab", "start", "stop"), WAYS)
def test_who_waits_for_the_models_can_stop(
    context: BrowserContext, recorded: RecordedServer, tab: str, start: str, stop: str
) -> None:
    held: list[Route] = []
    context.route(re.compile(r"/v1/models"), lambda route: held.append(route))
    page = visit(context, recorded.address).page
    page.fill("#t-prompt", "Anyone?")
    page.click(f"#tab-{tab}")
    page.click(start)
    page.click(stop)
    expect(page.locator(start)).to_be_visible()
    assert page.input_value("#t-prompt") == "Anyone?"
    assert recorded.bodies == []
    for route in held:
        route.continue_()
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    assert page.locator("#t-turns > *").count() == 0


def test_another_server_under_the_same_name_is_noticed(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = context.new_page()
    page.clock.install()
    page.goto(f"{recorded.address}/playground/")
    expect(page.locator("#t-served")).to_contain_text("bf16 · cpu · exact")
    recorded.model = MODEL | {"tidar": MODEL["tidar"] | {"exact": False}}
    page.clock.fast_forward(61_000)
    ask(page, "Go")
    expect(page.locator("#t-served")).to_contain_text("bf16 · cpu · not bit-exact")


TWO_SERVERS = """async (file) => {
  const { Server } = await import(file);
  const server = (place) => new Server(new URL(place, location));
  server("/a/").key.keep("sk-a");
  server("/b/").key.keep("");
  return ["/a/", "/b/", "/"].map((place) => server(place).key.value);
}"""


def test_two_servers_of_one_host_have_keys_of_their_own(opened: Visit) -> None:
    file = f"/playground/{read_files().address}/server.js"
    assert opened.page.evaluate(TWO_SERVERS, file) == ["sk-a", "", ""]


@pytest.mark.parametrize(("tab", "start"), [way[:2] for way in WAYS])
def test_a_server_that_comes_back_is_found_again(
    context: BrowserContext, recorded: RecordedServer, tab: str, start: str
) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = visit(context, recorded.address).page
    expect(page.locator("#t-served")).to_have_attribute("data-state", "up")
    page.fill("#t-prompt", "Anyone?")
    page.click(f"#tab-{tab}")
    context.route(re.compile(r"/v1/|/tokenize"), lambda route: route.abort())
    page.click(start)
    expect(page.locator("#t-problem")).to_have_text("The server cannot be reached. Is it still running?")
    expect(page.locator("#t-served")).to_have_text("No answer from the server")
    expect(page.locator("#t-served")).to_have_attribute("data-state", "down")
    context.unroute(re.compile(r"/v1/|/tokenize"))
    recorded.model = MODEL | {"id": "recorded/Another"}
    page.click(start)
    expect(page.locator("#t-served")).to_contain_text("Another")
    expect(page.locator("#t-served")).to_have_attribute("data-state", "up")


def test_a_server_that_is_gone_is_one_line(context: BrowserContext, recorded: RecordedServer) -> None:
    opened = visit(context, recorded.address)
    context.route("**/v1/**", lambda route: route.abort())
    ask(opened.page, "Anyone?")
    expect(opened.page.locator("#t-problem")).to_have_text("The server cannot be reached. Is it still running?")
    expect(opened.page.locator("#t-prompt")).to_have_value("Anyone?")


def test_a_server_that_was_never_there_is_not_waited_for(context: BrowserContext, recorded: RecordedServer) -> None:
    context.route("**/v1/**", lambda route: route.abort())
    page = visit(context, recorded.address).page
    page.fill("#t-prompt", "Anyone?")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-send")).to_be_visible()
    expect(page.locator("#t-problem")).to_have_text("The server cannot be reached. Is it still running?")
    expect(page.locator("#t-status")).to_have_text("")
    expect(page.locator("#t-prompt")).to_have_value("Anyone?")
