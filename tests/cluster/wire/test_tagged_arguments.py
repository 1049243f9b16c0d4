"""Calls whose arguments stand in tags of their own, as Qwen3-Coder writes them."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.card import tokenizer_backend
from cluster.carry.handover import Carrier, Update
from cluster.ingress.api import build_api
from cluster.options import ServeOptions
from cluster.wire.schema_types import Values
from cluster.wire.tagged_arguments import LONGEST_KEY, TaggedArguments, json_of
from cluster.wire.tool_calls import QWEN_CODER, CallDelta, ToolParser, begun_call
from tests.cluster.ingress.test_answering import Replaced, ask
from tests.cluster.wire.test_schemas import card_for
from tests.cluster.wire.test_tool_calls import FUNCTIONS, cuts_of, parsed
from tests.cluster.wire.test_tools import TOOLS
from tests.tiny import QWEN_CODER_TEMPLATE, tool_tokenizer
from tidar_core.request import Finish, FinishReason, Request, StepOutput


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it."""
    spelled = {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
        for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in spelled.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


TAGS = ("</parameter>", "<parameter=", "</tool_call>")  # which end a value where they stand in a text
TEXTS = st.text(alphabet='ab<>/="\\\n\té parmet', max_size=20).filter(lambda text: not any(map(text.count, TAGS)))
ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "sure": st.booleans(),
        "maybe": st.none() | TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
        "list": st.lists(TEXTS | st.none(), max_size=3),
        "either": st.lists(st.integers(), max_size=2) | st.text(alphabet="ab\n", max_size=5),
        "none of its own": st.lists(st.integers()) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    },
)


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    calls=st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS), min_size=1, max_size=3),
)
def test_what_a_model_writes_comes_out_however_it_is_cut(
    data: st.DataObject, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    text = "Well." + "".join("\n" + written(*call) for call in calls)
    said, found, complete, _ = parsed(data.draw(cuts_of(text)), QWEN_CODER)
    assert (said, complete) == ("Well.", True)
    read = [(name, json.loads(arguments)) for _, name, arguments in found]
    assert repr(read) == repr(calls), "of the same types, and in the same order"
    assert parsed(data.draw(cuts_of(text)), QWEN_CODER, parallel=False)[1] == found[:1]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "<function=none>", "</function>", "<parameter=text>",
    "<parameter=count>", "<parameter=", "</parameter>", "\n", "\n", " ", "<", ">", "12", "null", '"', "\\", "[1", "]",
    "a" * LONGEST_KEY, "</parameter>\n", "<tool_call>\n<function=add>\n",
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(data=st.data(), parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), parallel=st.booleans())
def test_any_text_comes_out_the_same_however_it_is_cut(data: st.DataObject, parts: list[str], parallel: bool) -> None:
    text = "".join(parts)
    whole = parsed([text], QWEN_CODER, parallel)[:3]
    assert parsed(data.draw(cuts_of(text)), QWEN_CODER, parallel)[:3] == whole
    assert parsed(list(text), QWEN_CODER, parallel)[:3] == whole
    _, calls, complete = whole
    for _, _, arguments in calls if complete else calls[:-1]:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert whole[0] == text, "where there is no call, nothing is lost"


def test_a_text_comes_as_it_is_written_and_anything_else_when_it_is_whole() -> None:
    parser = ToolParser(QWEN_CODER, FUNCTIONS, True, lambda: "call")
    assert parser.push("<tool_call>\n<function=add>") == (CallDelta(0, "", "call", "add"),)
    assert parser.push("\n<parameter=text>\nOne\n") == (CallDelta(0, '{"text": "One'),)
    assert parser.push('"two"\n</param') == (CallDelta(0, '\\n\\"two\\"'),)
    assert parser.in_arguments
    assert parser.push("eter>\n<parameter=count>\n1") == (CallDelta(0, '", "count": '),)
    assert parser.push("2\n</parameter>\n") == (CallDelta(0, "12"),)
    assert not parser.complete
    assert parser.push("</function>\n</tool_call>") == (CallDelta(0, "}"),)
    assert parser.complete


CALL = "<tool_call>\n<function=add>\n"


