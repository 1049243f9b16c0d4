"""The page in a real Chromium, fed recordings: what is drawn, what is sent, and what goes wrong well."""

import json
import time

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.playground.conftest import Visit, visit
from tests.playground.recorded import RecordedServer, Recording, Step, event, plain_steps, recording

TOKENS = [
    "The",
    " quick",
    " brown",
    " fox",
    " jumps",
    " over",
    " the",
    " lazy",
    " dog",
    ".\n",
    "So",
    " it",
    " does",
    ".",
]
TEXT = "".join(TOKENS)

MARKUP = ["<img src=x onerror=alert(1)>", "${alert(1)}", "{{7*7}}", "<script>alert(1)</script>", "</div><h1>big</h1>"]
HOSTILE = [*MARKUP, "\u202eright to left", "`\\u0041${1+1}`", "\x00\x1b[31m", "a" * 10_000, "👩‍👩‍👧"]


BEGUN = """before => document.querySelectorAll('.answer-text').length > before
  || !document.querySelector('#t-problem').hidden"""


def ask(page: Page, text: str) -> None:
    """Send a prompt, and wait until the page has taken it: an answer has begun, or the page says why not."""
    before = page.locator(".answer-text").count()
    page.fill("#t-prompt", text)
    page.press("#t-prompt", "Enter")
    page.wait_for_function(BEGUN, arg=before)


def shown(page: Page, turn: int = -1) -> str:
    """The text of an answer, without the ghosts."""
    pieces = page.locator(".answer-text").nth(turn).locator(".piece")
    return "".join(pieces.evaluate_all("all => all.map(piece => piece.textContent)"))


def texts(found: Locator) -> list[str]:
    return found.evaluate_all("all => all.map(one => one.textContent)")


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


def look(mark: Locator) -> tuple[str, str]:
    """The hue of a mark, and its second cue."""
    style = mark.evaluate("one => ({ ...getComputedStyle(one) })")
    return style["textDecorationColor"], f"{style['textDecorationLine']} {style['textDecorationStyle']}"


def test_what_is_sent(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    page.fill("#t-max", "33")
    page.fill("#t-temperature", "0.7")
    page.fill("#t-seed", "18446744073709551615")
    page.fill("#t-system", "Be brief.")
    page.locator("label:has(> [value=off])").click()
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
    expect(page.locator("[data-meter=steps]")).to_have_text("77")
    expect(page.locator("[data-meter=perStep]")).to_have_text("3.21")
    expect(page.locator("[data-meter=acceptance]")).to_have_text("12 %")
    expect(page.locator("[data-badge]")).to_have_text("counted by the server")
    expect(page.locator(".facts")).to_contain_text("14 tokens")
    page.locator(".facts .link").click()
    expect(page.locator("#t-seed")).to_have_value("18446744073709551615")  # more than a JavaScript number holds


def test_numbers_move_while_the_answer_grows(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 8), pause=0.04))
    ask(opened.page, "Go")
    page = opened.page
    page.wait_for_function("Number(document.querySelector('[data-meter=steps]').textContent) >= 3")
    expect(page.locator("[data-badge]")).to_have_text("measuring")
    expect(page.locator("#t-status")).to_have_text("Answering…")
    early = {
        name: page.locator(f"[data-meter={name}]").text_content() for name in ("perSecond", "perStep", "acceptance")
    }
    assert "–" not in early.values()
    assert page.locator(".column-of-step").count() >= 3
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
    recorded.play(recording(plain_steps(TOKENS * 40), pause=0.03))
    page = opened.page
    ask(page, "Go")
    page.wait_for_selector(".piece.held")
    page.click("#t-stop")
    assert recorded.cancelled.wait(5), "the server saw the client go"
    expect(page.locator("#t-send")).to_be_visible()
    expect(page.locator("#t-status")).to_have_text("Stopped.")
    so_far = shown(page)
    assert so_far
    assert (TEXT * 40).startswith(so_far)
    recorded.play(recording(plain_steps(TOKENS)))
    ask(page, "And?")
    opened.settle()
    assert recorded.bodies[0]["messages"][1]["content"] == so_far


def test_clear_and_a_closed_page_close_the_stream(chromium: Browser, opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 40), pause=0.03))
    ask(opened.page, "Go")
    opened.page.wait_for_selector(".piece.held")
    opened.page.click("#t-clear")
    assert recorded.cancelled.wait(5)
    recorded.cancelled.clear()
    ask(opened.page, "Again")
    opened.page.wait_for_selector(".piece.held")
    opened.page.close()
    assert recorded.cancelled.wait(5)


