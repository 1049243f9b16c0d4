"""Fixtures of the page's tests: a real Chromium, and the page beside an API that plays recordings."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, Playwright, expect, sync_playwright

from tests.playground.recorded import RecordedServer, serve_recorded

# How long a machine with other work to do may take to show something: no test is about that.
expect.set_options(timeout=30_000)

# A browser that calls home by itself would blur the test that the page does not.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# The first has no windows: the others prepare address bars and menus for each, pages of their own that take as long as
# the one that is measured.
SYSTEM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def launch(playwright: Playwright) -> Browser | None:
    """The system's Chromium, else Playwright's own, else None."""
    own = playwright.chromium.executable_path
    found = next((path for name in SYSTEM_NAMES if (path := shutil.which(name))), None)
    path = found or (own if Path(own).exists() else None)
    if path is None:
        return None
    return playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """A real browser, or a skip. Closed with the package: Playwright's event loop would otherwise still run in this
    thread when other tests want one of their own."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        if browser is None:
            pytest.skip("no Chromium: install `chromium`, or run `playwright install chromium`")
        yield browser
        browser.close()


@dataclass
class Visit:
    """An open page and what it did that it should not do."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def foreign(self, address: str) -> list[str]:
        """Requests that left for another host than `address`."""
        local = urlsplit(address).netloc
        return [
            url for url in self.requests if not url.startswith(("data:", "blob:")) and urlsplit(url).netloc != local
        ]

    def settle(self, timeout: float = 30_000) -> None:
        """Wait until no answer is under way."""
        self.page.wait_for_function("!document.querySelector('.answer-text[data-busy]')", timeout=timeout)


def visit(context: BrowserContext, address: str) -> Visit:
    """Open the playground at `address` and wait until its script has started."""
    page = context.new_page()
    opened = Visit(page)
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("console", lambda line: opened.complaints.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))

    def refuse(dialog: Dialog) -> None:
        opened.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", refuse)
    page.goto(f"{address}/playground")
    page.wait_for_selector("#t-prompt", timeout=60_000)
    return opened


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    made = chromium.new_context(viewport={"width": 1280, "height": 800})
    yield made
    made.close()


@pytest.fixture(scope="package")
def recorded_server() -> Iterator[RecordedServer]:
    with serve_recorded() as server:
        yield server


@pytest.fixture(scope="module")
def blank(chromium: Browser, recorded_server: RecordedServer) -> Iterator[Page]:
    """A page of the server's origin with nothing on it, to run one of the page's scripts in."""
    page = chromium.new_page()
    page.goto(f"{recorded_server.address}/v1/models")
    yield page
    page.close()


@pytest.fixture
def recorded(recorded_server: RecordedServer) -> Iterator[RecordedServer]:
    recorded_server.forget()
    yield recorded_server
    recorded_server.forget()


@pytest.fixture
def opened(context: BrowserContext, recorded: RecordedServer) -> Iterator[Visit]:
    """The page in a desktop window. Whatever a test does, no console error, no other host, no dialog."""
    opened = visit(context, recorded.address)
    yield opened
    assert opened.complaints == []
    assert opened.foreign(recorded.address) == []
    assert opened.dialogs == []
