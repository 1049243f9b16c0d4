"""Tools: what requests may say of them, how the model's template takes them, and what a real server makes of them."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import xgrammar
from transformers import PreTrainedTokenizerFast

from cluster.errors import ApiError
from cluster.wire.messages import short_id
from cluster.wire.prompts import read_body, render_chat
from cluster.wire.schemas import ChatBody
from cluster.wire.tool_calls import HERMES, LLAMA, MISTRAL, QWEN_CODER, ToolFormat
from cluster.wire.tools import Toolbox, tool_format, toolbox
from tests.cluster.guarded import Guarded
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


# From here on: the openai package against a real server.


@pytest.fixture(scope="module")
def client(guarded: Guarded) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=guarded.key, max_retries=0, timeout=120) as made:
        yield made


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def check(name: str, arguments: str) -> None:
    assert name in ("weather", "now")
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"maxProperties": 0})


def streamed(client: openai.OpenAI, **body: Any) -> list[tuple[str, list[list[str]], str | None]]:
    """Of each choice: its text, its calls (id, name, arguments), how it ended."""
    told: list[tuple[list[str], list[list[str]], list[str | None]]] = [([], [], []) for _ in range(body.get("n", 1))]
    for chunk in client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            text, calls, ends = told[choice.index]
            text.append(choice.delta.content or "")
            ends.append(choice.finish_reason)
            deltas = choice.delta.tool_calls or []
            assert len({delta.index for delta in deltas}) == len(deltas), "some clients read one for each call a chunk"
            for delta in deltas:
                assert delta.function is not None
                if delta.id:
                    assert (delta.index, delta.type) == (len(calls), "function")
                    calls.append([delta.id, delta.function.name or "", ""])
                calls[delta.index][2] += delta.function.arguments or ""
    return [("".join(text), calls, ends[-1]) for text, calls, ends in told]


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_call_that_is_asked_for_comes_and_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    body: Any = {
        "model": "tiny",
        "messages": HISTORY,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": choice == NAMED,
        "seed": 7,
        "n": 3,
        "max_tokens": 600,
    }
    found = {}
    for drafts in ("off", "full"):
        answer = client.chat.completions.create(**body, extra_body={"tidar": {"drafts": drafts}})
        assert [one.finish_reason for one in answer.choices] == ["tool_calls"] * 3
        assert all(one.message.content is None for one in answer.choices)
        made: Any = [one.message.tool_calls for one in answer.choices]
        assert [len(calls) for calls in made] == [1, 1, 1]
        found[drafts] = [(calls[0].function.name, calls[0].function.arguments) for calls in made]
        assert len({calls[0].id for calls in made}) == 3
        for name, arguments in found[drafts]:
            check(name, arguments)
            assert choice == "required" or name == "weather"
    assert found["off"] == found["full"], "drafts change no call"
    for (text, calls, end), expected in zip(streamed(client, **body), found["off"], strict=True):
        assert (text, end, tuple(calls[0][1:])) == ("", "tool_calls", expected)


def test_several_calls_in_one_answer(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": TURNS, "tools": TOOLS, "tool_choice": "required", "seed": 2}
    # After a call the model may end the answer or make another: its end is made unlikely. The length ends it within
    # arguments: of a call without a name yet, what there is would be text.
    body |= {"max_tokens": 380, "logit_bias": {"0": -100, "2": -100}}
    ((text, calls, end),) = streamed(client, **body)
    assert (text, end) == ("", "length")
    assert len(calls) > 2
    for _, name, arguments in calls[:-1]:
        check(name, arguments)
    answer = client.chat.completions.create(**body)
    made: Any = answer.choices[0].message.tool_calls
    assert [[one.function.name, one.function.arguments] for one in made] == [call[1:] for call in calls]


def test_auto_is_read_from_the_text(client: openai.OpenAI) -> None:
    strict = [tool("weather", WEATHER, strict=True), tool("now", strict=True)]
    body: Any = {"model": "tiny", "messages": TURNS, "seed": 3, "max_tokens": 300}
    plain = client.chat.completions.create(**body, tools=TOOLS, tool_choice="auto").choices[0]
    assert plain.message.tool_calls is None
    assert plain.message.content
    # A random model hardly ever calls; that it begins to is its own will here, what follows is the grammar's.
    begin = tool_tokenizer().convert_tokens_to_ids("<tool_call>")
    body |= {"tools": strict, "logit_bias": {str(begin): 100}, "parallel_tool_calls": False}
    ((said, calls, end),) = streamed(client, **body)
    assert (said, end, len(calls)) == ("", "tool_calls", 1)
    check(*calls[0][1:])
    again = client.chat.completions.create(**body).choices[0]
    made: Any = again.message.tool_calls
    assert [again.finish_reason, made[0].function.name, made[0].function.arguments] == [end, *calls[0][1:]]
    silent = client.chat.completions.create(**body | {"tool_choice": "none", "max_tokens": 5}).choices[0]
    assert silent.message.content == "<tool_call>" * 5
    assert silent.message.tool_calls is None


OPEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "K'


def test_an_answer_goes_on_with_a_call(client: openai.OpenAI) -> None:
    turns = [*TURNS, {"role": "assistant", "content": f"Let me see. {OPEN}"}]
    goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    body: Any = {"model": "tiny", "messages": turns, "seed": 3, "max_tokens": 8, "extra_body": goes_on}
    ((said, calls, end),) = streamed(client, **body, tools=TOOLS)
    assert (said, end, len(calls)) == ("", "length", 1)
    assert calls[0][1] == "weather"
    assert calls[0][2].startswith('{"city": "K')
    made: Any = client.chat.completions.create(**body, tools=TOOLS).choices[0].message
    assert [made.content, made.tool_calls[0].function.arguments] == [None, calls[0][2]]
    with pytest.raises(openai.BadRequestError, match="ends within a tool call") as caught:
        client.chat.completions.create(**body, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "continue_final_message"
    begun_anew = client.chat.completions.create(
        **body | {"messages": [*TURNS, {"role": "assistant", "content": "Let me see."}], "max_tokens": 300},
        tools=[tool("now")],
        tool_choice="required",
    ).choices[0]
    assert {one.function.name for one in begun_anew.message.tool_calls or ()} == {"now"}


def test_either_the_asked_format_or_a_call(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}
    body: Any = {"model": "tiny", "messages": TURNS, "tools": TOOLS, "response_format": form, "max_tokens": 600}
    begin = tool_tokenizer().convert_tokens_to_ids("<tool_call>")
    for bias, called in ((-100, False), (100, True)):
        answer = client.chat.completions.create(
            **body, seed=1, logit_bias={str(begin): bias, "0": 100, "2": 100}
        ).choices[0]
        if called:
            calls: Any = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            check(calls[0].function.name, calls[0].function.arguments)
        else:
            jsonschema.validate(json.loads(answer.message.content or ""), WEATHER)


def test_the_openai_package_runs_its_own_tools(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(pattern="^(Oslo|Rome)$")
        days: int = pydantic.Field(ge=1, le=9)

    answer = client.chat.completions.parse(
        model="tiny",
        messages=TURNS,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=5,
        max_tokens=400,
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, Weather)
    history: Any = [*TURNS, answer.choices[0].message.model_dump(exclude_none=True, include={"role", "tool_calls"})]
    history.append({"role": "tool", "tool_call_id": calls[0].id, "content": "rain"})
    after = client.chat.completions.create(model="tiny", messages=history, max_tokens=9, seed=5)
    assert after.choices[0].message.content


def test_a_tool_whose_schema_does_not_compile_is_a_400(client: openai.OpenAI) -> None:
    broken = [
        tool("a", {"type": "object", "properties": {"b": {"type": "string", "pattern": "(a"}}, "required": ["b"]})
    ]
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError, match="among the tools"):
            client.chat.completions.create(
                model="tiny", messages=TURNS, tools=broken, tool_choice="required", stream=stream
            )


def test_of_tools_and_a_format_the_one_that_does_not_compile_is_named(client: openai.OpenAI) -> None:
    broken: Any = {"type": "object", "properties": {"b": {"type": "string", "pattern": "(a"}}, "required": ["b"]}
    asked: Any = {"model": "tiny", "messages": TURNS}
    cases: Any = [
        (tool("a", WEATHER), broken, "JSON schema cannot be used", "response_format"),
        (tool("a", broken), WEATHER, "among the tools cannot be used", "tools"),
    ]
    for one, schema, said, param in cases:
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                client.chat.completions.create(**asked, tools=[one], response_format=json_schema(schema), stream=stream)
            assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="tiny",
            input="Who?",
            tools=[{"type": "function", "name": "a", "parameters": WEATHER, "strict": False}],
            text={"format": {"type": "json_schema", "name": "b", "schema": broken}},
        )
    assert caught.value.param == "text.format"
