"""The race: both runs really asked for and measured, in turns, and compared truthfully."""

import re

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.playground.asking import TEXT, TOKENS, ask, overflow
from tests.playground.conftest import Visit, visit
from tests.playground.recorded import RecordedServer, Recording, Step, event, plain_steps, recording

SLOW = recording([Step((), 0, token, token) for token in TOKENS], pause=0.03)
QUICK = recording(plain_steps(TOKENS), pause=0.03)


def race(opened: Visit, prompt: str = "Go", rounds: int = 1) -> Page:
    """Run a race to its end."""
    page = opened.page
    page.click("#tab-race")
    page.locator(f"label:has(> [name=r-rounds][value='{rounds}'])").click()
    page.fill("#r-prompt", prompt)
    page.click("#r-start")
    page.wait_for_selector(".verdict:not([hidden])")
    return page


def in_turn(off: Recording, drafts: Recording) -> list[Recording]:
    """The answers of a race of three rounds. A speed is the middle one of three: a read that comes late, with several
    steps at one time, spoils one round."""
    return [off, drafts, drafts, off, off, drafts]


def number(page: Page, selector: str) -> float:
    found = re.search(r"\d+(\.\d+)?", page.locator(selector).text_content() or "")
    assert found, selector
    return float(found[0])


def lane_text(page: Page, lane: str) -> str:
    pieces = page.locator(f"[data-lane={lane}] .piece")
    return "".join(pieces.evaluate_all("all => all.map(piece => piece.textContent)"))


