"""Words and hands of the page's tests: an answer of a few tokens, asking for it, reading what is shown."""

from typing import Any

from playwright.sync_api import Locator, Page

from playground.files import read_files

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
  || document.querySelector('#t-problem').checkVisibility()"""


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


def look(mark: Locator) -> tuple[str, str]:
    """The hue of a mark, and its second cue."""
    style = mark.evaluate("one => ({ ...getComputedStyle(one) })")
    return style["textDecorationColor"], f"{style['textDecorationLine']} {style['textDecorationStyle']}"


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


PAST = """all => all.map((one) => {
  const words = document.createRange();
  words.selectNodeContents(one);
  return words.getBoundingClientRect().right - one.closest("ol").getBoundingClientRect().right;
})"""


def past(figures: Locator) -> float:
    """By how many pixels words in a list of bars stand outside of it, at most."""
    return max(figures.evaluate_all(PAST))


IMPORT = "async ([file, name, args]) => (await import(file))[name](...args)"


def call(page: Page, file: str, name: str, *args: Any) -> Any:
    """The result of an exported function of one of the page's scripts."""
    return page.evaluate(IMPORT, [f"/playground/{read_files().address}/{file}", name, args])
