"""How the page looks: every tab in wide and narrow windows, light and dark, for every eye and hand."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests import plain_http
from tests.playground.asking import TOKENS, ask, overflow, shown
from tests.playground.conftest import Visit, visit
from tests.playground.recorded import RecordedServer, burst, metrics_pages, plain_steps, recording

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


def test_one_step_is_shown_before_anything_is_asked(opened: Visit, recorded: RecordedServer) -> None:
    page = opened.page
    marks = page.locator(".worked :is(.held, .own, .ghost)")
    kinds = marks.evaluate_all("all => all.map(one => one.className.split(' ')[0])")
    assert kinds == ["held", "held", "held", "ghost", "ghost", "own"]
    expect(page.locator(".worked figcaption")).to_contain_text("An example.")
    expect(page.locator(".live")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    expect(page.locator(".live")).to_be_hidden()
    expect(page.locator(".worked")).to_be_in_viewport(ratio=0.99)
    recorded.play(recording(plain_steps(TOKENS)))
    ask(page, "Go")
    expect(page.locator(".live")).to_be_visible()


def test_the_block_can_be_set_for_the_race_whatever_the_chat_drafts(opened: Visit) -> None:
    page = opened.page
    page.locator("label:has(> [name=t-drafts][value=off])").click()
    expect(page.locator("#t-block")).to_be_disabled()
    page.click("#tab-race")
    expect(page.locator("#t-block")).to_be_enabled()
    page.click("#tab-chat")
    expect(page.locator("#t-block")).to_be_disabled()


def test_a_proxy_that_hands_on_no_host_costs_no_style(opened: Visit, recorded: RecordedServer) -> None:
    def behind(route: Route) -> None:
        page = plain_http.get(route.request.url, headers={"Host": "backend:8000"})
        route.fulfill(body=page.content, headers=dict(page.headers))

    opened.page.route("**/playground/", behind)
    opened.page.goto(f"{recorded.address}/playground/")
    opened.page.wait_for_function(
        "[...document.styleSheets].some(({ href }) => href?.includes('/playground/theme.css'))"
    )


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


CLOSED = (
    "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('closed', 'SecurityError'); } })"
)


def test_the_theme_can_be_chosen_where_storage_is_closed(context: BrowserContext, recorded: RecordedServer) -> None:
    context.add_init_script(CLOSED)
    page = visit(context, recorded.address).page
    seen = []
    for _ in range(3):
        page.click("#t-theme")
        seen.append(page.locator("#t-theme").get_attribute("aria-label"))
    assert seen == ["Colours: light", "Colours: dark", "Colours: as the system"]


def test_what_is_chosen_is_seen_in_forced_colours(opened: Visit) -> None:
    page = opened.page
    page.emulate_media(forced_colors="active")
    paper = page.evaluate(GROUND, ["body", None])
    for selector, part in (
        ("[value=full]:checked + span", None),
        ("#t-marks:checked + .track", "::after"),
        ("#tab-chat", "::after"),
    ):
        assert page.evaluate(GROUND, [selector, part]) != paper, selector


GROUND = "([selector, part]) => getComputedStyle(document.querySelector(selector), part).backgroundColor"


def test_a_low_window_is_left_to_the_answer(opened: Visit, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS * 40)))
    page = opened.page
    page.set_viewport_size({"width": 844, "height": 390})
    ask(page, "Go")
    opened.settle()
    page.locator(".piece").nth(len(TOKENS) * 20).scroll_into_view_if_needed()
    for sticks in (".composer", ".live"):
        expect(page.locator(sticks)).not_to_be_in_viewport()


def test_less_motion_where_it_is_wished(chromium: Browser, recorded: RecordedServer) -> None:
    recorded.play(recording(plain_steps(TOKENS), pause=0.05))
    context = chromium.new_context(reduced_motion="reduce")
    opened = visit(context, recorded.address)
    ask(opened.page, "Go")
    opened.page.wait_for_selector(".answer-text .ghosts", state="attached")
    running = "document.getAnimations({ subtree: true }).filter((one) => one.playState === 'running').length"
    assert opened.page.evaluate(running) == 0
    opened.settle()
    expect(opened.page.locator(".answer-text .ghosts:not(.gone)")).to_have_count(0)
    expect(opened.page.locator(".answer-text .ghosts").first).to_be_visible()  # it would move words as it goes
    expect(opened.page.locator("[value=keep]")).to_be_checked()
    context.close()


PLACES = """() => [...document.querySelectorAll(".answer-text .ink")].map((one) => {
  const { left, top } = one.getClientRects()[0];
  return [left, top + scrollY].map(Math.round);
})"""
JOIN = """() => {
  for (const line of document.querySelectorAll(".answer-text .goes-on")) {
    const block = line.parentElement;
    block.previousElementSibling.lastElementChild.append(...line.childNodes);
    block.remove();
  }
}"""


@pytest.mark.parametrize("ghosts", ["fade", "keep"])
def test_a_long_line_is_laid_out_in_parts_that_look_like_one(
    opened: Visit, recorded: RecordedServer, ghosts: str
) -> None:
    tokens = [" " + token.strip() for token in TOKENS] * 100
    steps = plain_steps(tokens)
    recorded.play(recording(steps, pause=1.4 / len(steps)))
    page = opened.page
    page.locator(f"label:has(> [value={ghosts}])").click()
    ask(page, "Go")
    opened.settle()
    expect(page.locator(".answer-text .ghosts:not(.gone)")).to_have_count(0)
    lines = page.locator(".answer-text .line")
    assert lines.count() > 1
    assert shown(page) == "".join(tokens)
    places = page.evaluate(PLACES)
    page.evaluate(JOIN)
    assert lines.count() == 1
    assert page.evaluate(PLACES) == places


SERIOUS = ("serious", "critical")
TABS = ("chat", "race", "hood", "cluster")


def faults(page: Page) -> list[tuple[str, str]]:
    """What axe-core finds that is serious: the rule, and the first element that breaks it."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [(one["id"], one["nodes"][0]["html"][:120]) for one in found if one["impact"] in SERIOUS]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_no_tab_has_a_serious_accessibility_fault(
    chromium: Browser, recorded: RecordedServer, scheme: str, size: tuple[int, int]
) -> None:
    """Each tab empty, and each with something on it; no wider than its window."""
    recorded.metrics[:] = metrics_pages(5)
    recorded.play(recording(plain_steps(TOKENS * 3)), *[recording(plain_steps(TOKENS))] * 2, burst(5, 8))
    context = chromium.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})  # type: ignore[arg-type]
    opened = visit(context, recorded.address)
    page = opened.page
    page.wait_for_selector("#t-served[data-state=up]")
    found = {f"{tab}, empty": seen(page, tab) for tab in TABS}
    page.click("#tab-chat")
    page.locator("label:has(> [value=keep])").evaluate("one => one.click()")
    ask(page, "Go")
    opened.settle()
    page.click("#tab-race")
    page.click("#r-start")
    page.wait_for_selector(".verdict:not([hidden])")
    page.click("#tab-cluster")
    page.fill("#b-answers", "5")
    page.click("#b-start")
    page.wait_for_function("document.querySelector('#b-status').textContent.startsWith('Done')")
    found |= {f"{tab}, filled": seen(page, tab) for tab in TABS}
    assert {name: fault for name, fault in found.items() if fault != ([], 0)} == {}
    assert opened.complaints == []
    assert opened.foreign(recorded.address) == []
    context.close()


