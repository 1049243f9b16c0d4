"""Traces as files: they go out and come back, and what a stranger wrote into one is text, or refused in a line."""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.playground.asking import HOSTILE, MARKUP, overflow
from tests.playground.conftest import Visit
from tests.playground.recorded import RecordedServer, recording
from tests.playground.test_hood import STEPS, bars, exported, inside, shaped


def reopen(opened: Visit, file: Path) -> Page:
    """Open a trace in a page that was loaded anew."""
    page = opened.page
    page.reload()
    page.click("#tab-hood")
    page.set_input_files("#h-file", file)
    return page


def test_a_trace_goes_out_and_comes_back(opened: Visit, recorded: RecordedServer, tmp_path: Path) -> None:
    page = inside(opened, recorded, shaped(recording(STEPS)))
    charts = ("acceptance", "tokens", "shapes")
    before = [bars(page, chart) for chart in charts]
    file = exported(page, tmp_path)
    data = json.loads(file.read_text())
    assert data["format"] == "tidar-trace/1"
    assert data["asked"] == "Go on"
    assert data["seed"] == "18446744073709551615"
    assert [step["text"] for step in data["steps"]] == [step.delta for step in STEPS]
    page = reopen(opened, file)
    expect(page.locator("[data-origin]")).to_contain_text("Nothing in it was measured here.")
    expect(page.locator("#h-which option")).to_contain_text("File: Chat (full): Go on")
    assert [bars(page, chart) for chart in charts] == before
    assert json.loads(exported(page, tmp_path).read_text()) == data


def trace_file(steps: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "format": "tidar-trace/1",
        "title": "Chat",
        "asked": "Go on",
        "made": "2026-11-20T10:00:00.000Z",
        "model": {"id": "m"},
        "settings": {"drafts": "full"},
        "seed": None,
        "finish": "stop",
        "steps": steps,
        **fields,
    }


def traced(text: str, drafted: list[str], accepted: int, anchor: str, **fields: Any) -> dict[str, Any]:
    return {
        "at": 1.0,
        "text": text,
        "logprobs": [{"token": text, "logprob": -0.1, "top_logprobs": [{"token": MARKUP[3], "logprob": -3}]}],
        "trace": {
            "step": 1,
            "t_ms": 1.0,
            "drafted": [{"id": 1, "text": one} for one in drafted],
            "accepted": accepted,
            "anchor": {"id": 2, "text": anchor},
            "block": 4,
            "proposals": [{"a": 1}],
            "used": 1,
            "rows": {"verify": 2, "mask": 4},
            "replica": MARKUP[4],
            **fields,
        },
    }


def test_a_file_of_a_stranger_is_text(opened: Visit, recorded: RecordedServer, tmp_path: Path) -> None:
    steps = [traced(text, [text, MARKUP[0] + MARKUP[1] + MARKUP[2]], 1, text) for text in HOSTILE]
    model = {"id": MARKUP[0], "dtype": MARKUP[1], "device": MARKUP[2]}
    polluted = {"__proto__": {"hidden": True}, "constructor": {"prototype": {"drafts": 1}}}
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(trace_file(steps, title=MARKUP[3], asked=MARKUP[4], model=model, **polluted)))
    page = reopen(opened, file)
    expect(page.locator("[data-origin]")).to_contain_text(MARKUP[0])
    expect(page.locator("#h-which option")).to_contain_text(MARKUP[3])
    shown = page.locator(".scrub-text")
    assert shown.text_content() == "".join(HOSTILE)
    for step in range(len(HOSTILE)):
        page.get_by_role("slider", name="Step", exact=True).fill(str(step))
        assert overflow(page) <= 0
    page.locator(".scrub-text .piece").first.hover()
    expect(page.locator("#t-hint")).to_contain_text(MARKUP[3])
    expect(page.locator("#t-hint")).to_contain_text(MARKUP[4])
    for place in ("#panel-hood", "#t-hint"):
        assert page.locator(f"{place} :is(img, script, h1, a, iframe, style, b)").count() == 0
    assert page.evaluate("({}).hidden === undefined && ({}).drafts === undefined")


WRONG = [
    ("{", "This file is no trace: it is not JSON."),
    ("[]", 'This file is no trace: its "format" is not "tidar-trace/1".'),
    ({"format": "tidar-trace/1"}, "This trace cannot be read: model is not an object."),
    (trace_file([]), "This trace holds no steps."),
    (trace_file("no"), "This trace cannot be read: steps is not a list of at most 200000."),  # type: ignore[arg-type]
    (
        trace_file([traced("x", ["a"], 2, "b")]),
        "This trace cannot be read: steps[0].trace.accepted is not at most the number of drafts.",
    ),
    (
        trace_file([traced("x", ["a"], 1, "b", block=10**6)]),
        "This trace cannot be read: steps[0].trace.block is not a block length.",
    ),
    (
        trace_file([traced("x", ["a"], 1, "b", proposals=[{"a": 9}])]),
        "This trace cannot be read: steps[0].trace.proposals is not a list of outcomes of this step.",
    ),
    (
        trace_file([traced("x", ["a"], 1, {"x": 1})]),  # type: ignore[arg-type]
        "This trace cannot be read: steps[0].trace.anchor.text is not a text.",
    ),
    (
        trace_file([traced("x", ["a"], 1, "b", t_ms=3.0), {**traced("y", [], 0, "b"), "at": 0.5}]),
        "This trace cannot be read: steps[1].at is not behind the step before it.",
    ),
    (
        trace_file(
            [traced("x", ["a"], 1, "b")],
            model={
                "id": "m",
                "step_cost": {name: [4, 1] for name in ("rows", "trunk_ms", "head_ms", "adapter_ms")},
            },
        ),
        "This trace cannot be read: step_cost is not a curve.",
    ),
]


def test_a_file_that_is_no_trace_is_one_line(opened: Visit, tmp_path: Path) -> None:
    page = opened.page
    page.click("#tab-hood")
    for number, (content, line) in enumerate(WRONG):
        file = tmp_path / f"{number}.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        page.set_input_files("#h-file", file)
        expect(page.locator("#t-problem")).to_have_text(line)
        expect(page.locator(".scrubber")).to_be_hidden()
