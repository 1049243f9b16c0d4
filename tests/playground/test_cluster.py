"""The cluster tab: what it makes of the metrics page, the key it asks for, and the burst."""

import re

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from cluster.observe.ingress_metrics import IngressMetrics, render
from tests.cluster.observe.behind import Behind
from tests.playground.asking import ask, overflow, past
from tests.playground.conftest import Visit, visit
from tests.playground.recorded import HOSTILE_REPLICA, RecordedServer, Recording, burst, event, metrics_pages


def fields(page: Page, card: int = 0) -> dict[str, str]:
    found = page.locator(".replica").nth(card).locator(".meter")
    pairs = found.evaluate_all("all => all.map(one => [...one.children].map(part => part.textContent))")
    return dict(pairs)


# A clock by which readings are a second apart, however long each of them takes.
EVEN = """() => {
  const own = window.fetch;
  let readings = 0;
  window.fetch = (url, options) => {
    if (String(url).endsWith("/metrics")) readings += 1;
    return own(url, options);
  };
  performance.now = () => 1000 * readings;
}"""


def test_replicas_live(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(10)
    page = opened.page
    page.evaluate(EVEN)
    page.click("#tab-cluster")
    expect(page.locator(".replica")).to_have_count(2)
    page.wait_for_function("document.querySelector('.replica dd').textContent !== '–'")
    page.wait_for_function("parseFloat(document.querySelector('.replica dd').textContent) > 0")
    found = fields(page)
    # 10 steps of 2 tokens a second, 2 drafts of which 1 held, 3 + 4 rows.
    assert found["Tokens per second"] == "20.0"
    assert found["Tokens per step"] == "2.00"
    assert found["Acceptance"] == "50.0 %"
    assert found["Rows per step"] == "7.0"
    assert (found["Running"], found["Waiting"], found["K/V in use"]) == ("2", "1", "25.0 %")
    expect(page.locator("[data-total=running]")).to_have_text("4")
    names = page.locator(".replica h3").all_text_contents()
    assert sorted(names) == sorted(["Replica one", f"Replica {HOSTILE_REPLICA}"])
    assert page.locator(".replica b").count() == 0
    assert page.locator(".replica .spark path").count() == 2
    assert overflow(page) <= 0
    # Where there are several models, each says which it has.
    recorded.metrics[:] = metrics_pages(1, ("one", "two"), other="<b>code</b>")
    expect(page.locator(".replica h3")).to_have_text(["m, replica one", "<b>code</b>, replica two"])
    # A replica that is gone leaves; nobody asks while nobody looks.
    recorded.metrics[:] = metrics_pages(1, ("one",))
    expect(page.locator(".replica h3")).to_have_text(["Replica one"])
    page.click("#tab-chat")
    page.wait_for_timeout(300)
    before = len(opened.requests)
    page.wait_for_timeout(1500)
    assert len(opened.requests) == before


def test_a_replica_that_misses_a_reading_stays_for_a_while(opened: Visit) -> None:
    both, one = metrics_pages(1, ("one", "two"))[0], metrics_pages(1, ("one",))[0]
    readings = [both, one]
    held: list[Route] = []  # what is on show stays until there is another reading

    def answer(route: Route) -> None:
        if readings:
            route.fulfill(body=readings.pop(0), content_type="text/plain")
        else:
            held.append(route)

    def read(*more: str) -> None:
        readings.extend(more)
        if held:
            answer(held.pop())

    page = opened.page
    page.route("**/metrics", answer)
    page.click("#tab-cluster")
    second = page.locator(".replica").nth(1)
    silent = second.get_by_text("did not answer just now")
    running = page.locator("[data-total=running]")
    expect(silent).to_be_visible()
    assert fields(page, 1)["Running"] == "2"
    expect(running).to_have_text("2")  # of those that answer
    read(both)
    expect(silent).to_be_hidden()
    expect(running).to_have_text("4")
    read(*[one] * 5)
    while readings or not held:
        page.wait_for_timeout(50)
    expect(silent).to_be_visible()
    expect(page.locator(".replica h3")).to_have_text(["Replica one", "Replica two"])
    read(one)
    expect(page.locator(".replica h3")).to_have_text(["Replica one"])
    page.unroute_all(behavior="ignoreErrors")


def test_a_model_that_sleeps_is_told_so(opened: Visit, recorded: RecordedServer) -> None:
    here, there = IngressMetrics("here"), IngressMetrics("there")
    for ingress in (here, there):
        ingress.watch("<b>m</b>", Behind(engines=0, sleeps=True))
    here.watch("gone", Behind(engines=0, sleeps=True))
    there.watch("gone", Behind(engines=0, sleeps=False))
    asleep = render([here.collect(), there.collect()]).decode()
    recorded.metrics[:] = [asleep]
    page = opened.page
    page.click("#tab-cluster")
    line = page.locator(".replicas-empty")
    sleeps = "<b>m</b> sleeps: the next request wakes it."
    expect(line).to_have_text(f"{sleeps} gone has no replica that answers.")
    for ingress in (here, there):
        ingress.begun()
        ingress.goes_over("", "<b>m</b>")
    there.begun()
    there.goes_over("", "gone")
    recorded.metrics[:] = [render([here.collect(), there.collect()]).decode()]
    waited = "<b>m</b> is woken: 2 requests wait for it. gone has no replica that answers: 1 request waits for it."
    expect(line).to_have_text(waited)
    recorded.metrics[:] = [asleep + metrics_pages(1, ("one",), other="gone")[0].replace('"m"', '"gone"')]
    expect(page.locator(".replica")).to_have_count(1)
    expect(line).to_have_text(sleeps)
    recorded.metrics[:] = metrics_pages(1, ("one",))
    expect(line).to_be_hidden()


SLOW = """() => {
  const [now, later] = [performance.now.bind(performance), setTimeout];
  performance.now = () => 20 * now();
  window.setTimeout = (call, ms) => later(call, ms / 6);
}"""


# Two minutes in, from one look, with more than five readings: a gap of ten seconds begins the line anew. Before the
# first reading there is no card, so no line either.
DRAWN = """(begun) => {
  const path = document.querySelector(".spark path")?.getAttribute("d") ?? "";
  const left = Number(document.querySelector(".spark .grid")?.getAttribute("x1"));
  return performance.now() - begun > 120_000 && path.match(/[ML]/g)?.length > 5 && { path, left };
}"""


def test_the_last_minute_is_one_however_slow_the_server(opened: Visit, recorded: RecordedServer) -> None:
    """A clock at which a reading comes every few seconds."""
    recorded.metrics[:] = metrics_pages(1, ("one",))
    page = opened.page
    page.evaluate(SLOW)
    begun = page.evaluate("performance.now()")
    page.click("#tab-cluster")
    drawn = page.wait_for_function(DRAWN, arg=begun).json_value()
    places = [float(x) for x in re.findall(r"[ML](\S+) ", drawn["path"])]
    assert min(places) >= drawn["left"]


def test_a_metrics_key_is_asked_for_and_kept(chromium: Browser, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    recorded.metrics_key = "mk-1"
    context = chromium.new_context()
    page = visit(context, recorded.address).page
    page.focus("#tab-chat")
    page.keyboard.press("End")
    expect(page.locator("#c-key")).to_be_visible()
    expect(page.locator("#tab-cluster")).to_be_focused()  # who walks the tabs is not led away from them
    expect(page.locator("#c-state")).to_be_hidden()
    page.fill("#c-key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#c-state")).to_have_text("That key does not open the metrics.")
    expect(page.locator("#c-key")).to_be_focused()
    page.fill("#c-key", "mk-1")
    page.keyboard.press("Enter")
    expect(page.locator(".replica")).to_have_count(2)
    expect(page.locator("#c-key-form")).to_be_hidden()
    page.reload()
    expect(page.locator(".replica")).to_have_count(2)  # the tab is in the address, the key in the browser
    context.close()


def locked(context: BrowserContext, recorded: RecordedServer) -> Page:
    """The cluster tab of a server whose API and metrics want the same key."""
    recorded.metrics[:] = metrics_pages(1)
    recorded.wanted_key = recorded.metrics_key = "sk-1"
    page = visit(context, recorded.address).page
    expect(page.locator("#t-key")).to_be_focused()
    page.click("#tab-cluster")
    return page


def test_the_apis_key_opens_the_metrics_too(context: BrowserContext, recorded: RecordedServer) -> None:
    page = locked(context, recorded)
    expect(page.locator("#c-key-form")).to_be_visible()
    page.fill("#t-key", "wrong")
    page.press("#t-key", "Enter")
    expect(page.locator("#t-problem")).to_have_text("Incorrect API key provided.")
    expect(page.locator("#c-key-form")).to_be_visible()
    expect(page.locator("#t-key")).to_be_focused()
    page.fill("#t-key", "sk-1")
    page.press("#t-key", "Enter")
    expect(page.locator(".replica")).to_have_count(2)
    expect(page.locator("#c-key-form")).to_be_hidden()


def test_a_key_given_while_the_metrics_are_read(context: BrowserContext, recorded: RecordedServer) -> None:
    held: list[Route] = []
    context.route("**/metrics", lambda route: held.append(route), times=1)
    with context.expect_event("request", lambda request: request.url.endswith("/metrics")):
        page = locked(context, recorded)
    page.fill("#t-key", "sk-1")
    page.press("#t-key", "Enter")
    expect(page.locator("#t-served")).to_contain_text("SmolLM2")
    held[0].continue_()
    expect(page.locator(".replica")).to_have_count(2)
    expect(page.locator("#c-key-form")).to_be_hidden()


def test_a_metrics_key_of_another_tab_outlives_a_reading_without_it(
    context: BrowserContext, recorded: RecordedServer
) -> None:
    recorded.metrics[:] = metrics_pages(1)
    recorded.metrics_key = "mk-1"
    held: list[Route] = []
    context.route("**/metrics", lambda route: held.append(route), times=1)
    page = visit(context, recorded.address).page
    with page.expect_request("**/metrics"):
        page.click("#tab-cluster")
    other = visit(context, recorded.address).page
    other.evaluate("localStorage.setItem('tidar.metrics_key', 'mk-1')")
    expect(page.locator(".kept-key")).not_to_have_attribute("hidden", "")
    held[0].continue_()
    expect(page.locator(".replica")).to_have_count(2)
    expect(page.locator("#c-key-form")).to_be_hidden()
    assert page.evaluate("localStorage.getItem('tidar.metrics_key')") == "mk-1"


@pytest.mark.parametrize("key", ["mk-1\u200b", "mk 1", "ключ"])
def test_a_metrics_key_that_is_none_is_not_taken(opened: Visit, recorded: RecordedServer, key: str) -> None:
    recorded.metrics_key = "mk-1"
    page = opened.page
    page.click("#tab-cluster")
    page.fill("#c-key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#c-state")).to_contain_text("That is no key:")
    expect(page.locator("#c-key")).to_be_focused()
    assert page.evaluate("localStorage.getItem('tidar.metrics_key')") is None
    opened.complaints.clear()  # the browser's own note of the reading that was refused


