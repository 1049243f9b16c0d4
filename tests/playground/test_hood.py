"""Under the hood: the figures of a recorded answer, its steps one by one, and traces as files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from playground.files import read_files
from tests.playground.asking import TOKENS, ask, overflow, past, texts
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, Recording, Step, event, plain_steps, recording

STEPS = [
    Step((), 0, "The", "The"),
    Step((" quick", " red", " fox"), 1, " brown", " quick brown"),
    Step((" fox", " jumps"), 2, " over", " fox jumps over"),
    Step((" a",), 0, " the", " the"),
]


def shaped(answer: Recording) -> Recording:
    """The steps of `STEPS` with proposals: step 1 drafts for all outcomes, the second of which comes true."""
    events = [json.loads(one.removeprefix("data: ")) for one in answer.events]
    events[1]["tidar"] |= {"proposals": [{"a": a} for a in (1, 2, 3, 4)], "used": 2, "rows": {"verify": 4, "mask": 16}}
    return Recording([event(one) for one in events])


def inside(opened: Visit, recorded: RecordedServer, answer: Recording) -> Page:
    """Ask in the chat, then look inside the answer."""
    recorded.play(answer)
    ask(opened.page, "Go on")
    opened.settle()
    opened.page.get_by_role("button", name="Look inside").first.click()
    return opened.page


def bars(page: Page, chart: str) -> list[list[str]]:
    found = page.locator(f"[data-chart={chart}] li")
    return found.evaluate_all(
        "all => all.map(one => [...one.querySelectorAll('.bar-label, .bar-value')].map(part => part.textContent))"
    )


def cells(page: Page, row: str) -> list[list[str]]:
    """(kind, text) of the cells of a row of the figure that hold something."""
    found = page.locator(f".step-figure tr.{row} td:not(.none)")
    return found.evaluate_all("all => all.map(one => [one.className, one.textContent])")


def test_numbers_of_an_answer(opened: Visit, recorded: RecordedServer) -> None:
    page = inside(opened, recorded, shaped(recording(STEPS)))
    assert bars(page, "acceptance") == [
        ["draft 1", "67 % · 2 of 3"],
        ["draft 2", "50 % · 1 of 2"],
        ["draft 3", "0 % · 0 of 1"],
    ]
    assert bars(page, "tokens") == [["1 token", "1 step"], ["2 tokens", "1 step"], ["3 tokens", "1 step"]]
    expect(page.locator("[data-note=tokens]")).to_contain_text("6 tokens in 3 steps: 2.00 tokens a step.")
    assert sorted(bars(page, "shapes")) == [
        ["verify 1 draft, draft for 1 outcome × 4 slots", "1 step"],
        ["verify 2 drafts, draft for 1 outcome × 4 slots", "1 step"],
        ["verify 3 drafts, draft for 4 outcomes × 4 slots", "1 step"],
    ]
    expect(page.locator("[data-note=shapes]")).to_have_text("Full drafting was asked for.")
    assert page.locator("[data-chart=rows] path.column-verify").count() == 1
    assert page.locator("[data-chart=curve] path.line-drafting").count() == 1
    assert page.locator("[data-chart=curve] .dot-median").count() == 1
    # One row costs 18 + 2 ms; the steps of the recording took 40 ms each, for 20, 7 and 6 rows.
    expect(page.locator("[data-note=curve]")).to_have_text(
        "As the engine started, a plain step of one row took 20.0 ms. The middle step of this answer ran 7 rows in "
        "40.0 ms. Over all steps a token took 20.0 ms; whether drafts pay, a race tells."
    )
    assert overflow(page) <= 0


def test_the_curve_is_there_before_anything_was_asked(opened: Visit) -> None:
    page = opened.page
    page.goto(page.url + "#hood")
    expect(page.locator("[data-curve]")).to_be_visible()
    expect(page.locator(".hood-empty")).to_be_visible()
    expect(page.locator("#h-export")).to_be_disabled()
    expect(page.locator(".scrubber")).to_be_hidden()
    expect(page.locator("[data-note=curve]")).to_contain_text("One of 64 rows took 5.8 times as long, not 64 times")


def test_step_by_step(opened: Visit, recorded: RecordedServer) -> None:
    page = inside(opened, recorded, shaped(recording(STEPS)))
    expect(page.locator(".replay-badge")).to_have_text("replay of a recording")
    # It opens at the first step of which some drafts held and some did not.
    expect(page.locator("[data-count]")).to_have_text("step 1 of 3")
    assert cells(page, "verify") == [
        ["anchor", "The"],
        ["held", " quick"],
        ["rejected", " red"],
        ["rejected", " fox"],
    ]
    assert cells(page, "says") == [["held", " quick"], ["own", " brown"]]
    assert cells(page, "used") == [
        ["slot used", "·"],
        ["slot used", " fox"],
        ["slot used", " jumps"],
        ["slot used", "·"],
    ]
    assert texts(page.locator(".step-figure tr.proposal th")) == [
        "If none holds",
        "If 1 holdscame true",
        "If 2 hold",
        "If all hold",
    ]
    slots = page.locator(".step-figure tr.used td")
    assert slots.evaluate_all("all => all.findIndex(one => one.className !== 'none')") == 2, (
        "a proposal for 2 rows begins at position p+2"
    )
    expect(page.locator("[data-story]")).to_have_text(
        "Step 1 verified 3 drafts: 1 held, and the model said “ brown” itself. "
        "In the same pass 16 mask rows drafted ahead, for 4 outcomes × 4 slots: one of them came true."
    )
    text = page.locator(".scrub-text")
    assert texts(text.locator(".now")) == [" quick", " brown"]
    assert texts(text.locator(".ahead")) == [" fox", " jumps", " over", " the"]
    slider = page.get_by_role("slider", name="Step", exact=True)
    slider.focus()
    page.keyboard.press("End")
    expect(page.locator("[data-count]")).to_have_text("step 3 of 3")
    assert text.locator(".ahead").count() == 0
    assert (slider.get_attribute("aria-valuetext") or "").startswith("Step 3 verified 1 draft: none held")
    page.keyboard.press("Home")
    assert cells(page, "verify") == [["anchor", "prompt"]]
    expect(page.locator("[data-story]")).to_contain_text("Step 0 read the prompt")
    expect(page.locator("[data-count]")).to_have_text("step 0 of 3")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("[data-count]")).to_have_text("step 3 of 3")
    expect(page.locator("[data-play]")).to_have_text("Play")
    assert len(recorded.bodies) == 1, "a replay asks for nothing"
    assert page.locator("[data-play]").evaluate(LEFT_WHILE_IT_PLAYS) == ["Pause", "Play"], "nobody looks"


# In one go: left to itself it comes to its end, and says so too.
LEFT_WHILE_IT_PLAYS = """(play) => {
  play.click();
  const before = play.textContent;
  document.querySelector("#tab-chat").click();
  return [before, play.textContent];
}"""


def test_a_long_answer_scrubs_smoothly(opened: Visit, recorded: RecordedServer) -> None:
    page = inside(opened, recorded, recording(plain_steps(TOKENS * 150)))
    took = page.evaluate("""() => {
      const slider = document.querySelector(".transport input");
      const took = [];
      for (let at = 0; at <= Number(slider.max); at += 20) {
        const begun = performance.now();
        slider.value = at;
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        document.body.offsetHeight;
        took.push(performance.now() - begun);
      }
      return took.sort((a, b) => a - b)[took.length >> 1];
    }""")
    print(f"{took:.1f} ms for the middle step")
    assert took < 100


def exported(page: Page, directory: Path) -> Path:
    with page.expect_download() as download:
        page.click("#h-export")
    assert download.value.suggested_filename.startswith("tidar-trace-")
    path = directory / "trace.json"
    download.value.save_as(path)
    return path


INSIDE = """([inner, outer]) => {
  const [a, b] = [inner, outer].map((one) => document.querySelector(one).getBoundingClientRect());
  return b.left <= a.left && a.right <= b.right && b.top <= a.top && a.bottom <= b.bottom;
}"""


def test_the_text_follows_the_steps(opened: Visit, recorded: RecordedServer) -> None:
    page = inside(opened, recorded, recording(plain_steps(TOKENS * 30)))
    slider = page.get_by_role("slider", name="Step", exact=True)
    last = int(slider.get_attribute("max") or "")
    marker = page.locator("[data-chart=rows] .marker")
    columns = page.locator("[data-chart=rows] .column-verify").element_handle()
    places = []
    page.evaluate("scrollTo(0, 200)")
    for step in (last, last // 2, 1):
        slider.fill(str(step))
        assert page.evaluate(INSIDE, [".scrub-text .now", ".scrub-text"]), step
        expect(marker).to_have_count(1)
        places.append(float(marker.get_attribute("x1") or ""))
    assert page.evaluate("scrollY") == 200, "the text moves in its box, the page stays"
    assert places[0] > places[1] > places[2]
    assert columns.evaluate("one => one.isConnected"), "the marker moves, the chart is not drawn anew"


def test_a_telephone_shows_what_came_true(opened: Visit, recorded: RecordedServer) -> None:
    opened.page.set_viewport_size({"width": 390, "height": 844})
    wide = Step([f" word{number}" for number in range(7)], 5, " brown", " quick brown")
    answer = recording([STEPS[0], wide, STEPS[2]])
    events = [json.loads(one.removeprefix("data: ")) for one in answer.events]
    events[1]["tidar"] |= {"proposals": [{"a": a} for a in range(1, 9)], "used": 6, "block": 8}
    page = inside(opened, recorded, Recording([event(one) for one in events]))
    assert page.evaluate(INSIDE, ["tr.used .slot", ".step-figure"])
    expect(page.locator("tr.proposal:visible")).to_have_count(1)
    assert past(page.locator(".charts .bar-value")) <= 0.5
    assert overflow(page) <= 0


def test_what_is_studied_stays_when_another_answer_ends(
    opened: Visit, recorded: RecordedServer, tmp_path: Path
) -> None:
    page = inside(opened, recorded, shaped(recording(STEPS)))
    file = exported(page, tmp_path)
    page.click("#tab-chat")
    recorded.play(recording(plain_steps(TOKENS), pause=0.1))
    ask(page, "In the background")
    page.get_by_role("button", name="Look inside").first.click()
    expect(page.locator("[data-count]")).to_have_text("step 1 of 3")
    expect(page.locator("#h-which option")).to_have_count(2)
    expect(page.locator("#h-which option:checked")).to_have_text(re.compile(r"Chat \(full\): Go on · \d+:\d\d:\d\d"))
    expect(page.locator("[data-count]")).to_have_text("step 1 of 3")
    page.set_input_files("#h-file", file)
    expect(page.locator("#h-which option:checked")).to_contain_text("File: ")


def test_text_that_is_read_again_does_not_flatten_the_rows(opened: Visit, recorded: RecordedServer) -> None:
    answer = recording(plain_steps(TOKENS))
    events = [json.loads(one.removeprefix("data: ")) for one in answer.events]
    traced = [one["tidar"] for one in events if "tidar" in one]
    traced[0]["rows"]["verify"] = 400
    traced[3]["rows"]["verify"] = 480
    for moved in traced[3:]:
        moved["replica"] = "r2"
    page = inside(opened, recorded, Recording([event(one) for one in events]))
    chart = page.locator("[data-chart=rows]")
    heights = [float(tick) for tick in texts(chart.locator("text.tick[text-anchor=end]:not(.axis)"))]
    most = max(sum(trace["rows"].values()) for trace in traced if trace["rows"]["verify"] < 400)
    assert most <= max(heights) <= 2 * most
    columns = chart.locator("path.column-verify").get_attribute("d") or ""
    assert columns.count("M") == len(traced) - 2
    expect(page.locator(".scrubber .note").last).to_contain_text("Steps that read text have no column")


SHELVE = """async ([file]) => {
  const { Shelf } = await import(file);
  const shelf = new Shelf();
  const all = Array.from({ length: 26 }, (_, number) => ({ steps: [number], number }));
  for (const one of all) shelf.put(one);
  shelf.choose(all[0]);
  const picked = shelf.recordings.map(({ number }) => number);
  shelf.studied = true;
  shelf.put({ steps: [0], number: "new" });
  return [picked, shelf.recordings.map(({ number }) => number), shelf.chosen.number];
}"""


def test_the_chosen_one_has_a_place_however_old_it_is(blank: Page) -> None:
    picked, then, chosen = blank.evaluate(SHELVE, [f"/playground/{read_files().address}/shelf.js"])
    assert picked == [*range(25, 2, -1), 0]
    assert then == ["new", *range(25, 3, -1), 0]
    assert chosen == 0


LAY_OUT = """async ([file]) => {
  const { layOut } = await import(file);
  const token = (step) => ({ id: 1, text: "x" });
  const traced = (step) => ({ step, drafted: [], accepted: 0, anchor: token(step) });
  const steps = Array.from({ length: 50_000 }, (_, step) => ({ text: "", trace: traced(step), logprobs: null }));
  const begun = performance.now();
  let seen = 0;
  layOut(steps, () => (seen += 1));
  return [seen, performance.now() - begun];
}"""


def test_steps_whose_text_never_comes_are_soon_laid_out(blank: Page) -> None:
    seen, ms = blank.evaluate(LAY_OUT, [f"/playground/{read_files().address}/answer.js"])
    assert seen == 50_000
    assert ms < 2000


def entry(token: str, share: float, rivals: dict[str, float]) -> dict[str, Any]:
    top = [{"token": text, "logprob": math.log(chance)} for text, chance in {token: share, **rivals}.items()]
    return {"token": token, "logprob": math.log(share), "top_logprobs": top}


@pytest.mark.parametrize("way", ["pointer", "keys"])
def test_probabilities_and_runners_up(opened: Visit, recorded: RecordedServer, way: str) -> None:
    chances = {"content": [entry(" quick", 0.9, {" slow": 0.06}), entry(" brown", 0.4, {" red": 0.35, "<b>": 0.0002})]}
    first, second = STEPS[0], STEPS[1]
    recorded.play(recording([first, Step(second.drafted, 1, " brown", " quick brown", chances)]))
    page = opened.page
    page.locator("label:has(#t-logprobs)").click()
    ask(page, "Go")
    opened.settle()
    assert recorded.bodies[0]["logprobs"] is True
    assert recorded.bodies[0]["top_logprobs"] == 5
    if way == "pointer":
        page.locator(".answer-text .own .ink").last.hover()
    else:
        page.locator(".answer-text").focus()
        page.keyboard.press("End")
    hint = page.locator("#t-hint")
    assert texts(hint.locator(".chance-text")) == ["“ brown”", "“ red”", "“<b>”"]
    assert texts(hint.locator(".chance-share")) == ["40.0 %", "35.0 %", "< 0.1 %"]
    assert hint.locator(".own-chance").count() == 1
