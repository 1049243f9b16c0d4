"""Calls of tools found in text, however it is cut."""

import json
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.wire.tool_calls import HERMES, LLAMA, MISTRAL, CallDelta, ToolFormat, ToolParser, begun_call

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "sure": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array"},
        "either": {"type": ["string", "array"]},
    },
}
FUNCTIONS: dict[str, Any] = {"add": SCHEMA, "say": SCHEMA}
Call = tuple[str, str, str]  # id, name, arguments


FORMS = (HERMES, LLAMA, MISTRAL)


def parsed(
    pieces: list[str],
    form: ToolFormat = HERMES,
    parallel: bool = True,
    begun: str = "",
    functions: Mapping[str, Any] = FUNCTIONS,
    constrained: bool = False,
) -> tuple[str, list[Call], bool, list[str]]:
    """Text, calls, whether the last call is complete, and the text of each push."""
    ids = count()
    parser = ToolParser(form, functions, parallel, lambda: f"call_{next(ids)}", begun, constrained)
    texts: list[str] = []
    calls: list[list[str]] = []
    outputs = [parser.push(piece) for piece in pieces]
    complete = parser.complete
    for told in (*outputs, parser.finish()):
        texts.append("".join(part for part in told if isinstance(part, str)))
        for delta in (part for part in told if isinstance(part, CallDelta)):
            if delta.id is not None:
                assert delta.index == len(calls)
                assert delta.name is not None
                calls.append([delta.id, delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                calls[-1][2] += delta.arguments
    return "".join(texts), [(one, name, arguments) for one, name, arguments in calls], complete, texts


def written(form: ToolFormat, name: str, arguments: str) -> str:
    return form.head(name) + arguments + form.tail


def answer_of(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    text = form.separator.join(written(form, *call) for call in calls)
    return f"[{text}]" if form.in_list else text


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab<>/{}[]"\\\n\u00e9 tool_call', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
arguments_of = st.dictionaries(st.text(alphabet='a"}\\</tool_call>', max_size=12), values, max_size=3)
spelled = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    arguments_of,
    st.booleans(),
    st.sampled_from([None, 1]),
)


@st.composite
def cuts_of(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral"])
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
@given(data=st.data(), calls=st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), spelled), min_size=1, max_size=3))
def test_what_a_model_writes_comes_out_however_it_is_cut(
    form: ToolFormat, data: st.DataObject, calls: list[tuple[str, str]]
) -> None:
    text = answer_of(form, calls)
    said, found, complete, _ = parsed(data.draw(cuts_of(text)), form)
    assert (said, complete) == ("", True)
    assert [(name, arguments) for _, name, arguments in found] == calls
    assert [number for number, _, _ in found] == [f"call_{index}" for index in range(len(calls))]
    _, first, _, _ = parsed(data.draw(cuts_of(text)), form, parallel=False)
    assert first == found[:1]


MARKS = ["<tool_call>", "</tool_call>", "<tool", "_call>", "</tool_call", "\n", " ", *'{}[]";,\\', "hello"]
OBJECTS = [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "none", "arguments": {}}',
    '{"arguments": {}, "name": "say"}',
    '{"name": "say", "parameters": "{}"}',
    '{"name": "say", "parameters": ',
    '{"name": "',
]
fragments = st.sampled_from(MARKS + OBJECTS)


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral"])
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
@given(data=st.data(), parts=st.lists(fragments, max_size=12), parallel=st.booleans())
def test_any_text_comes_out_the_same_however_it_is_cut(
    form: ToolFormat, data: st.DataObject, parts: list[str], parallel: bool
) -> None:
    text = "".join(parts)
    whole = parsed([text], form, parallel)[:3]
    assert parsed(data.draw(cuts_of(text)), form, parallel)[:3] == whole
    assert parsed(list(text), form, parallel)[:3] == whole
    if not whole[1]:
        assert whole[0] == text, "where there is no call, nothing is lost"


