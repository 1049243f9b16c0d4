"""A thousand tokens a second, and the page still draws more than thirty frames."""

import time

from playwright.sync_api import expect

from tests.playground.asking import TEXT, TOKENS, ask, shown
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, plain_steps, recording

FRAMES = """() => {
  window.frames_seen = 0;
  const next = () => { window.frames_seen += 1; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""


def test_a_thousand_tokens_a_second_stay_smooth(opened: Visit, recorded: RecordedServer) -> None:
    steps = plain_steps(TOKENS * 200)  # 2,800 tokens
    tokens = sum(step.accepted + 1 for step in steps)
    recorded.play(recording(steps, pause=len(TOKENS) * 200 / 1000 / len(steps)))
    page = opened.page
    page.evaluate(FRAMES)
    begun, frames = time.monotonic(), page.evaluate("window.frames_seen")
    ask(page, "Go")
    opened.settle()
    took = time.monotonic() - begun
    drawn = (page.evaluate("window.frames_seen") - frames) / took
    assert shown(page) == TEXT * 200
    print(f"{tokens / took:.0f} tokens/s at {drawn:.0f} frames/s")
    assert tokens / took > 700, "the page kept up with the stream"
    assert drawn > 30
    latest = page.locator(".answer-text .line").last
    expect(latest).to_be_in_viewport()
