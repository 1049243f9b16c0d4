"""Turns of a conversation: asked again, edited, and what the model is told of them."""

from playwright.sync_api import Locator, Page, expect

from tests.playground.asking import TEXT, TOKENS, ask, texts
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, Recording, Step, event, plain_steps, recording

BROKEN = Recording([event({"error": {"message": "The engine stopped."}})])


def anew(page: Page, what: str) -> Locator:
    """The button of a question, by the beginning of its name."""
    return page.get_by_role("button", name=what)


# Once the answer grows: what has the focus, and whether what asks anew is locked.
GROWING = """() => {
  if (!document.querySelector(".answer-text[data-busy] .piece")) return null;
  const locked = (name) => document.querySelector(`[aria-label^="${name}"]`).disabled;
  return [document.activeElement.id, locked("Again, question 1"), locked("Edit, question 2")];
}"""


def test_an_answer_is_asked_for_again_in_its_place(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    for question in ("One?", "Two\nlines?", "Three?"):
        ask(page, question)
        opened.settle()
    page.fill("#t-prompt", "A draft")
    recorded.play(BROKEN)
    anew(page, "Again, question 1").press("Enter")
    expect(page.locator("#t-problem")).to_have_text("The engine stopped.")
    assert texts(page.locator(".asked")) == ["One?", "Two\nlines?", "Three?"], "nothing came, nothing is lost"
    expect(anew(page, "Again, question 1")).to_be_focused()
    page.locator("label:has(> [name=t-drafts][value=off])").click()
    recorded.play(Recording([event({"choices": []}), ""], 60), recording(plain_steps(TOKENS), pause=0.3))
    with page.expect_response("**/v1/chat/completions"):  # stopped before, it might not be among what was asked
        anew(page, "Again, question 2").press("Enter")
    expect(page.locator(".facts")).to_have_count(1)
    page.locator("#t-stop").press("Enter")
    expect(page.locator(".facts")).to_have_count(3)
    anew(page, "Again, question 2: “Two lines?”").press("Enter")
    assert page.wait_for_function(GROWING).json_value() == ["t-stop", True, True]
    opened.settle()
    asked = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": TEXT}]
    assert [body["messages"] for body in recorded.bodies] == [[*asked, {"role": "user", "content": "Two\nlines?"}]] * 2
    assert recorded.bodies[1]["tidar"] == {"trace": True, "drafts": "off"}
    assert texts(page.locator(".asked")) == ["One?", "Two\nlines?"]
    expect(page.locator("#t-send")).to_be_focused()
    expect(page.locator("#t-prompt")).to_have_value("A draft")
    expect(anew(page, "Again, question 2")).to_be_enabled()
    undo = page.get_by_role("button", name="Undo: bring back what this answer took the place of")
    undo.press("Enter")
    assert texts(page.locator(".asked")) == ["One?", "Two\nlines?", "Three?"]
    expect(anew(page, "Again, question 2")).to_be_focused()
    expect(undo).to_have_count(0)
    anew(page, "Again, question 3").click()
    opened.settle()
    expect(undo).to_have_count(1)
    ask(page, "Four?")
    opened.settle()
    expect(undo).to_have_count(0)  # what was asked since builds on it
    assert [message["content"] for message in recorded.bodies[-1]["messages"][::2]] == [
        "One?", "Two\nlines?", "Three?", "Four?"
    ]  # fmt: skip


def test_a_question_is_edited_in_its_place(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS)))
    page = opened.page
    prompt, asked = page.locator("#t-prompt"), page.locator(".asked")
    for question in ("One?", "Two?", "Three?"):
        ask(page, question)
        opened.settle()
    prompt.fill("A draft")
    for leave in ("Escape", "Enter"):
        anew(page, "Edit, question 2").press("Enter")
        expect(prompt).to_be_focused()
        expect(prompt).to_have_value("Two?")
        expect(page.locator("#t-status")).to_have_text("Editing question 2. Sending it replaces all that follows.")
        expect(anew(page, "Again, question 1")).to_be_disabled()
        expect(page.locator("#t-clear")).to_be_hidden()  # not where the hand looks for Cancel
        page.keyboard.type(" Or not?")
        (prompt if leave == "Escape" else page.locator("#t-cancel")).press(leave)
        expect(prompt).to_have_value("A draft")
        expect(anew(page, "Edit, question 2")).to_be_focused()
        expect(page.locator("#t-cancel")).to_be_hidden()
    assert texts(asked) == ["One?", "Two?", "Three?"]
    anew(page, "Edit, question 2").click()
    prompt.fill("Four?")
    recorded.play(BROKEN)
    prompt.press("Enter")
    expect(page.locator("#t-problem")).to_have_text("The engine stopped.")
    expect(prompt).to_have_value("Four?")
    assert texts(asked) == ["One?", "Two?", "Three?"]
    recorded.play(recording(plain_steps(TOKENS)))
    prompt.press("Enter")
    expect(page.locator("#t-status")).to_contain_text("Done")
    assert texts(asked) == ["One?", "Four?"]
    expect(prompt).to_have_value("A draft")
    prompt.press("Enter")
    expect(page.locator(".facts")).to_have_count(3)
    sent = [message["content"] for message in recorded.bodies[-1]["messages"]]
    assert sent == ["One?", TEXT, "Four?", TEXT, "A draft"]
    prompt.fill("line\n" * 60)
    prompt.press("Shift+Tab")
    covered = "one => one.getBoundingClientRect().bottom - document.querySelector('.ask').getBoundingClientRect().top"
    assert page.locator(":focus").evaluate(covered) <= 0, "a high composer hides nothing that has the focus"
    page.click("#t-clear")
    expect(page.locator(".welcome")).to_be_visible()


def test_the_live_card_is_about_the_answer_that_stands(opened: Visit, recorded: RecordedServer) -> None:
    page = opened.page

    def live() -> list[str]:
        return texts(page.locator(".live :is([data-badge], [data-meter], .column-of-step)"))

    page.click("#t-clear")
    nothing = live()
    recorded.play(BROKEN)
    ask(page, "Anyone?")
    expect(page.locator("#t-problem")).to_have_text("The engine stopped.")
    assert live() == nothing
    recorded.play(recording(plain_steps(TOKENS)), recording(plain_steps(TOKENS[:5])), BROKEN)
    page.press("#t-prompt", "Enter")
    opened.settle()
    first = live()
    again = anew(page, "Again, question 1")
    again.click()
    opened.settle()
    expect(again).to_be_enabled()
    second = live()
    assert second != first
    again.click()
    expect(page.locator("#t-problem")).to_have_text("The engine stopped.")
    expect(again).to_be_enabled()
    assert live() == second
    recorded.play(recording(plain_steps(TOKENS[:9])))
    again.click()
    opened.settle()
    page.get_by_role("button", name="Undo").click()
    assert live() == second


def test_what_was_thought_goes_back_as_thoughts(opened: Visit, recorded: RecordedServer) -> None:
    """That was cut, too: an open tag in the text would have the model think on."""
    said = ["<think>\nWhy? <b>\n</think>\n\nYes.\n", "<think>\nHm", "<think>\n\n</think>\n\nNo.", "A </think>"]
    recorded.play(*[recording([Step((), 0, text, text)]) for text in [*said, "End"]])
    for question in range(len(said) + 1):
        ask(opened.page, str(question))
        opened.settle()
    assert recorded.bodies[-1]["messages"][1::2] == [
        {"role": "assistant", "content": "Yes.\n", "reasoning_content": "Why? <b>"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "A </think>"},
    ]