def test_text_before_and_between_calls_is_told_and_whitespace_around_them_is_not() -> None:
    one, two = written(HERMES, "add", "{}"), written(HERMES, "say", '{"a": "</tool_call>"}')
    said, calls, _, _ = parsed([f"Let me see.\n\n{one}\n and {two}\n\n{one}\n"])
    assert said == "Let me see.\n and"
    assert [name for _, name, _ in calls] == ["add", "say", "add"]


def test_arguments_and_text_come_as_they_are_written() -> None:
    ids = count()
    parser = ToolParser(HERMES, FUNCTIONS, True, lambda: str(next(ids)))
    assert parser.push("Well <") == ("Well",)  # the space waits with what may begin a call
    assert "".join(map(str, parser.push("b> <tool_call>\n{"))) == " <b>"
    begun, opened = parser.push('"name": "add", "arguments": {')
    assert isinstance(begun, CallDelta)
    assert (begun.name, begun.index, opened) == ("add", 0, CallDelta(0, "{"))
    assert parser.push('"a": "x') == (CallDelta(0, '"a": "x'),)
    assert parser.in_arguments
    assert not parser.complete
    rest, behind = parser.push('"}}</tool_call>\nSo.')
    assert (rest, behind) == (CallDelta(0, '"}'), "\nSo."), "in the order of the answer"
    assert parser.complete


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "say"}</tool_call>', "say", '{"a": 1}'),
        ('<tool_call>{"name": "say", "arguments": "{\\"a\\": 1}"}</tool_call>', "say", '{"a": 1}'),
        ('<tool_call>{"name":"say","parameters":{"a":1}}', "say", '{"a":1}'),
        ('<tool_call>{"name": "say", "arguments": ""}</tool_call>', "say", ""),
        ('<tool_call>{"name": "say", "arguments": {"a": 1}, "id": 3} </tool_call>', "say", '{"a": 1}'),
    ],
)
def test_other_spellings_of_a_call(text: str, name: str, arguments: str) -> None:
    said, calls, complete, _ = parsed(list(text))
    assert (said, calls, complete) == ("", [("call_0", name, arguments)], True)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": 3}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "three"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "[3]"}\n</tool_call>',
        "<tool_call>no</tool_call> ",
        '<tool_call>\n{"name": "ad',
        "a <tool_call",
        " ",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert parsed(list(text))[:2] == (text, [])


def test_a_call_that_was_cut_is_not_complete() -> None:
    said, calls, complete, _ = parsed(['<tool_call>\n{"name": "add", "arguments": {"a": "b'])
    assert (said, calls, complete) == ("", [("call_0", "add", '{"a": "b')], False)


def test_bare_objects_are_calls_only_where_the_answer_begins_with_one() -> None:
    call = written(LLAMA, "add", '{"a": 1}')
    assert parsed([f"I call {call}"], LLAMA)[:2] == (f"I call {call}", [])
    said, calls, _, _ = parsed(list(f" {call};{call}\nDone."), LLAMA)
    assert (said, len(calls)) == ("\nDone.", 2)
    assert parsed(list('{"answer": 42}'), LLAMA)[:2] == ('{"answer": 42}', [])


def test_a_list_is_of_calls_where_the_answer_begins_with_one() -> None:
    one, two = ('{"name": "add", "arguments": {"a": 1}, "id": "abc123def"}', '{"name": "say", "arguments": {}}')
    said, calls, complete, _ = parsed(list(f" [{one},\n{two}]\n"), MISTRAL)
    assert (said, [call[1:] for call in calls], complete) == ("", [("add", '{"a": 1}'), ("say", "{}")], True)
    for text in ("[1, 2]", one, f"Well: [{one}]", '[{"a": 1}]', '["add"]', "[", "[]"):
        assert parsed(list(text), MISTRAL)[:2] == (text, [])


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral"])
def test_where_only_calls_may_come_one_that_is_cut_before_it_began_is_no_text(form: ToolFormat) -> None:
    first = ("say", '{"words": "a"}')
    answer = answer_of(form, [first, ("add", '{"a": 1}')])
    for place in range(answer.index(first[1]) + 1, len(answer) + 1):
        parser = ToolParser(form, FUNCTIONS, True, str, constrained=True, alone=True)
        told = [*parser.push(answer[:place]), *parser.finish()]
        assert [part for part in told if isinstance(part, str)] == [], answer[:place]
        assert parser.calls == 1 + (answer.rindex('{"a"') < place)


