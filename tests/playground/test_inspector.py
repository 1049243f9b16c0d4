"""Tokens that tell about themselves: under the pointer, and walked through with the arrow keys."""

from playwright.sync_api import expect

from tests.playground.asking import TOKENS, ask
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, Step, plain_steps, recording, token_id


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
    expect(hint).to_contain_text(f"step 1 · place 1 in the block · 120 ms · token {token_id(' quick')} · replica r1")
    page.hover(".answer-text .ghost")
    expect(hint).to_contain_text("The model said “ brown” instead.")
    page.mouse.move(5, 5)
    expect(hint).to_be_hidden()

    page.locator(".answer-text").focus()
    heard, silent = [], []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "End", "Home"):
        page.keyboard.press(key)
        heard.append(hint.locator(".hint-title").text_content())
        silent.append(page.locator(".ghosts[aria-hidden]").count() == 1)
    held, own, rejected = "Draft that held", "Said by the model itself", "Rejected draft"
    assert heard == [own, held, rejected, own, own]
    assert silent == [True, True, False, True, True], "a rejected draft is told to whoever walks to it alone"
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "t-hint"
    page.keyboard.press("Escape")
    expect(hint).to_be_hidden()


def test_a_hint_is_put_away_wherever_the_keyboard_is(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    ask(page, "Go")
    opened.settle()
    page.hover(".answer-text .piece")
    expect(page.locator("#t-hint")).to_be_visible()
    page.focus("#t-prompt")
    page.keyboard.press("Escape")
    expect(page.locator("#t-hint")).to_be_hidden()


def test_a_rejected_draft_has_no_say_in_where_a_line_begins(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording([Step((), 0, "- ", "- "), Step(("The", " end"), 0, "שלום", "שלום")]))
    page = opened.page
    page.locator("label:has(> [value=keep])").click()
    ask(page, "Go")
    opened.settle()
    ghosts, line = page.locator(".answer-text .ghosts"), page.locator(".answer-text .line")
    assert ghosts.text_content() == "The end"
    assert [one.evaluate("one => getComputedStyle(one).direction") for one in (line, ghosts)] == ["rtl", "ltr"]
    page.locator(".answer-text").focus()
    walked = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        walked.append((page.evaluate("document.activeElement.textContent"), ghosts.get_attribute("aria-hidden")))
    assert walked == [("- ", "true"), ("The", None), (" end", None), ("שלום", "true")]


def test_a_key_asks_for_the_place_of_few_tokens(opened: Visit, recorded: RecordedServer) -> None:
    """A long answer has thousands, and a keyboard repeats a key thirty times a second."""
    recorded.play(recording(plain_steps(TOKENS * 20)))
    page = opened.page
    ask(page, "Go")
    opened.settle()
    expect(page.locator(".ghosts:not(.gone)")).to_have_count(0)
    page.locator(".answer-text").focus()
    page.evaluate(COUNT_PLACES)
    seen = []
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        seen.append(page.evaluate("document.activeElement.textContent"))
    assert seen == [".", " does", " it", " does", ".", ".", "The", "The"]
    assert page.evaluate("window.places_asked_for") < 100


COUNT_PLACES = """() => {
  window.places_asked_for = 0;
  const own = Element.prototype.getClientRects;
  Element.prototype.getClientRects = function () {
    window.places_asked_for += 1;
    return own.call(this);
  };
}"""


def test_a_token_that_is_walked_to_is_not_behind_the_composer(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 30)))
    page = opened.page
    ask(page, "Go")
    opened.settle()
    page.evaluate("scrollTo(0, 0)")
    page.locator(".answer-text").focus()
    page.keyboard.press("End")
    expect(page.locator(".inspected")).to_be_in_viewport()
    assert page.evaluate(ROOM) >= 0


ROOM = """() => {
  const place = (selector) => document.querySelector(selector).getBoundingClientRect();
  return place(".composer").top - place(".inspected").bottom;
}"""
