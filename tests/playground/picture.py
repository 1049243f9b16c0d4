"""Takes the README's picture of the page: `python -m tests.playground.picture URL`, with `tidar up` running there."""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.playground.conftest import launch, visit

TARGET = Path(__file__).parents[2] / ".github" / "playground.png"
QUESTION = "Write a Python function that returns the factorial of n."


def take(browser: Browser, address: str) -> None:
    """An answer of the model served at `address`, as it grows, with its rejected drafts kept and a token explained."""
    context = browser.new_context(viewport={"width": 1200, "height": 860}, device_scale_factor=1.5)
    page = visit(context, address).page
    page.locator("label:has(> [value=keep])").click()
    page.fill("#t-block", "3")  # fewer rejected drafts than the whole block has: the picture stays readable
    page.fill("#t-prompt", QUESTION)
    page.press("#t-prompt", "Enter")
    page.wait_for_selector(".facts", timeout=300_000)
    page.evaluate("scrollTo(0, 0)")
    page.locator(".answer-text .line:last-child .ghosts + .own .ink").nth(4).hover()
    TARGET.parent.mkdir(exist_ok=True)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    context.close()


def main() -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        if browser is None:
            sys.exit("no Chromium found")
        take(browser, sys.argv[1].rstrip("/"))
        browser.close()
    print(f"{TARGET}: {TARGET.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