def test_a_burst_is_bounded_and_tells_how_the_batch_went(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    recorded.play(burst(5, 20, pause=0.005))
    page = opened.page
    page.click("#tab-cluster")
    page.fill("#b-answers", "65")
    page.click("#b-start")
    assert recorded.bodies == [], "64 at most"
    page.fill("#b-answers", "5")
    page.fill("#b-tokens", "20")
    page.click("#b-start")
    expect(page.locator("#b-status")).to_contain_text("Done: 5 of 5 answers finished, 110 tokens")
    (body,) = recorded.bodies
    assert len(body["prompt"]) == 5
    assert len({tuple(prompt) for prompt in body["prompt"]}) == 5, "every prompt is another"
    assert [one.get("model") for one in recorded.tokenized] == [body["model"]] * 5, "by the template of that model"
    assert body["max_tokens"] == 20
    assert body["tidar"] == {"trace": True, "drafts": "auto"}
    shown = page.locator("[data-chart=classes] li").all_text_contents()
    assert [re.split(r"(?<=at once)", one)[0] for one in shown] == [
        "1 at once",
        "2 at once",
        "3–4 at once",
        "5–8 at once",
    ]
    assert "1.0 verify + 4.0 mask rows, 1.00 tokens" in shown[0]
    assert page.locator("[data-chart=burst] path").count() == 2
    expect(page.locator("[data-answers]")).to_have_text("answers under way, of 5: all of them at the top")


def test_figures_of_a_burst_stay_in_their_card_on_a_telephone(opened: Visit, recorded: RecordedServer) -> None:
    opened.page.set_viewport_size({"width": 390, "height": 844})
    recorded.metrics[:] = metrics_pages(1)
    recorded.play(burst(16, 8))
    page = opened.page
    page.click("#tab-cluster")
    page.fill("#b-answers", "16")
    page.click("#b-start")
    expect(page.locator("#b-status")).to_contain_text("Done: 16 of 16")
    expect(page.locator("[data-chart=classes] li")).to_have_count(5)
    assert past(page.locator("[data-chart=classes] :is(.bar-label, .bar-value)")) <= 0.5


def test_a_burst_can_be_stopped(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    recorded.play(burst(4, 1000, pause=0.02))
    page = opened.page
    page.click("#tab-cluster")
    page.press("#b-start", "Enter")
    expect(page.locator("#b-status")).to_contain_text("Measuring")
    expect(page.locator("#b-status")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#b-stop")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#b-status")).to_contain_text("Stopped: 0 of 16 answers finished")
    expect(page.locator("#b-status")).to_have_attribute("aria-busy", "false")
    assert recorded.cancelled.wait(30)
    expect(page.locator("#b-start")).to_be_focused()


def test_metrics_that_do_not_answer_are_one_line(opened: Visit, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    page = opened.page
    page.click("#tab-cluster")
    expect(page.locator(".replica")).to_have_count(2)
    page.route("**/metrics", lambda route: route.abort())
    expect(page.locator("#c-state")).to_contain_text("The server cannot be reached.")
    page.unroute("**/metrics")
    expect(page.locator("#c-state")).to_be_hidden()
    opened.complaints.clear()  # the browser's own note of the request that failed


@pytest.mark.parametrize("tab", ["chat", "cluster"])
def test_who_waits_for_a_model_that_is_woken_is_told_so(opened: Visit, recorded: RecordedServer, tab: str) -> None:
    ingress, page = IngressMetrics("here"), opened.page
    ingress.watch(recorded.model["id"], Behind(engines=0, sleeps=True))
    recorded.metrics[:] = [render([ingress.collect()]).decode()]
    recorded.play(Recording([event({"choices": []}), ""], 60))
    page.click(f"#tab-{tab}")
    if tab == "chat":
        ask(page, "Hello?")
    else:
        page.click("#b-start")
    status = page.locator("#t-status" if tab == "chat" else "#b-status")
    expect(status).to_have_text(f"{recorded.model['id']} slept. An engine starts for it…")
    recorded.metrics[:] = metrics_pages(1, other=recorded.model["id"])
    expect(status).to_have_text("Waiting for the first token…")
    page.click("#t-stop" if tab == "chat" else "#b-stop")
    expect(status).to_have_text("Stopped.")
