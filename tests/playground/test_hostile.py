"""Text that would be markup, a template or a trap anywhere else: on this page it is text."""

import pytest

from tests.playground.asking import HOSTILE, MARKUP, ask, overflow, shown, texts
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, Recording, Step, event, plain_steps, recording


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
