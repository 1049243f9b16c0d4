"""The page's arithmetic, run in the browser that will run it: which token a character belongs to, and the numbers."""

import codecs
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

from playground.files import read_files
from tests.playground.asking import call


def token(text: str, kind: str = "held") -> dict[str, Any]:
    return {"text": text, "wait": text, "kind": kind, "id": 0}


def placed(page: Page, waiting: list[dict[str, Any]], delta: str) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """What `place` made of it: (text, texts of its tokens) of each piece, and what waits for text still."""
    result = call(page, "trace.js", "place", waiting, delta)
    pieces = [(piece["text"], [one["text"] for one in piece["tokens"]]) for piece in result["pieces"]]
    return pieces, [one["wait"] for one in result["waiting"]]


@pytest.mark.parametrize(
    ("tokens", "delta", "pieces", "waiting"),
    [
        (["The", " cat"], "The cat", [("The", ["The"]), (" cat", [" cat"])], []),
        (["The", " cat"], "The c", [("The", ["The"]), (" c", [" cat"])], ["at"]),
        (["The"], "", [], ["The"]),
        ([], "tail", [("tail", [])], []),
        # A character of three tokens, spelled as the bytes read alone, or empty until it is whole.
        (["a", "\ufffd", "\ufffd", " b"], "a😀 b", [("a", ["a"]), ("😀", ["\ufffd", "\ufffd"]), (" b", [" b"])], []),
        (["a", "", "", "😀", " b"], "a😀 b", [("a", ["a"]), ("😀", ["", "", "😀"]), (" b", [" b"])], []),
        (["a\ufffd", "\ufffdb"], "aéb", [("aéb", ["a\ufffd", "\ufffdb"])], []),
        (["a\ufffd"], "a", [("a", ["a\ufffd"])], ["\ufffd"]),
        # A token that reads like the character before it.
        (["\ufffd", "\ufffd", "\x80"], "\x80\x80", [("\x80", ["\ufffd", "\ufffd"]), ("\x80", ["\x80"])], []),
        # A special token has a name, and no text in the answer.
        (["<|im_start|>", "user"], "user", [("user", ["user"])], []),
        # A character that the model really spelled U+FFFD.
        (["\ufffd", "x"], "\ufffdx", [("\ufffd", ["\ufffd"]), ("x", ["x"])], []),
        # Nothing agrees: all of it is one piece.
        (["abc", "def"], "uvw", [("uvw", ["abc", "def"])], []),
    ],
)
def test_text_is_laid_onto_its_tokens(
    blank: Page, tokens: list[str], delta: str, pieces: list[tuple[str, list[str]]], waiting: list[str]
) -> None:
    assert placed(blank, [token(text) for text in tokens], delta) == (pieces, waiting)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[str], str]]:
    """An answer as the server sends it: text cut into tokens anywhere, in the middle of characters too; each step
    has the texts of its tokens, in one of the two spellings, and the text that was whole by then."""
    text = draw(st.text(st.characters(codec="utf-8") | st.sampled_from("aé漢😀‍\ufffd"), max_size=24))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=16)))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    alone = draw(st.booleans())
    spelling, released = codecs.getincrementaldecoder("utf-8")(), codecs.getincrementaldecoder("utf-8")()
    answer = []
    while tokens:
        size = draw(st.integers(1, 4))
        step, tokens = tokens[:size], tokens[size:]
        texts = [one.decode("utf-8", "replace") if alone else spelling.decode(one) for one in step]
        answer.append((texts, released.decode(b"".join(step))))
    return answer


@settings(max_examples=150, deadline=None)
@given(answer=steps())
def test_no_character_is_lost_or_changed(blank: Page, answer: list[tuple[list[str], str]]) -> None:
    waiting: list[dict[str, Any]] = []
    for texts, delta in answer:
        fresh = [token(text) for text in texts]
        result = call(blank, "trace.js", "place", waiting + fresh, delta)
        assert "".join(piece["text"] for piece in result["pieces"]) == delta
        assert all(piece["text"] for piece in result["pieces"])
        assert all(piece["tokens"] for piece in result["pieces"]), "every character has a token behind it"
        waiting = result["waiting"]


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.text("ab é漢", min_size=1, max_size=4), min_size=1, max_size=8), hold=st.integers(0, 9))
def test_whole_tokens_each_have_a_piece(blank: Page, words: list[str], hold: int) -> None:
    """Where no character is cut, text held back for a while still ends up at the token it came from."""
    text = "".join(words)
    first = text[: max(0, len(text) - hold)]
    tokens = [{**token(word), "id": number} for number, word in enumerate(words)]
    begun = call(blank, "trace.js", "place", tokens, first)
    rest = call(blank, "trace.js", "place", begun["waiting"], text[len(first) :])
    shown = [""] * len(words)
    for piece in begun["pieces"] + rest["pieces"]:
        (one,) = piece["tokens"]
        shown[one["id"]] += piece["text"]
    assert shown == words


def trace(step: int, drafted: list[str], accepted: int, anchor: str | None) -> dict[str, Any]:
    said = None if anchor is None else {"id": 9, "text": anchor}
    return {
        "step": step,
        "t_ms": 12.4,
        "drafted": [{"id": i, "text": text} for i, text in enumerate(drafted)],
        "accepted": accepted,
        "anchor": said,
    }


def test_a_step_is_told_apart(blank: Page) -> None:
    step = trace(3, ["a", "b", "c", "d"], 1, "x")
    kept = call(blank, "trace.js", "keptTokens", step)
    lost = call(blank, "trace.js", "rejectedTokens", step)
    assert [(one["text"], one["kind"], one["slot"]) for one in kept] == [("a", "held", 1), ("x", "own", 2)]
    assert [(one["text"], one["slot"], one["refused"]) for one in lost] == [
        ("b", 2, True),
        ("c", 3, False),
        ("d", 4, False),
    ]