@pytest.mark.parametrize("cut", [1, 3])
def test_hostile_text_is_text(opened: Visit, recorded: RecordedServer, cut: int) -> None:
    """Whole, and cut into tokens so that no token is markup by itself; as held drafts, own tokens and ghosts."""
    text = " ".join(HOSTILE)
    tokens = [text[at : at + cut * 20] for at in range(0, len(text), cut * 20)] if cut > 1 else HOSTILE
    recorded.play(recording(plain_steps(tokens, wrong=MARKUP[0] + MARKUP[1] + MARKUP[2])))
    page = opened.page
    page.locator("label:has(> [value=keep])").click()
    asked = "\n".join(HOSTILE[:6])
    ask(page, asked)
    opened.settle()
    page.hover(".answer-text .piece >> nth=1")
    page.keyboard.press("Tab")
    assert shown(page) == "".join(tokens)
    assert page.locator(".asked").text_content() == asked
    for place in (".asked", ".answered", "#t-hint"):
        assert page.locator(f"{place} :is(img, script, h1, a, iframe, style)").count() == 0
    assert MARKUP[0] in texts(page.locator(".answer-text .ghost"))[0]
    assert overflow(page) <= 0


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_characters_cut_in_two_wait_for_their_rest(opened: Visit, recorded: RecordedServer) -> None:
    steps = [
        Step((), 0, "\ufffd", ""),
        Step(("\ufffd", " x"), 1, "\ufffd", "😀"),
        Step((), 0, "!", "!"),
        Step(("", ""), 2, "漢", "漢"),
        Step((), 0, "\ufffd", ""),  # never whole: the server ends the text with the sign for it
    ]
    answer = recording(steps)
    tail = event({"choices": [{"index": 0, "delta": {"content": "\ufffd"}, "finish_reason": "length"}]})
    recorded.play(Recording([*answer.events[:-1], tail, answer.events[-1]]))
    ask(opened.page, "Go")
    opened.settle()
    assert texts(opened.page.locator(".answer-text .piece")) == ["😀", "!", "漢", "\ufffd"]


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


def test_ghosts_fade_stay_or_hide(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    ask(page, "Go")
    opened.settle()
    ghosts = page.locator(".answer-text .ghosts")
    expect(ghosts.first).to_be_visible()
    assert ghosts.first.get_attribute("aria-hidden") == "true"
    expect(ghosts.first).to_be_hidden(timeout=5000)
    assert page.locator(".answer-text .ghosts.gone").count() == ghosts.count()
    page.locator("label:has(> [value=keep])").click()
    expect(ghosts.first).to_be_visible()
    page.locator("label:has(> [value=hide])").click()
    expect(ghosts.first).to_be_hidden()
    page.locator(".switch").click()
    assert look(page.locator(".answer-text .held .ink").first)[1].startswith("none")


def test_tokens_tell_about_themselves(opened: Visit, recorded: RecordedServer) -> None:
    steps = [Step((), 0, "The", "The"), Step((" quick", " red"), 1, " brown", " quick brown")]
    recorded.play(recording(steps))
    page = opened.page
    page.locator("label:has(> [value=keep])").click()
    ask(page, "Go")
    opened.settle()
    hint = page.locator("#t-hint")
    page.hover(".answer-text .held .ink")
    expect(hint).to_contain_text("Draft that held")
    expect(hint).to_contain_text("step 1 · place 1 in the block · 120 ms · token 1000 · replica r1")
    page.hover(".answer-text .ghost")
    expect(hint).to_contain_text("The model said “ brown” instead.")
    page.mouse.move(5, 5)
    expect(hint).to_be_hidden()

    page.locator(".answer-text").focus()
    heard = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "End", "Home"):
        page.keyboard.press(key)
        heard.append(hint.locator(".hint-title").text_content())
    held, own, rejected = "Draft that held", "Said by the model itself", "Rejected draft"
    assert heard == [own, held, rejected, own, own]
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "t-hint"
    page.keyboard.press("Escape")
    expect(hint).to_be_hidden()


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
        (Recording(status=502, body={"detail": "?"}), "The server answered 502 Bad Gateway."),
        (Recording([event({"error": {"message": "The engine\nstopped."}})]), "The engine stopped."),
        (Recording([], end=""), "The connection closed before the answer was complete."),
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


def test_an_error_in_the_middle_keeps_the_text(opened: Visit, recorded: RecordedServer) -> None:
    begun = recording(plain_steps(TOKENS)).events[:3]
    recorded.play(Recording([*begun, event({"error": {"message": "The replica died."}})]))
    ask(opened.page, "Go")
    expect(opened.page.locator("#t-problem")).to_have_text("The replica died.")
    assert TEXT.startswith(shown(opened.page))
    assert shown(opened.page)
    expect(opened.page.locator("[data-badge]")).to_have_text("as far as it came")


