"""Tools that a real server is asked with by the openai package."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.cluster.guarded import Guarded
from tests.cluster.wire.test_structured import json_schema
from tests.cluster.wire.test_tools import HISTORY, TOOLS, TURNS, WEATHER, tool
from tests.tiny import tool_tokenizer


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
