"""The chat in a real Chromium, fed recordings: what is drawn, what is sent, and what a token tells of itself."""

import json

from playwright.sync_api import Browser, BrowserContext, Route, expect

from tests.playground.asking import TEXT, TOKENS, ask, look, shown, texts
from tests.playground.conftest import Visit, visit
from tests.playground.recorded import MODEL, RecordedServer, Recording, Step, event, plain_steps, recording


def test_the_page_names_the_model_and_itself(opened: Visit) -> None:
    page = opened.page
    expect(page.locator("#t-served")).to_have_text("SmolLM2-135M-Instruct · bf16 · cpu · exact")
    expect(page).to_have_title("TiDAR playground")
    expect(page.locator("#t-prompt")).to_be_focused()
    assert page.evaluate("document.querySelector('link[rel=icon]').href").endswith("icon.svg")


def test_an_answer_is_told_apart(opened: Visit, recorded: RecordedServer) -> None:
    steps = [
        Step((), 0, "The", "The"),
        Step((" quick", " red", " fox"), 1, " brown", " quick brown"),
        Step((" fox", " jumps"), 2, ".", " fox jumps."),
    ]
    recorded.play(recording(steps))
    ask(opened.page, "Go on")
    opened.settle()
    page = opened.page
    assert shown(page) == "The quick brown fox jumps."
    assert texts(page.locator(".answer-text .piece.own")) == ["The", " brown", "."]
    assert texts(page.locator(".answer-text .piece.held")) == [" quick", " fox", " jumps"]
    assert texts(page.locator(".answer-text .ghost")) == [" red", " fox"]
    order = texts(page.locator(".answer-text :is(.piece, .ghost)"))
    assert order == ["The", " quick", " red", " fox", " brown", " fox", " jumps", "."], (
        "ghosts stand before what was said"
    )
    looks = [look(page.locator(".answer-text " + one).first) for one in (".held .ink", ".own.ink", ".ghost")]
    assert len({colour for colour, _ in looks}) == 3
    assert [line for _, line in looks] == ["underline solid", "underline dotted", "line-through solid"]


def test_what_the_page_shows_of_sampling_is_what_is_used(context: BrowserContext, recorded: RecordedServer) -> None:
    """Where the model's makers state something, too."""
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05}
    recorded.model = MODEL | {"tidar": {**MODEL["tidar"], "sampling_defaults": wanted}}
    recorded.play(recording(plain_steps(TOKENS)))
    page = visit(context, recorded.address).page
    expect(page.locator("#t-top-k")).to_have_attribute("placeholder", "20")
    expect(page.locator("#t-makers")).to_have_text("Also as the model's makers want it: repetition penalty 1.05.")
    for typed in ("", "0", "7"):
        page.fill("#t-top-k", typed)
        ask(page, "Go on")
        expect(page.locator("#t-send")).to_be_visible()
    assert [body["top_k"] for body in recorded.bodies] == [20, 0, 7]
    assert {(body["temperature"], body["top_p"]) for body in recorded.bodies} == {(0, 1)}
    assert not any({"min_p", "repetition_penalty"} & set(body) for body in recorded.bodies), "the note is about them"


def test_a_model_whose_makers_say_nothing_has_no_note(opened: Visit) -> None:
    expect(opened.page.locator("#t-top-k")).to_have_attribute("placeholder", "off")
    expect(opened.page.locator("#t-makers")).to_be_hidden()


def test_what_is_sent(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    page.fill("#t-max", "33")
    page.fill("#t-temperature", "0.7")
    page.fill("#t-seed", "18446744073709551615")
    page.fill("#t-system", "Be brief.")
    page.locator("label:has(> [name=t-drafts][value=off])").click()
    expect(page.locator("#t-block")).to_be_disabled()
    page.fill("#t-prompt", "First line")
    page.press("#t-prompt", "Shift+Enter")
    page.keyboard.type("second line")
    page.press("#t-prompt", "Enter")
    opened.settle()
    (body,) = recorded.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First line\nsecond line"},
    ]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (33, 0.7, 2**64 - 1)
    assert body["tidar"] == {"trace": True, "drafts": "off"}
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "recorded/SmolLM2-135M-Instruct"


