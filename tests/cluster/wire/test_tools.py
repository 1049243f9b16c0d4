"""Tools: what requests may say of them, and how the model's template takes them."""

import json
from typing import Any

import pytest
import xgrammar
from transformers import PreTrainedTokenizerFast

from cluster.errors import ApiError
from cluster.wire.messages import short_id
from cluster.wire.prompts import read_body, render_chat
from cluster.wire.schemas import ChatBody
from cluster.wire.tool_calls import HERMES, LLAMA, MISTRAL, QWEN_CODER, ToolFormat
from cluster.wire.tools import Toolbox, tool_format, toolbox
from tests.cluster.wire.test_schemas import card_for
from tests.cluster.wire.test_structured import json_schema
from tests.tiny import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    MISTRAL_TEMPLATE,
    QWEN_CODER_TEMPLATE,
    tiny_tokenizer,
    tool_tokenizer,
)
from tidar_core.engine.grammars import Guard, token_table
from tidar_core.grammar.compiling import compile_grammar

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": parameters, **more}}


TOOLS = [tool("weather", WEATHER), tool("now")]
TURNS: list[Any] = [{"role": "user", "content": "How is the weather?"}]


def chat(**fields: Any) -> ChatBody:
    return read_body({"messages": TURNS, **fields}, ChatBody)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a"), tool("a")]}, "same name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [tool("a")] * 129}, "128"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "`other`"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "response_format"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refused(**fields).message


def made(arguments: str) -> Any:
    return {"id": "1", "function": {"name": "a", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "content is missing"),
        ({"role": "tool", "content": "3"}, "tool_call_id"),
        (
            {"role": "user", "content": "a", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{}"}}]},
            "",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "["}}]},
            "JSON object",
        ),
    ],
)
def test_messages_of_tools_that_cannot_be_read(message: dict[str, Any], said: str) -> None:
    assert said in refused(messages=[message]).message


HISTORY = [
    *TURNS,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES_TEMPLATE, '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'),
        (
            QWEN_CODER_TEMPLATE,
            "\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
        ),
        (LLAMA_TEMPLATE, '{"name": "weather", "parameters": {"city": "Köln"}}<|im_end|>'),
        (
            MISTRAL_TEMPLATE,
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "Köln"}}, "id": "{short_id("call_1")}"}}]',
        ),
    ],
)
def test_the_history_goes_through_the_models_own_template(template: str, call: str) -> None:
    card = card_for(tool_tokenizer(template))
    body = chat(messages=HISTORY, tools=TOOLS)
    text = render_chat(card, body)
    assert call in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert f'"parameters": {json.dumps(WEATHER, ensure_ascii=False)}' in text
    assert '"name": "now", "description": "nows", "parameters": {"type": "object", "properties": {}}' in text
    silent = chat(messages=HISTORY, tools=TOOLS, tool_choice="none")
    assert "nows" not in render_chat(card, silent)


def test_how_a_template_writes_calls_is_found_out() -> None:
    assert tool_format(tool_tokenizer(HERMES_TEMPLATE)) is HERMES
    assert tool_format(tool_tokenizer(LLAMA_TEMPLATE)) is LLAMA
    assert tool_format(tool_tokenizer(MISTRAL_TEMPLATE)) is MISTRAL
    assert tool_format(tool_tokenizer(QWEN_CODER_TEMPLATE)) is QWEN_CODER


def test_ids_are_made_short_for_a_template_that_takes_no_others() -> None:
    assert short_id("abc123DEF") == "abc123DEF"
    made = [short_id(one) for one in ("call_1", "call_2", "abc-23def", "")]
    assert len({*made}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in made)


def test_a_model_without_tools_says_so() -> None:
    plain, strange = tiny_tokenizer(), tool_tokenizer(HERMES_TEMPLATE.replace("<tool_call>", "<call>"))
    shown = tool_tokenizer(MISTRAL_TEMPLATE.replace("[TOOL_CALLS]", "[CALLS]"))
    for tokenizer, said in ((plain, "has no tools"), (strange, "not read here"), (shown, "not read here")):
        with pytest.raises(ApiError, match=said) as caught:
            boxed(tokenizer)
        assert (caught.value.status, caught.value.param) == (400, "tools")
        with pytest.raises(ApiError, match=said):
            render_chat(card_for(tokenizer), chat(messages=HISTORY))
    assert boxed(plain, tool_choice="none") is None
    assert boxed(plain, tools=[]) is None