def test_a_run_of_white_space_costs_no_more_than_other_text() -> None:
    """It is held back, since a call may follow, and must not be looked through from each of its characters."""
    began = time.process_time()
    text, calls, _, _ = parsed(["a", *[" " * 50] * 2000, "b"])
    assert (text, calls) == ("a" + " " * 100_000 + "b", [])
    assert time.process_time() - began < 5  # minutes, from each character


def test_a_name_that_never_ends_costs_no_more_than_other_text() -> None:
    began = time.process_time()
    text, calls, _, _ = parsed(['<tool_call>{"name": "', *["a" * 50] * 4000])
    assert (len(text), calls) == (200_021, [])
    assert time.process_time() - began < 10  # twice that, from the beginning at each token


@pytest.mark.parametrize("arguments", [r'{"a": "\ud800"}', r'"{\"a\": \"\ud800\"}"'])
def test_a_call_whose_arguments_are_no_text_is_none(arguments: str) -> None:
    said = f'<tool_call>{{"arguments": {arguments}, "name": "add"}}</tool_call>'
    text, calls, _, _ = parsed([said])
    assert (text, calls) == (said, [])


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral"])
def test_a_call_that_was_begun_before_the_answer_is_told_whole(form: ToolFormat) -> None:
    """Wherever the answer begins."""
    first, second = ("say", '{"words": "<tool_call>\\n{ "}'), ("add", '{"a": [1, {}], "b": 2}')
    lead = "Well: " if form is HERMES else ""
    written_out = lead + answer_of(form, [first, second])
    ends = [written_out.index(written(form, *call)) + len(written(form, *call)) for call in (first, second)]
    for place in range(len(lead), len(written_out)):
        said, rest = written_out[:place], written_out[place:]
        begun = begun_call(form, FUNCTIONS, said)
        text, calls, complete, _ = parsed(list(rest), form, begun=begun)
        over = sum(end <= place for end in ends)
        if form is not HERMES and over:  # an answer that does not begin as calls do has none, before it or in it
            continue
        assert (text, complete) == ("", True), said
        assert [call[1:] for call in calls] == [first, second][over:], said


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral"])
def test_an_answer_that_goes_on_behind_text_or_a_whole_call_has_begun_none(form: ToolFormat) -> None:
    call = answer_of(form, [("add", '{"a": 1}')])
    for said in (call, call + form.between_calls, "Hello {", "Hello {} "):
        assert begun_call(form, FUNCTIONS, said).strip() == "", said


@pytest.mark.parametrize(
    ("said", "rest"),
    [
        ("Hello <tool", "box>!"),
        ("<tool_call>", "no object"),
        ("<tool_call>\n{", '"name": "other", "arguments": {}}\n</tool_call>'),
        ('<tool_call>\n{"name": "other", "arguments": {"a": ', "1}}\n</tool_call>"),
        ("<tool_call>\n{", '"a": 1} <tool_call>'),
        ("<tool_call>\n{", "cut"),
        ("Hello ", " you"),
    ],
)
def test_what_was_said_before_and_is_no_call_is_not_said_again(said: str, rest: str) -> None:
    text, calls, _, _ = parsed(list(rest), begun=begun_call(HERMES, FUNCTIONS, said))
    assert (text, calls) == (rest, [])