def seen(page: Page, tab: str) -> tuple[list[tuple[str, str]], int]:
    page.click(f"#tab-{tab}")
    page.wait_for_timeout(50)
    return faults(page), max(0, overflow(page))


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize(
    ("width", "order"), [(1280, ["t-prompt", "t-marks", "t-max"]), (900, ["t-marks", "t-max", "t-prompt"])]
)
def test_the_tab_key_goes_as_the_eye_does(opened: Visit, width: int, order: list[str], resized: bool) -> None:
    page = opened.page
    page.set_viewport_size({"width": {900: 1280, 1280: 900}[width] if resized else width, "height": 800})
    page.reload()
    page.wait_for_selector("#t-prompt")
    page.focus("#t-settings summary")
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.locator("#t-settings summary")).to_be_focused()
    for card in page.locator(".side details").all():
        card.evaluate("one => (one.open = true)")
    page.focus("#tab-chat")
    walked = []
    while (found := press_tab(page)) not in walked:
        walked.append(found)
    assert [one for one in walked if one in order] == order


def press_tab(page: Page) -> str:
    page.keyboard.press("Tab")
    return str(page.evaluate("document.activeElement.id || document.activeElement.outerHTML"))


def test_tabs_are_walked_with_the_keyboard_and_named_in_the_address(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    page = opened.page
    page.focus("#tab-chat")
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Home", "End"):
        page.keyboard.press(key)
        walked.append(page.evaluate("document.activeElement.dataset.opens"))
        assert page.locator("[role=tabpanel]:visible").count() == 1
    assert walked == ["race", "hood", "cluster", "chat", "cluster", "chat", "cluster"]
    page.keyboard.press("Alt+ArrowRight")
    assert page.evaluate("document.activeElement.dataset.opens") == "cluster", "that key is the browser's"
    assert page.url.endswith("#cluster")
    page.reload()
    expect(page.locator("#panel-cluster")).to_be_visible()
    assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == "tab-cluster"
    page.goto(page.url.replace("#cluster", "#<img src=x>"))
    expect(page.locator("#panel-chat")).to_be_visible()