def test_a_server_that_is_gone_is_one_line(context: BrowserContext, recorded: RecordedServer) -> None:
    opened = visit(context, recorded.address)
    context.route("**/v1/**", lambda route: route.abort())
    ask(opened.page, "Anyone?")
    expect(opened.page.locator("#t-problem")).to_have_text("The server cannot be reached. Is it still running?")
    expect(opened.page.locator("#t-prompt")).to_have_value("Anyone?")


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


CONTRAST = """(selector) => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const ground = (one) => {
    if (!one) return [255, 255, 255, 1];
    return over(parse(getComputedStyle(one).backgroundColor), ground(one.parentElement));
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  return [...document.querySelectorAll(selector)]
    .filter((one) => one.checkVisibility() && one.textContent.trim())
    .map((one) => {
      const style = getComputedStyle(one);
      const under = ground(one);
      return [one.textContent.slice(0, 30), ratio(over(parse(style.color), under), under),
              ratio(over(parse(style.textDecorationColor), under), under)];
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844), (320, 640)])
def test_every_window_in_light_and_dark(
    chromium: Browser, recorded: RecordedServer, scheme: str, size: tuple[int, int]
) -> None:
    recorded.play(recording(plain_steps(TOKENS * 6)))
    context = chromium.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})  # type: ignore[arg-type]
    opened = visit(context, recorded.address)
    page = opened.page
    assert overflow(page) <= 0
    page.locator("label:has(> [value=keep])").evaluate("one => one.click()")
    ask(page, "A question that is long enough to need a second line on a telephone, and says so.")
    opened.settle()
    assert overflow(page) <= 0
    expect(page.locator("#t-prompt")).to_be_in_viewport()
    expect(page.locator("#t-send")).to_be_in_viewport()
    measured = page.evaluate(
        CONTRAST, ".tidar :is(p, dt, dd, b, label, legend, button, .ink, .ghost, .asked, .fact, .means)"
    )
    assert len(measured) > 20
    assert [(text, ratio) for text, ratio, _ in measured if ratio < 4.5] == []
    marks = page.evaluate(CONTRAST, ".answer-text :is(.held .ink, .own .ink, .ghost)")
    assert [(text, ratio) for text, _, ratio in marks if ratio < 3] == []
    assert opened.complaints == []
    context.close()


def test_the_theme_can_be_chosen_and_is_kept(opened: Visit) -> None:
    page = opened.page
    theme = "document.documentElement.dataset.theme"
    button = page.locator("#t-theme")
    seen = []
    for _ in range(3):
        button.click()
        seen.append((button.get_attribute("aria-label"), page.evaluate(theme)))
    assert seen == [("Colours: light", "light"), ("Colours: dark", "dark"), ("Colours: as the system", "light")]
    button.click()
    button.click()
    page.reload()
    page.wait_for_selector("#t-prompt")
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="dark")
    button.click()
    assert page.evaluate(theme) == "dark", "as the system, which is dark now"


def test_less_motion_where_it_is_wished(chromium: Browser, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS), pause=0.05))
    context = chromium.new_context(reduced_motion="reduce")
    opened = visit(context, recorded.address)
    ask(opened.page, "Go")
    opened.page.wait_for_selector(".answer-text .ghosts", state="attached")
    running = "document.getAnimations({ subtree: true }).filter((one) => one.playState === 'running').length"
    assert opened.page.evaluate(running) == 0
    context.close()


FRAMES = """() => {
  window.frames_seen = 0;
  const next = () => { window.frames_seen += 1; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""


def test_a_thousand_tokens_a_second_stay_smooth(opened: Visit, recorded: RecordedServer) -> None:
    steps = plain_steps(TOKENS * 200)  # 2,800 tokens
    tokens = sum(step.accepted + 1 for step in steps)
    recorded.play(recording(steps, pause=len(TOKENS) * 200 / 1000 / len(steps)))
    page = opened.page
    page.evaluate(FRAMES)
    begun, frames = time.monotonic(), page.evaluate("window.frames_seen")
    ask(page, "Go")
    opened.settle()
    took = time.monotonic() - begun
    drawn = (page.evaluate("window.frames_seen") - frames) / took
    assert shown(page) == TEXT * 200
    print(f"{tokens / took:.0f} tokens/s at {drawn:.0f} frames/s")
    assert tokens / took > 700, "the page kept up with the stream"
    assert drawn > 20
    latest = page.locator(".answer-text .line").last
    expect(latest).to_be_in_viewport()


def test_readers_who_scroll_up_stay_there(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 60), pause=0.01))
    page = opened.page
    ask(page, "Go")
    page.wait_for_function("document.scrollingElement.scrollTop > 300")
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -250)
    page.wait_for_timeout(150)
    place = page.evaluate("document.scrollingElement.scrollTop")
    page.wait_for_timeout(400)
    assert page.evaluate("document.scrollingElement.scrollTop") == place
    opened.settle()