def test_at_its_maximum_the_server_says_how_many_tokens_there_is_room_for(
    opened: Visit, recorded: RecordedServer
) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    for tokens in (MODEL["max_model_len"] - 1, MODEL["max_model_len"]):
        opened.page.fill("#t-max", str(tokens))
        ask(opened.page, "Go")
        opened.settle()
    assert [body.get("max_tokens") for body in recorded.bodies] == [8191, None]


def test_numbers_at_the_end_are_the_servers(opened: Visit, recorded: RecordedServer) -> None:
    answer = recording(plain_steps(TOKENS))
    last = json.loads(answer.events[-1].removeprefix("data: "))
    last["metrics"]["tidar"] |= {"decode_steps": 77, "tokens_per_step": 3.21}
    last["metrics"]["speculative_decoding"]["draft_acceptance_rate"] = 0.123
    recorded.play(Recording([*answer.events[:-1], event(last)]))
    page = opened.page
    page.fill("#t-temperature", "1")
    ask(page, "Go")
    opened.settle()
    expect(page.locator(".live [data-meter=steps]")).to_have_text("77")
    expect(page.locator(".live [data-meter=perStep]")).to_have_text("3.21")
    expect(page.locator(".live [data-meter=acceptance]")).to_have_text("12 %")
    expect(page.locator("[data-badge]")).to_have_text("counted by the server, timed here")
    expect(page.locator(".facts")).to_contain_text("14 tokens")
    page.get_by_title("Use this seed again").click()
    expect(page.locator("#t-seed")).to_have_value("18446744073709551615")  # more than a JavaScript number holds


def test_tokens_per_step_are_said_in_words(opened: Visit, recorded: RecordedServer) -> None:
    steps = plain_steps(TOKENS)
    recorded.play(recording(steps))
    page = opened.page
    words = page.locator(".live .in-words")
    expect(words).to_have_text("")
    ask(page, "Go")
    opened.settle()
    expect(words).to_have_text(f"13 tokens in {len(steps) - 1} steps")  # the first token is read off the prompt
    page.click("#t-clear")
    expect(words).to_have_text("")


def test_an_answer_that_another_replica_carried_on_says_so(opened: Visit, recorded: RecordedServer) -> None:
    answer = recording(plain_steps(TOKENS))
    moved = [one.replace('"replica": "r1"', '"replica": "<b>2</b>"') for one in answer.events[3:]]
    recorded.play(answer, Recording([*answer.events[:3], *moved]))
    page = opened.page
    for question in ("One?", "Two?"):
        ask(page, question)
        opened.settle()
    facts = page.locator(".facts")
    expect(facts.last).to_contain_text("carried on by replica <b>2</b>")
    expect(facts.first).not_to_contain_text("carried on")


def test_an_answer_of_full_drafts_leads_to_the_race(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    ask(page, "How\nquick?")
    opened.settle()
    page.click("#tab-race")
    page.locator("label:has(> [name=r-drafts][value=full])").click()
    page.click("#tab-chat")
    page.get_by_role("button", name="Race it").click()
    expect(page.locator("#r-prompt")).to_have_value("How\nquick?")
    expect(page.locator("[name=r-drafts][value=auto]")).to_be_checked()
    expect(page.locator("#r-start")).to_be_focused()
    assert len(recorded.bodies) == 1, "it is started by hand"
    page.click("#tab-chat")
    page.locator("label:has(> [name=t-drafts][value=auto])").click()
    ask(page, "And?")
    opened.settle()
    expect(page.get_by_role("button", name="Race it")).to_have_count(1)


def test_what_drafts_change_is_what_the_server_says(context: BrowserContext, recorded: RecordedServer) -> None:
    page = visit(context, recorded.address).page
    note = page.locator("#t-drafts-note")
    expect(note).to_have_text("They change the speed, never the text.")
    recorded.model = MODEL | {"tidar": {**MODEL["tidar"], "exact": False}}
    page.reload()
    expect(note).to_have_text("They change the speed; the text only where two scores nearly tie.")


# What the page says of an answer, once three steps are counted and every number is known.
MOVING = """() => {
  const text = (selector) => document.querySelector(selector).textContent;
  const [steps, ...others] = ["steps", "perSecond", "perStep", "acceptance"].map(
    (name) => text(`.live [data-meter=${name}]`),
  );
  if (Number(steps) < 3 || others.includes("–")) return null;
  return [text("[data-badge]"), text("#t-status"), document.querySelectorAll(".column-of-step").length >= 3];
}"""


def test_numbers_move_while_the_answer_grows(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 8), pause=0.1))
    ask(opened.page, "Go")
    page = opened.page
    # All of it in one look: the answer grows on.
    assert page.wait_for_function(MOVING).json_value() == ["measuring", "Answering…", True]
    opened.settle()
    expect(page.locator("#t-status")).to_contain_text("Done: 112 tokens")