def test_both_are_measured_in_turn_and_compared(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(SLOW, QUICK)
    page = race(opened)
    expect(page.locator("[data-same]")).to_have_text("Same text: all 14 tokens are equal.")
    expect(page.locator("[data-same]")).to_have_attribute("data-state", "same")
    assert lane_text(page, "off") == lane_text(page, "drafts") == TEXT
    assert number(page, "[data-lane=off] [data-meter=perStep]") == 1
    assert number(page, "[data-lane=drafts] [data-meter=perStep]") > 1
    assert "–" not in page.locator("[data-lane] [data-meter=firstToken]").all_text_contents()
    expect(page.locator("[data-how]")).to_contain_text("one after the other")
    assert recorded.most_under_way == 1, "never both at once"
    assert [body["tidar"]["drafts"] for body in recorded.bodies] == ["off", "auto"]
    salts = [body["cache_salt"] for body in recorded.bodies]
    assert len(set(salts)) == 2, "the second run finds nothing of the first in the cache"
    same = [{key: body[key] for key in ("messages", "max_tokens", "temperature", "model")} for body in recorded.bodies]
    assert same[0] == same[1]
    assert overflow(page) <= 0


def test_speeds_are_measured_and_compared(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(*in_turn(Recording(SLOW.events, 0.1), Recording(QUICK.events, 0.1)))
    page = race(opened, rounds=3)
    speeds = [number(page, f"[data-lane={lane}] [data-meter=perSecond]") for lane in ("off", "drafts")]
    # 13 tokens in 13 steps against 13 tokens in fewer, both 100 ms a step.
    assert speeds[0] == pytest.approx(1000 / 100, rel=0.25)
    assert speeds[1] > 1.3 * speeds[0]
    assert number(page, "[data-speed-up]") == pytest.approx(speeds[1] / speeds[0], rel=0.03)
    expect(page.locator("[data-speed-words]")).to_have_text("as many tokens per second with drafts as without.")


def test_three_rounds_take_turns_with_one_seed(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(QUICK)
    opened.page.fill("#t-temperature", "0.8")
    opened.page.click("#tab-race")
    opened.page.locator("label:has(> [name=r-drafts][value=full])").click()
    page = race(opened, rounds=3)
    drafts = [body["tidar"]["drafts"] for body in recorded.bodies]
    assert drafts == ["off", "full", "full", "off", "off", "full"]
    assert len({body["seed"] for body in recorded.bodies}) == 1
    assert recorded.bodies[0]["seed"] > 0
    expect(page.locator("[data-lane=off] [data-lane-state]")).to_have_text("measured 3 times")
    expect(page.locator("[data-how]")).to_contain_text("3 runs each, taking turns")
    expect(page.locator("[data-how]")).to_contain_text("the same seed")


def test_looking_inside_between_rounds_shows_a_whole_answer(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(QUICK, QUICK, Recording(QUICK.events, 60))
    page = opened.page
    page.click("#tab-race")
    page.locator("label:has(> [name=r-rounds][value='3'])").click()
    page.click("#r-start")
    expect(page.locator("#r-status")).to_have_text("Measuring with drafts, round 2 of 3…")
    page.wait_for_selector("[data-lane=drafts] .piece")
    page.locator("[data-lane=drafts]").get_by_role("button", name="Look inside").click()
    expect(page.locator("[data-note=tokens]")).to_contain_text("13 tokens in ")
    assert page.locator(".scrub-text").text_content() == TEXT
    page.click("#tab-race")
    page.click("#r-stop")
    assert recorded.cancelled.wait(30)


def test_drafts_that_cost_more_than_they_bring_are_told_so(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(*in_turn(Recording(SLOW.events, 0.02), Recording(QUICK.events, 0.1)))
    page = race(opened, rounds=3)
    assert number(page, "[data-speed-up]") < 0.9
    words = "the drafts of this answer cost more time than they saved"
    expect(page.locator("[data-speed-words]")).to_contain_text(words)


@pytest.mark.parametrize("pauses", [(0.03, 0.06), (0.06, 0.03)])
def test_a_difference_without_drafts_is_not_theirs(
    opened: Visit, recorded: RecordedServer, pauses: tuple[float, float]
) -> None:
    recorded.play(*in_turn(*[Recording(SLOW.events, pause) for pause in pauses]))
    page = race(opened, rounds=3)
    expect(page.locator("[data-speed-words]")).to_contain_text("no draft was verified")


ENGAGED = "An answer, a race or a burst is under way; it would share the engine. Stop it or wait."


def test_nothing_is_measured_beside_another_answer(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = [""]
    recorded.play(SLOW, QUICK, Recording(QUICK.events, 60))
    page = race(opened)
    page.click("#tab-chat")
    ask(page, "Go")
    page.wait_for_selector("#t-turns .piece")
    for tab, start, stop in (("race", "#r-start", "#r-stop"), ("cluster", "#b-start", "#b-stop")):
        page.click(f"#tab-{tab}")
        expect(page.locator("#t-problem")).to_be_hidden()
        page.click(start)
        expect(page.locator("#t-problem")).to_have_text(ENGAGED)
        expect(page.locator(stop)).to_be_hidden()
    page.click("#tab-race")
    expect(page.locator(".verdict")).to_be_visible()
    page.click("#tab-chat")
    page.click("#t-stop")
    expect(page.locator("#t-send")).to_be_visible()
    assert recorded.cancelled.wait(30)
    # And the other way round.
    page.click("#tab-race")
    page.click("#r-start")
    page.wait_for_selector("[data-lane=off] .piece")
    page.click("#tab-chat")
    page.fill("#t-prompt", "And?")
    page.press("#t-prompt", "Enter")
    expect(page.locator("#t-problem")).to_have_text(ENGAGED)
    expect(page.locator("#t-prompt")).to_have_value("And?")
    assert recorded.most_under_way == 1
    page.click("#tab-race")
    page.click("#r-stop")
    expect(page.locator("#r-start")).to_be_visible()


def test_a_burst_that_still_writes_its_prompts_is_not_raced_against(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = [""]
    page = opened.page
    held: list[Route] = []
    page.route("**/tokenize", lambda route: held.append(route))
    page.click("#tab-cluster")
    page.click("#b-start")
    page.click("#tab-race")
    page.click("#r-start")
    expect(page.locator("#t-problem")).to_have_text(ENGAGED)
    page.click("#tab-cluster")
    page.click("#b-stop")
    expect(page.locator("#b-start")).to_be_visible()
    recorded.play(SLOW, QUICK)
    race(opened)


def test_a_race_that_cannot_begin_leaves_the_last_one(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.play(SLOW, QUICK)
    page = race(visit(context, recorded.address))
    page.route("**/v1/**", lambda route: route.abort())
    page.click("#tab-chat")
    ask(page, "Go")
    expect(page.locator("#t-served")).to_have_attribute("data-state", "down")
    page.click("#tab-race")
    page.click("#r-start")
    expect(page.locator("#t-problem")).to_be_visible()
    expect(page.locator("#r-start")).to_be_visible()
    expect(page.locator(".verdict")).to_be_visible()


@pytest.mark.parametrize(("exact", "why"), [(True, "please report it"), (False, "does not claim to be exact")])
def test_texts_that_differ_are_told_so(opened: Visit, recorded: RecordedServer, exact: bool, why: str) -> None:
    recorded.model = {**recorded.model, "tidar": {**recorded.model["tidar"], "exact": exact}}
    opened.page.reload()
    other = [*TOKENS[:5], " <b>sits</b>", *TOKENS[6:]]
    recorded.play(SLOW, recording(plain_steps(other)))
    page = race(opened)
    same = page.locator("[data-same]")
    expect(same).to_have_attribute("data-state", "different")
    expect(same).to_contain_text("The texts differ from character 27 on: “over the lazy dog")
    expect(same).to_contain_text("“<b>sits</b> the")
    expect(same).to_contain_text(why)
    assert same.locator("b").count() == 0


def test_the_same_text_out_of_other_tokens_is_no_equality(opened: Visit, recorded: RecordedServer) -> None:
    whole = [TOKENS[0], TOKENS[1] + TOKENS[2], *TOKENS[3:]]
    recorded.play(SLOW, recording([Step((), 0, token, token) for token in whole]))
    page = race(opened)
    expect(page.locator("[data-same]")).to_contain_text("The texts differ from token 2 on")


def test_a_race_that_fails_before_its_first_token_shows_no_time(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording([event({"error": {"message": "The replica died."}})]))
    page = opened.page
    page.click("#tab-race")
    page.click("#r-start")
    expect(page.locator("[data-lane=off] [data-lane-state]")).to_have_text("broken off")
    expect(page.locator("[data-lane=off] [data-meter=firstToken]")).to_have_text("–")


def test_the_keyboard_goes_with_the_button_and_enter_held_down_presses_once(
    opened: Visit, recorded: RecordedServer
) -> None:
    recorded.play(Recording(SLOW.events, 1))
    page = opened.page
    page.goto(page.url + "#race")
    page.reload()
    page.wait_for_selector("#r-prompt")
    assert page.locator("#r-prompt").evaluate("one => one.clientHeight") > 24, "as high as its line"
    page.focus("#r-start")
    for _ in range(2):
        page.keyboard.down("Enter")
    page.keyboard.up("Enter")
    expect(page.locator("#r-stop")).to_be_focused()
    page.wait_for_selector("[data-lane=off] .piece")
    page.keyboard.press("Enter")
    expect(page.locator("#r-status")).to_have_text("Stopped: nothing to compare.")
    expect(page.locator("#r-start")).to_be_focused()


def test_a_race_that_was_stopped_or_broke_off_has_no_winner(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording(SLOW.events, 1))
    page = opened.page
    page.click("#tab-race")
    page.click("#r-start")
    page.wait_for_selector("[data-lane=off] .piece")
    page.click("#r-stop")
    expect(page.locator("#r-status")).to_have_text("Stopped: nothing to compare.")
    assert recorded.cancelled.wait(30)
    expect(page.locator(".verdict")).to_be_hidden()
    recorded.play(SLOW, Recording([*QUICK.events[:3], event({"error": {"message": "The replica died."}})]))
    page.click("#r-start")
    expect(page.locator("#t-problem")).to_have_text("The replica died.")
    expect(page.locator(".verdict")).to_be_hidden()
    expect(page.locator("#r-start")).to_be_visible()


def test_whoever_scrolls_up_in_a_lane_stays_there(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording(recording([Step((), 0, token, token) for token in TOKENS * 100]).events, 0.01))
    page = opened.page
    page.click("#tab-race")
    page.click("#r-start")
    lane = page.locator("[data-lane=off] .answer-text")
    page.wait_for_function("one => one.scrollTop > 200", arg=lane.element_handle())
    lane.hover()
    for _ in range(8):  # as a finger on a touchpad, a little in each frame
        page.mouse.wheel(0, -8)
        page.wait_for_timeout(16)
    place = page.wait_for_function(STANDS, arg=lane.element_handle()).json_value()
    lane.evaluate("one => (one.scrollTop = one.scrollHeight)")
    page.wait_for_function("([one, place]) => one.scrollTop > place + 200", arg=[lane.element_handle(), place])
    page.click("#r-stop")


# Where a box stands whose text has grown well beyond it.
STANDS = """one => one.scrollHeight - one.clientHeight - one.scrollTop > 200 && one.scrollTop"""


# Starts the replay: what it is called in that very moment, and whether the lane with drafts is ahead at some time.
REPLAYED = """async (watch) => {
  watch.click();
  const text = (selector) => document.querySelector(selector).textContent;
  const called = ["#r-status", "[data-lane=off] [data-lane-state]", "[data-lane=drafts] [data-lane-state]"].map(text);
  const pieces = (lane) => document.querySelectorAll(`[data-lane=${lane}] .piece`).length;
  let ahead = false;
  while (!ahead && text("#r-status") === called[0]) {
    await new Promise(requestAnimationFrame);
    ahead = pieces("drafts") > pieces("off");
  }
  return [...called, ahead];
}"""


def test_a_replay_is_called_one_and_asks_for_nothing(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(Recording(SLOW.events, 0.2), Recording(QUICK.events, 0.2))
    page = race(opened)
    asked = len(recorded.bodies)
    speed = page.locator("[data-speed-up]").text_content()
    called = ["A replay at the recorded times: nothing is measured.", "replay", "replay"]
    assert page.locator("#r-replay").evaluate(REPLAYED) == [*called, True]
    expect(page.locator("#r-status")).to_have_text("The replay is over.")
    assert lane_text(page, "off") == lane_text(page, "drafts") == TEXT
    assert len(recorded.bodies) == asked
    assert page.locator("[data-speed-up]").text_content() == speed


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_a_replay_is_brought_into_sight(opened: Visit, recorded: RecordedServer, size: tuple[int, int]) -> None:
    opened.page.set_viewport_size({"width": size[0], "height": size[1]})
    long = plain_steps(TOKENS * 8)
    recorded.play(recording([Step((), 0, token, token) for token in TOKENS * 8]), recording(long, pause=0.15))
    page = race(opened)
    expect(page.locator(".verdict")).to_be_in_viewport(ratio=0.99)
    page.evaluate("scrollTo(0, 0)")
    before = page.locator(".lanes").evaluate("one => one.offsetHeight")
    watch = page.locator("#r-replay")
    watch.click()
    expect(watch).to_have_text("Stop the replay")
    expect(watch).to_be_in_viewport(ratio=0.99)
    expect(watch).to_be_focused()
    for lane in ("off", "drafts"):
        expect(page.locator(f"[data-lane={lane}] .lane-text")).to_be_in_viewport(ratio=0.99)
    assert page.locator(".lanes").evaluate("one => one.offsetHeight") == before, "nothing moves"
    watch.click()
    expect(watch).to_have_text("Watch both at once (a replay)")
    assert page.locator("[data-lane=drafts] [data-lane-state]").text_content() == "replay stopped"
    expect(page.locator("#r-start")).to_be_visible()