def boxed(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Toolbox | None:
    body = chat(**{"tools": TOOLS, **fields})
    return toolbox(tokenizer, body.tools or (), body.tool_choice, True, body.response_format)


def test_a_schema_that_cannot_be_kept_is_refused_only_where_it_must_be() -> None:
    tools, tokenizer = [tool("a", {"not": {}})], tool_tokenizer()
    free = boxed(tokenizer, tools=tools)
    assert free is not None
    assert free.grammar is None
    for fields in ({"tool_choice": "required"}, {"tools": [tool("a", {"not": {}}, strict=True)]}):
        with pytest.raises(ApiError, match="`not` cannot be enforced"):
            boxed(tokenizer, **{"tools": tools, **fields})


@pytest.mark.parametrize(
    ("template", "opening"), [(LLAMA_TEMPLATE, "{"), (MISTRAL_TEMPLATE, "[")], ids=["llama", "mistral"]
)
def test_what_calls_without_tags_are_held_to(template: str, opening: str) -> None:
    tokenizer = tool_tokenizer(template)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([value]) for value in range(256)]))

    def takes(text: str, **fields: Any) -> bool:
        box = boxed(tokenizer, **fields)
        assert box is not None
        assert box.grammar is not None
        matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, box.grammar.kind, box.grammar.text))
        return bool(matcher.accept_string(text)) and matcher.is_completed()

    form = tool_format(tokenizer)
    weather, now = (form.head(name) + of + form.tail for name, of in (("weather", FITS), ("now", "{}")))
    one, both = answers_of(form, [now]), answers_of(form, [weather, now])
    strict: Any = {"tools": [tool("weather", WEATHER), tool("now", strict=True)]}
    assert takes(both, tool_choice="required")
    assert takes(one, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not takes("Well.", tool_choice="required")
    assert not takes(both, tool_choice={"type": "function", "function": {"name": "now"}})
    for text in (one, both, "Well.", "", f"Well: {one}", answers_of(form, [form.head("weather") + "{}" + form.tail])):
        assert takes(text, **strict)
    assert takes(now, **strict) or not form.in_list, "no call, since it stands in no list"
    for text in (f"{opening}a", answers_of(form, [form.head("now") + '{"a": 1}' + form.tail])):
        assert not takes(text, **strict)
    assert takes('{"a": 1}', response_format={"type": "json_object"})
    assert takes(both, response_format={"type": "json_object"})


FITS = '{"city": "Köln", "days": 2}'


def answers_of(form: ToolFormat, calls: list[str]) -> str:
    text = form.separator.join(calls)
    return f"[{text}]" if form.in_list else text


# Each of which leads twice to the next.
DOUBLING = {
    "$ref": "#/$defs/0",
    "$defs": {str(place): {"anyOf": [{"$ref": f"#/$defs/{place + 1}"}] * 2} for place in range(30)}
    | {"30": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "string", "enum": ["x"]},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "object"}, {"type": "integer"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/b", "$defs": {"a": {"type": "object"}}},
        {"minimum": 3},
        {"const": 3},
    ],
)
def test_parameters_that_are_no_object_are_refused_where_calls_are_held_to_them(parameters: dict[str, Any]) -> None:
    """The call could not be told from the answer."""
    tools, tokenizer = [tool("a", parameters)], tool_tokenizer()
    assert boxed(tokenizer, tools=tools) is not None
    for fields in ({"tool_choice": "required"}, {"tools": [tool("a", parameters, strict=True)]}):
        with pytest.raises(ApiError, match="`parameters` of a must be the schema of an object") as caught:
            boxed(tokenizer, **{"tools": tools, **fields})
        assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "required": [], "minProperties": 0},
        {"propertyNames": {"maxLength": 3}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}}},
        DOUBLING,
        {"properties": {"a": {"type": "integer"}}},
        {"anyOf": [{"type": "object", "properties": {}}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": ["object"]}}},
        {"enum": [{"a": 1}]},
    ],
)
def test_parameters_of_objects_are_taken_however_they_are_written(parameters: dict[str, Any] | None) -> None:
    box = boxed(tool_tokenizer(), tools=[tool("a", parameters)], tool_choice="required")
    assert box is not None
    assert box.grammar is not None


def test_an_asked_format_that_cannot_be_kept_is_no_fault_of_the_tools() -> None:
    with pytest.raises(ApiError, match="response_format: `not` cannot be enforced") as caught:
        boxed(tool_tokenizer(), response_format=json_schema({"not": {}}))
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def of_usual_size(place: int) -> dict[str, Any]:
    """A schema of 900 bytes, most of which tell the model what it is for."""
    about = f"Which of the {place} one wants, and in what it differs from the others. " * 3
    wanted = {
        "type": "object",
        "title": f"Wanted{place}",
        "properties": {
            "description": {"type": "string", "description": about, "default": "none", "examples": ["some", "more"]},
            "count": {"type": "integer", "minimum": 0, "maximum": place + 9, "description": about},
            "kind": {"enum": ["title", "default"], "description": about},
        },
        "required": ["description", "count"],
        "additionalProperties": False,
    }
    assert len(json.dumps(wanted)) > 900
    return wanted


def test_as_many_tools_as_may_be_are_held_to_their_schemas() -> None:
    """With what their schemas tell the model, which is nothing that an answer has to follow."""
    tools, tokenizer = [tool(f"f{place}", of_usual_size(place), strict=True) for place in range(128)], tool_tokenizer()
    for fields in ({"tool_choice": "required"}, {}, {"response_format": json_schema({"title": "any"})}):
        box = boxed(tokenizer, **{"tools": tools, **fields})
        assert box is not None
        assert box.grammar is not None
        assert "differs from the others" not in box.grammar.text
        assert '"title": "' not in box.grammar.text
    guard = Guard(token_table(tokenizer, 512, (2, 0)).serialize_json())
    assert guard.problem_with(box.grammar) is None
    assert "differs from the others" in str(read_body({"messages": TURNS, "tools": tools}, ChatBody).tools)