def test_turns_follow_one_another_and_clear_ends_them(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    for question in ("One?", "Two?"):
        ask(page, question)
        opened.settle()
    assert recorded.bodies[1]["messages"] == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "Two?"},
    ]
    assert texts(page.locator(".asked")) == ["One?", "Two?"]
    page.click("#t-clear")
    expect(page.locator(".welcome")).to_be_visible()
    assert page.locator(".asked, .answered").count() == 0
    page.locator(".examples button").first.click()
    page.wait_for_selector(".facts")
    assert len(recorded.bodies[2]["messages"]) == 1


def test_stop_closes_the_stream_and_keeps_the_text(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 200), pause=0.03))
    page = opened.page
    ask(page, "Go")
    page.wait_for_selector(".piece.held")
    page.click("#t-stop")
    assert recorded.cancelled.wait(30), "the server saw the client go"
    expect(page.locator("#t-send")).to_be_visible()
    expect(page.locator("#t-status")).to_have_text("Stopped.")
    so_far = shown(page)
    assert so_far
    assert (TEXT * 200).startswith(so_far)
    recorded.play(recording(plain_steps(TOKENS)))
    ask(page, "And?")
    opened.settle()
    assert recorded.bodies[0]["messages"][1]["content"] == so_far


def test_a_stop_before_the_first_token_has_nothing_to_tell(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording([event({"choices": []}), ""], 60))
    page = opened.page
    ask(page, "Go")
    page.click("#t-stop")
    expect(page.locator(".facts")).to_have_text("stopped by youUndoAgainLook insideCopy")
    expect(page.locator(".facts button:visible")).to_have_text(["Again"])


def test_clear_and_a_closed_page_close_the_stream(chromium: Browser, opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 200), pause=0.03))
    ask(opened.page, "Go")
    opened.page.wait_for_selector(".piece.held")
    opened.page.click("#t-clear")
    assert recorded.cancelled.wait(30)
    recorded.cancelled.clear()
    ask(opened.page, "Again")
    opened.page.wait_for_selector(".piece.held")
    opened.page.close()
    assert recorded.cancelled.wait(30)


COPIED = """() => {
  const data = new DataTransfer();
  const copy = new ClipboardEvent("copy", { clipboardData: data, bubbles: true, cancelable: true });
  getSelection().anchorNode.dispatchEvent(copy);
  return data.getData("text/plain");
}"""


def test_lines_and_code(opened: Visit, recorded: RecordedServer) -> None:
    tokens = ["So", ":\n", "``", "`py\n", "  x", " =", " 1\n", "```\n", "Done", ".\n\n", "End"]
    recorded.play(recording(plain_steps(tokens)))
    ask(opened.page, "Go")
    opened.settle()
    assert shown(opened.page) == "".join(tokens)
    lines = opened.page.locator(".answer-text .line").evaluate_all("all => all.map(one => one.className)")
    assert lines == ["line", "line code", "line code", "line code", "line", "line"]
    opened.page.locator(".answer-text").evaluate("one => getSelection().selectAllChildren(one)")
    assert opened.page.evaluate(COPIED) == "".join(tokens), "no ghosts, and no line end twice"