@pytest.mark.parametrize(
    ("behind", "arguments"),
    [
        ("</function>\n</tool_call>", {}),
        ("<parameter=text>\n</parameter>\n</function>\n</tool_call>", {"text": ""}),
        ("<parameter=text>\n\n</parameter>\n</function></tool_call>", {"text": ""}),
        ("<parameter=text>\na</parameter></function></tool_call>", {"text": "a"}),
        ("<parameter=count>1</parameter><parameter=text>a</parameter></function></tool_call>",
         {"count": 1, "text": "a"}),
        ("<parameter=text>\na</parameter>\n</tool_call>", {"text": "a"}),
        ("<parameter=text>\n</parameter>\n</tool_call>", {"text": ""}),
        ("<parameter=text>a</parameter>\n</function>\n</tool_call>", {"text": "a"}),
        ("<parameter=text>\n<parameter>1</parameter>\n</parameter>\n</function>\n</tool_call>",
         {"text": "<parameter>1</parameter>"}),
        ("<parameter=text>\na\n<parameter=count>\n3\n</function>\n</tool_call>", {"text": "a", "count": 3}),
        ("<parameter=text>\na\n</tool_call>", {"text": "a"}),
        ("<parameter=text>\na\n</parameter>\n</tool_call>", {"text": "a"}),
        ("<parameter=count>\n1\n</parameter>\nand <parameter=count>\n2\n</parameter></function></tool_call>",
         {"count": 1}),
        ("<parameter=count\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>", {"count": 1}),
    ],
)  # fmt: skip
def test_tags_that_are_missing_or_come_again(behind: str, arguments: dict[str, Any]) -> None:
    said, calls, complete, _ = parsed(list(CALL + behind), QWEN_CODER)
    assert (said, complete) == ("", True)
    assert [json.loads(told) for _, _, told in calls] == [arguments]


def test_a_call_that_was_cut_is_not_complete() -> None:
    cut = f"{CALL}<parameter=count>\n3\n</parameter>\n<parameter=text>\nOn"
    said, calls, complete, _ = parsed([cut], QWEN_CODER)
    assert (said, calls, complete) == ("", [("call_0", "add", '{"count": 3, "text": "On')], False)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        f"<tool_call>\n<function={'a' * 70}>\n",
        "<tool_call>\n<funct",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert parsed(list(text), QWEN_CODER)[:2] == (text, [])


@pytest.mark.parametrize(
    ("text", "types", "told"),
    [
        ("3", {"integer"}, "3"),
        ("3.50", {"number"}, "3.50"),
        ("True", {"boolean"}, "true"),
        ("three", {"integer"}, '"three"'),
        ("NaN", {"number"}, '"NaN"'),
        ("3", {"integer", "string"}, '"3"'),
        ("None", {"string", "null"}, "null"),
        ("None", {"string", "integer"}, '"None"'),
        ('["a"]', {"string", "array"}, '["a"]'),
        ("[a]", {"string", "array"}, '"[a]"'),
        ('["a"]', {"string", "object"}, '"[\\"a\\"]"'),
        ("[" * 100_000, {"array"}, f'"{"[" * 100_000}"'),
        ('"a"', {"integer"}, '"\\"a\\""'),
    ],
)
def test_a_value_is_told_by_its_types(text: str, types: set[str], told: str) -> None:
    assert json_of(text, Values(frozenset(types), None)) == told


def test_a_listed_text_is_one_and_anything_else_is_not() -> None:
    values = Values(frozenset({"string", "integer", "null"}), frozenset({"auto", "5", "null"}))
    told = {text: json_of(text, values) for text in ("auto", "5", "6", "null", "None", "many")}
    assert told == {"auto": '"auto"', "5": '"5"', "6": "6", "null": '"null"', "None": "null", "many": '"many"'}


def test_a_value_of_an_answer_that_is_held_to_its_tags_ends_with_these_alone() -> None:
    value = "a</parameter></function>\n<parameter=c>\n</tool_call>"
    text = f"{CALL}<parameter=text>\n{value}\n</parameter>\n<parameter=list>\n{json.dumps([value])}\n</parameter>\n"
    _, calls, complete, _ = parsed(list(f"{text}</function>\n</tool_call>"), QWEN_CODER, constrained=True)
    assert ([json.loads(told) for _, _, told in calls], complete) == ([{"text": value, "list": [value]}], True)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("size", [1, 10_000])
def test_what_begins_like_a_parameter_and_has_too_long_a_name_is_none(more: int, size: int) -> None:
    key = "k" * (LONGEST_KEY + more)
    text = f"<parameter={key}>\n1\n</parameter>\n<parameter=text>\nx\n</parameter>\n</function>"
    arguments = TaggedArguments({})
    told = [arguments.read(text[place : place + size]) for place in range(0, len(text), size)]
    assert told[-1][1] == ""
    assert json.loads("".join(part for part, _ in told)) == ({} if more else {key: 1}) | {"text": "x"}