def test_drafts_behind_a_stop_were_not_rejected(blank: Page) -> None:
    step = trace(3, ["a", "</s>", "c"], 2, None)
    assert [one["text"] for one in call(blank, "trace.js", "keptTokens", step)] == ["a", "</s>"]
    assert call(blank, "trace.js", "rejectedTokens", step) == []


COUNT = """async ([file, steps]) => {
  const { newTally, count, rates } = await import(file);
  const tally = newTally();
  tally.sentAt = 1000;
  steps.forEach(([trace, now]) => count(tally, trace, now));
  return [tally, rates(tally)];
}"""


def test_numbers(blank: Page) -> None:
    first = trace(0, [], 0, "a")
    steps = [(first, 1200), (trace(1, ["b", "c"], 2, "d"), 1450), (trace(2, ["e", "f"], 0, "g"), 2200)]
    file = f"/playground/{read_files().address}/trace.js"
    tally, rates = blank.evaluate(COUNT, [file, steps])
    assert rates == {
        "tokens": 5,
        "steps": 2,
        "stepTokens": 4,
        "perStep": 2.0,  # the token of step 0 is left out
        "acceptance": 0.5,
        "perSecond": 4.0,
        "firstToken": 200,
    }
    metrics = {
        "tidar": {"decode_steps": 3, "tokens_per_step": 1.5},
        "speculative_decoding": {"num_draft_tokens": 8, "draft_acceptance_rate": 0.25},
    }
    final = call(blank, "trace.js", "finalRates", tally, metrics, {"completion_tokens": 6})
    assert (final["tokens"], final["steps"], final["perStep"], final["acceptance"]) == (6, 3, 1.5, 0.25)
    assert final["stepTokens"] == 5  # 4.5
    assert call(blank, "trace.js", "finalRates", tally, None, None) == rates


def test_steps_that_came_with_the_first_token_are_no_speed(blank: Page) -> None:
    steps = [(trace(step, ["a", "b", "c"], 3, "d"), now) for step, now in ((1, 1200), (2, 1200), (3, 1210))]
    file = f"/playground/{read_files().address}/trace.js"
    _, rates = blank.evaluate(COUNT, [file, steps])
    assert rates["perSecond"] == pytest.approx(400)
    assert (rates["stepTokens"], rates["firstToken"]) == (12, 200)


def test_no_numbers_before_there_is_something_to_count(blank: Page) -> None:
    file = f"/playground/{read_files().address}/trace.js"
    _, rates = blank.evaluate(COUNT, [file, [(trace(0, [], 0, "a"), 1200)]])
    assert (rates["perStep"], rates["acceptance"], rates["perSecond"]) == (None, None, None)


@pytest.mark.parametrize(
    ("speed", "shown"),
    [(None, "–"), (0.04, "0.0"), (41.26, "41.3"), (99.96, "100"), (1234.5, "1,235"), (43210, "43.2K")],
)
def test_speeds_are_short_enough_to_read(blank: Page, speed: float | None, shown: str) -> None:
    rates = {"tokens": 1, "steps": 1, "perStep": None, "acceptance": None, "perSecond": speed, "firstToken": None}
    assert call(blank, "meters.js", "formatRates", rates)["perSecond"] == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n", "“ a\\n”"), ("\u202eabc", "“\\u202eabc”"), ("😀" * 60, "“" + "😀" * 40 + "…”"), ("<b>", "“<b>”")],
)
def test_quotes_show_what_cannot_be_seen(blank: Page, text: str, shown: str) -> None:
    assert call(blank, "trace.js", "quoted", text) == shown


PARSE = """async ([file, parts]) => {
  const parser = new (await import(file)).EventParser();
  return parts.flatMap((part) => parser.push(part));
}"""


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=8), max_size=5),
    ending=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_events_survive_any_cut(blank: Page, events: list[str], ending: str, cuts: list[int]) -> None:
    stream = "".join(f": ping{ending}event: x{ending}data: {one}{ending}{ending}" for one in events)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[a:b] for a, b in pairwise(places)]
    file = f"/playground/{read_files().address}/stream.js"
    assert blank.evaluate(PARSE, [file, parts]) == events


def test_bodies_say_what_was_chosen(blank: Page) -> None:
    chosen = {"drafts": "full", "maxTokens": 64, "block": 4, "temperature": 0.8, "topP": 0.95, "topK": 50, "seed": "7"}
    body = blank.evaluate("(text) => JSON.parse(text)", call(blank, "stream.js", "chatBody", "m", [], chosen))
    assert body == {
        "model": "m",
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 64,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 50,
        "seed": 7,
        "tidar": {"trace": True, "drafts": "full", "block": 4},
    }


@pytest.mark.parametrize(
    ("seed", "number"), [(str(2**64 - 1), 2**64 - 1), (str(-(2**63)), -(2**63)), ("007", 7), ("-007", -7), ("00", 0)]
)
def test_a_seed_keeps_its_64_bits(blank: Page, seed: str, number: int) -> None:
    chosen = {
        "drafts": "off",
        "maxTokens": 1,
        "block": 4,
        "temperature": 0,
        "topP": 1,
        "topK": 0,
        "seed": seed,
    }
    text = call(blank, "stream.js", "chatBody", "m", [], chosen)
    assert json.loads(text)["seed"] == number
    assert '"block"' not in text, "no drafts, no block"
    assert json.loads(text)["top_k"] == 0, "off, whatever the server takes where nothing is said"