# Notes how the first ghosts are as they come: they are gone a moment later.
FIRST_GHOSTS = """() => {
  const note = (_, observer) => {
    const ghosts = document.querySelector("#t-turns .ghosts");
    if (!ghosts) return;
    window.first_ghosts = [ghosts.checkVisibility(), ghosts.getAttribute("aria-hidden")];
    observer.disconnect();
  };
  new MutationObserver(note).observe(document.querySelector("#t-turns"), { childList: true, subtree: true });
}"""


def test_ghosts_fade_stay_or_hide(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    page.evaluate(FIRST_GHOSTS)
    ask(page, "Go")
    opened.settle()
    assert page.evaluate("window.first_ghosts") == [True, "true"]
    ghosts = page.locator(".answer-text .ghosts")
    expect(ghosts.first).to_be_hidden()
    expect(page.locator(".answer-text .ghosts:not(.gone)")).to_have_count(0)
    page.locator("label:has(> [value=keep])").click()
    expect(ghosts.first).to_be_visible()
    page.locator("label:has(> [value=hide])").click()
    expect(ghosts.first).to_be_hidden()
    page.locator(".switch:has(#t-marks)").click()
    assert look(page.locator(".answer-text .held .ink").first)[1].startswith("none")


def test_an_example_by_the_keyboard(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    page.focus(".examples button")
    with page.expect_request("**/v1/chat/completions"):
        for _ in range(3):
            page.keyboard.down("Enter")  # held down: the button that comes is not pressed by it
        page.keyboard.up("Enter")
    expect(page.locator("#t-stop")).to_be_focused()
    held[0].continue_()
    expect(page.locator(".facts")).to_contain_text("finished")
    expect(page.locator("#t-send")).to_be_focused()


def test_wrong_settings_are_pointed_at(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    page.fill("#t-max", "0")
    page.fill("#t-prompt", "Go")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-max")).to_be_focused()
    page.fill("#t-max", "10")
    page.fill("#t-seed", "abc")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-seed")).to_be_focused()
    assert recorded.bodies == []


# Where the page stands once it is away from its end, and in the same place at two looks.
SETTLED = """async () => {
  const page = document.scrollingElement;
  for (let before = -1, looks = 0; looks < 100; before = page.scrollTop, looks++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    const below = page.scrollHeight - page.clientHeight - page.scrollTop;
    if (page.scrollTop === before && below > 100) return before;
  }
}"""


def test_readers_who_scroll_up_stay_there(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 60), pause=0.01))
    page = opened.page
    ask(page, "Go")
    page.wait_for_function("document.scrollingElement.scrollTop > 300")
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -250)
    place = page.evaluate(SETTLED)  # the wheel is not waited for
    page.wait_for_timeout(400)
    assert page.evaluate("document.scrollingElement.scrollTop") == place
    opened.settle()


def test_each_tab_is_found_where_it_was_left(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 30)))
    page = opened.page
    ask(page, "Go")
    opened.settle()
    page.evaluate("scrollTo(0, 150)")
    for tab in ("race", "chat"):
        page.dispatch_event(f"#tab-{tab}", "click")  # a hand would scroll to it first
    assert page.evaluate("scrollY") == 150
    page.get_by_role("button", name="Look inside").first.dispatch_event("click")
    expect(page.locator("#panel-hood")).to_be_visible()
    assert page.evaluate("scrollY") == 0, "what is new there begins at its top"


def test_an_answer_is_followed_that_grew_under_another_tab(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 200), pause=0.02))
    page = opened.page
    ask(page, "Go")
    page.wait_for_function("document.scrollingElement.scrollTop > 300")
    page.dispatch_event("#tab-race", "click")
    page.evaluate("scrollTo(0, 0)")
    page.dispatch_event("#tab-chat", "click")
    place = page.evaluate("document.scrollingElement.scrollTop")
    page.wait_for_function("place => document.scrollingElement.scrollTop > place + 300", arg=place)
    page.dispatch_event("#t-stop", "click")
    opened.settle()
    assert page.evaluate(BELOW) < 120


BELOW = """(() => {
  const page = document.scrollingElement;
  return page.scrollHeight - page.clientHeight - page.scrollTop;
})()"""
