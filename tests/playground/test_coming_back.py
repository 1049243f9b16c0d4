"""What was wanted or missing and is no more: the page finds out by itself."""

from playwright.sync_api import BrowserContext, Page, expect

from playground.files import read_files
from tests.playground.asking import TOKENS, ask
from tests.playground.conftest import visit
from tests.playground.recorded import RecordedServer, metrics_pages, plain_steps, recording

STARTING = '{"error": {"message": "The model is not ready."}}'
PLACE = """async ([file]) => {
  const { place } = await import(file);
  const waiting = [...Array(300).fill("a".repeat(1000)), "c"].map((wait) => ({ wait }));
  return place(waiting, "b" + "a".repeat(200000) + "d").pieces.map(({ text }) => text).join("").length;
}"""


def test_a_page_opened_while_the_server_starts_finds_it(context: BrowserContext, recorded: RecordedServer) -> None:
    context.route("**/v1/models", lambda route: route.fulfill(status=503, body=STARTING))
    page = visit(context, recorded.address).page
    expect(page.locator("#t-served")).to_have_text("The model is not ready")
    expect(page.locator("#t-problem")).to_have_text("The model is not ready.")
    page.click("#t-close")
    with page.expect_response("**/v1/models"):  # another look
        pass
    expect(page.locator("#t-problem")).to_be_hidden()  # nobody asked for that one
    context.unroute("**/v1/models")
    expect(page.locator("#t-served")).to_have_attribute("data-state", "up", timeout=20_000)


def test_what_is_said_of_a_server_goes_when_it_is_back(context: BrowserContext, recorded: RecordedServer) -> None:
    context.route("**/v1/**", lambda route: route.abort())
    page = visit(context, recorded.address).page
    ask(page, "Anyone?")
    expect(page.locator("#t-problem")).to_have_text("The server cannot be reached. Is it still running?")
    context.unroute("**/v1/**")
    expect(page.locator("#t-served")).to_have_attribute("data-state", "up", timeout=20_000)
    expect(page.locator("#t-problem")).to_be_hidden()


def test_a_key_that_is_wanted_no_more_is_asked_for_no_more(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.wanted_key = "sk-1"
    recorded.play(recording(plain_steps(TOKENS)))
    page = visit(context, recorded.address).page
    expect(page.locator("#t-key-form")).to_be_visible()
    recorded.wanted_key = None
    ask(page, "Go")
    page.wait_for_selector(".facts")
    expect(page.locator("#t-key-form")).to_be_hidden()


def test_metrics_that_want_a_key_for_a_while_go_on(context: BrowserContext, recorded: RecordedServer) -> None:
    recorded.metrics[:] = metrics_pages(1)
    page = visit(context, recorded.address).page
    page.click("#tab-cluster")
    expect(page.locator(".replica")).not_to_have_count(0)
    context.route("**/metrics", lambda route: route.fulfill(status=401, body="{}"))
    expect(page.locator("#c-key-form")).to_be_visible()
    expect(page.locator("#c-state")).to_have_text("The figures below stand still.")
    context.unroute("**/metrics")
    expect(page.locator("#c-key-form")).to_be_hidden(timeout=20_000)
    expect(page.locator("#c-state")).to_be_hidden()


def test_text_and_tokens_that_hardly_agree_are_laid_out_all_the_same(blank: Page) -> None:
    """As a file from anybody may have them: in time that grows with its size alone."""
    assert blank.evaluate(PLACE, [f"/playground/{read_files().address}/trace.js"]) == 200_002