def test_parameters_beyond_those_named_are_of_the_schema_for_these() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    told, _ = TaggedArguments(schema).read(
        "<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>"
    )
    assert json.loads(told) == {"a": 1, "b": "1"}


def test_a_parameter_that_the_schema_does_not_name_is_json_where_it_can_be() -> None:
    values = {"12": 12, "-1e3": -1000.0, "[1]": [1], '{"a": 1}': {"a": 1}, "False": False, "null": None, "a b": "a b"}
    for text, value in values.items():
        for schema in ({}, {"properties": []}, {"properties": {"a": {}}}, None):
            told, behind = TaggedArguments(schema).read(f"<parameter=a>\n{text}\n</parameter>\n</function>.")
            assert (json.loads(told), behind) == ({"a": value}, ".")


def test_references_are_followed() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": ["1", "2"]}}}
    told, _ = TaggedArguments(schema).read("<parameter=a>\n1\n</parameter>\n</function>")
    assert json.loads(told) == {"a": "1"}


def test_a_call_that_was_begun_before_the_answer_is_told_whole() -> None:
    """Wherever the answer begins."""
    first, second = ("say", {"text": "a\n<tool_call>\nb", "count": 1}), ("add", {"list": [1]})
    both = f"Well: {written(*first)}\n{written(*second)}"
    ends = [len(f"Well: {written(*first)}"), len(both)]
    for place in range(len("Well: "), len(both)):
        said, rest = both[:place], both[place:]
        begun = begun_call(QWEN_CODER, FUNCTIONS, said)
        text, calls, complete, _ = parsed(list(rest), QWEN_CODER, begun=begun)
        assert (text, complete) == ("", True), said
        over = sum(end <= place for end in ends)
        assert [(name, json.loads(told)) for _, name, told in calls] == [first, second][over:], said
        assert begun.startswith("<tool_call>") or "<function=" not in begun, said


def test_a_long_value_costs_no_more_than_other_text() -> None:
    began = time.process_time()
    for key in ("text", "list"):
        pieces = [f"{CALL}<parameter={key}>\n", *["</parameter " * 10] * 4000, "\n</parameter>\n</function>"]
        _, calls, _, _ = parsed(pieces, QWEN_CODER)
        assert json.loads(calls[0][2]) == {key: "</parameter " * 40_000}
    assert time.process_time() - began < 10  # minutes, from its beginning at each piece


# From here on: whole requests, with what the model says put in its place.

SAID = written("weather", {"city": 'Köln "am Rhein"', "days": 2}) + "\n" + written("now", {})
CALLS = [("weather", '{"city": "Köln \\"am Rhein\\"", "days": 2}'), ("now", "{}")]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    card = card_for(tool_tokenizer(QWEN_CODER_TEMPLATE), max_model_len=2048)
    tokens = tokenizer_backend(card).encode(SAID, add_special_tokens=False).ids

    async def run(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
        for place, token in enumerate(tokens):
            finish = Finish(FinishReason.STOP) if place == len(tokens) - 1 else None
            yield Update("r1", (StepOutput(request.request_id, (token,), finish=finish),))

    monkeypatch.setattr(Carrier, "run", run)
    return build_api({"tiny": Replaced(card, comes=True)}, ServeOptions())


def events(answer: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def test_a_chat_tells_the_calls(api: FastAPI) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    (choice,) = asyncio.run(ask(api, "chat/completions", asked)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    made = [one["function"] for one in choice["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in made] == CALLS
    chunks = events(asyncio.run(ask(api, "chat/completions", asked | {"stream": True})))
    told: dict[int, list[str]] = {}
    for one in chunks:
        for choice in one["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                told.setdefault(delta["index"], [delta["function"].get("name")]).append(delta["function"]["arguments"])
    assert [(name, "".join(parts)) for name, *parts in told.values()] == CALLS
    assert len(told[0]) > 8, "as the text comes"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_response_has_the_calls_as_items(api: FastAPI) -> None:
    tools = [{"type": "function", "strict": False, **one["function"]} for one in TOOLS]
    asked = {"input": "a", "tools": tools}
    output = asyncio.run(ask(api, "responses", asked)).json()["output"]
    assert [(one["name"], one["arguments"]) for one in output if one["type"] == "function_call"] == CALLS
    told = events(asyncio.run(ask(api, "responses", asked | {"stream": True})))
    done = [one["arguments"] for one in told if one["type"] == "response.function_call_arguments.done"]
    assert done == [arguments for _, arguments in CALLS]
