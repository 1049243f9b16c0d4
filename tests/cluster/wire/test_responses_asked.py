"""The Responses API as it is asked: what of it becomes a chat, and what is refused by its own names."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response

from cluster.errors import ApiError
from cluster.wire.completions_told import new_head
from cluster.wire.prompts import parse_json, read_body
from cluster.wire.responses_asked import ResponsesBody, as_here
from cluster.wire.responses_told import response_object
from cluster.wire.responses_tools import Namespaced
from cluster.wire.sampling import sampling_of, sampling_params
from cluster.wire.schemas import ChatBody
from tests.cluster.wire.test_schemas import QWEN, card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Sampling

CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


GROUP = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL, {**TOOL, "name": "now"}]}
SEARCH = {"type": "web_search", "external_web_access": False}


def asked(**fields: Any) -> ResponsesBody:
    return read_body({"input": "Who?", **fields}, ResponsesBody)


def as_chat(**fields: Any) -> ChatBody:
    return asked(**fields).as_chat()


def messages(**fields: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in as_chat(**fields).messages]


def test_a_text_is_what_the_user_says() -> None:
    assert messages() == [{"role": "user", "content": "Who?"}]
    assert messages(instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_items_are_the_turns_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
        {**CALL, "call_id": "call_3"},
    ]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": f"call_{number}", "type": "function", "function": function} for number in (1, 2, 3)]
    assert messages(input=items) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
        {"role": "assistant", "tool_calls": calls[2:]},
    ]


def test_fields_reach_the_chat_under_its_names() -> None:
    schema = {"type": "object"}
    body = as_chat(
        max_output_tokens=7, temperature=0.5, top_k=3, seed=4, stop="x", tidar={"drafts": "off"}, top_logprobs=2,
        tools=[{**TOOL, "strict": True}], tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}, "verbosity": "low"},
    )  # fmt: skip
    assert (body.max_completion_tokens, body.temperature, body.top_k, body.seed, body.stop) == (7, 0.5, 3, 4, ["x"])
    assert (body.logprobs, body.top_logprobs, body.tidar.drafts) == (True, 2, "off")
    assert body.tools is not None
    assert body.tools[0].function.model_dump(exclude_none=True) == {
        "name": "weather", "parameters": TOOL["parameters"], "strict": True,
    }  # fmt: skip
    assert body.tool_choice is not None
    assert body.tool_choice.function.name == "weather"  # type: ignore[union-attr]
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.schema_ == schema
    assert as_chat(text={"format": {"type": "json_object"}}).response_format is not None
    assert as_chat(include=["message.output_text.logprobs"]).wanted_logprobs == 0


def test_functions_of_a_namespace_have_one_name_for_the_model() -> None:
    servers = GROUP | {"name": "mcp__crm__", "description": "", "tools": [{**TOOL, "description": "Looks."}]}
    body = asked(tools=[TOOL, GROUP, servers])
    tools = body.as_chat().tools or []
    assert [(tool.function.name, tool.function.description) for tool in tools] == [
        ("weather", None), ("crm__weather", "crm: Customers."), ("crm__now", None), ("mcp__crm__weather", "Looks."),
    ]  # fmt: skip
    assert body.namespaced["crm__now"] == Namespaced("crm", "now")
    assert body.namespaced["mcp__crm__weather"] == Namespaced("mcp__crm__", "weather")
    assert "weather" not in body.namespaced
    said = messages(input=[{**CALL, "namespace": "crm"}, CALL], tools=[TOOL, GROUP])
    assert [call["function"]["name"] for call in said[0]["tool_calls"]] == ["crm__weather", "weather"]
    told = response_object(new_head("tiny", True), body.repeated(Sampling()), "in_progress")
    found = Response.model_validate_json(told)
    assert [tool.type for tool in found.tools] == ["function", "namespace", "namespace"]
    assert json.loads(told)["tools"][1] == GROUP
    silent = asked(tools=[{"type": "namespace", "name": "crm", "tools": []}, {**GROUP, "description": None}])
    told = response_object(new_head("tiny", True), silent.repeated(Sampling()), "in_progress")
    assert [tool.description for tool in Response.model_validate_json(told).tools] == ["", ""]


def test_the_models_hear_of_no_search() -> None:
    """Coding agents offer it beside their functions, and a model may leave alone what it is offered."""
    body = asked(tools=[TOOL, SEARCH, {"type": "web_search_preview_2025_03_11"}])
    assert body.as_chat() == as_chat(tools=[TOOL])
    assert [tool["name"] for tool in json.loads(body.repeated(Sampling()))["tools"]] == ["weather"]


def test_what_is_repeated_of_a_request_is_one_line() -> None:
    """It stands in events of a stream."""
    said = "a\u2028b\x85c"
    repeated = asked(instructions=said).repeated(Sampling())
    assert len(repeated.splitlines()) == 1
    assert json.loads(repeated)["instructions"] == said


def test_what_changes_nothing_is_no_matter() -> None:
    plain = as_chat()
    harmless = as_chat(
        store=True, metadata={"a": "b"}, reasoning={"summary": "auto"}, truncation="auto", user="me", background=False,
        include=["reasoning.encrypted_content"], stream_options={"include_obfuscation": False}, max_tool_calls=3,
        previous_response_id=None, service_tier="auto", client_metadata={"a": "b"},
    )  # fmt: skip
    assert harmless == plain
    assert not harmless.ignored
    assert as_chat(brand_new=1).ignored == ["brand_new"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "no response is stored"),
        ({"background": True}, "background", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"return_token_ids": True}, "return_token_ids", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"messages": []}, "messages", "use input"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "'low', 'medium'"),
        ({"tidar": {"trace": True}}, "tidar.trace", "/v1/chat/completions"),
        ({"tidar": {"trail": True}}, "tidar.trail", "unknown field"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning"}]}, "input", "nothing that this model reads"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "an item of type message"),
        ({"input": ["Who?"]}, "input.0", "an item of type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "reads text"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "'system', 'developer'"),
        ({"input": [{**CALL, "arguments": "["}]}, "input.0.arguments", "JSON object"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search' are not supported"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools.0", "'custom' are not supported"),
        ({"tools": [{"type": "web_search_of_mine"}, TOOL]}, "tools.0.type", "pattern"),
        ({"tools": [{"type": "file_search"}, TOOL]}, "tools.0", "'file_search' are not supported"),
        (
            {"tools": [TOOL, GROUP | {"tools": [{"type": "custom", "name": "a"}]}]},
            "tools.1.tools.0",
            "'custom' are not",
        ),
        ({"tools": [GROUP | {"name": "a" * 128}]}, "tools.0", "more than 128 characters together"),
        ({"tools": [GROUP, GROUP]}, "tools", "same name"),
        ({"tools": [GROUP | {"tools": [TOOL] * 129}]}, "tools.0.tools", "128"),
        ({"tools": [GROUP | {"tools": []}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "'function'"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice.name", "required"),
        ({"input": 5}, "input", "must be a string or a list of items"),
        ({"text": "json"}, "text", "must be an object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a `name`"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"max_output_tokens": "all"}, "max_output_tokens", "integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name_here(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        as_chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message


def test_errors_about_the_chat_name_the_fields_here() -> None:
    told = as_here(ApiError(400, "max_completion_tokens must be at least 1", "max_completion_tokens"))
    assert (told.message, told.param) == ("max_output_tokens must be at least 1", "max_output_tokens")
    for own in ("`required` names 'messages', which is missing", "tool_choice names `messages`", "properties.messages"):
        assert as_here(ApiError(400, own, "tools")).message == own
    told = as_here(ApiError(400, "too long", "messages", "context_length_exceeded"))
    assert (told.param, told.code) == ("input", "context_length_exceeded")
    told = as_here(ApiError(400, "give either response_format or structured_outputs, not both", "structured_outputs"))
    assert told.message.startswith("give either text.format or")
    other = ApiError(429, "full", None, "full")
    assert as_here(other) is other


def test_what_json_has_no_word_for_is_refused_and_not_repeated() -> None:
    def repeated(parameters: str) -> str:
        tool = '{"type": "function", "name": "f", "parameters": ' + parameters + "}"
        body = read_body(parse_json(f'{{"input": "a", "tools": [{tool}]}}'.encode()), ResponsesBody)
        return body.repeated(Sampling())

    with pytest.raises(ApiError, match="must be JSON"):
        repeated('{"maximum": 1e999}')
    for depth in range(800, 1000, 5):  # it is read somewhat deeper than it is written
        with suppress(ApiError):
            json.loads(repeated('{"a": ' * depth + "1" + "}" * depth))
    with pytest.raises(ApiError, match="nested too deeply"):
        repeated('{"a": ' * 2000 + "1" + "}" * 2000)


def test_nulls_are_as_good_as_nothing() -> None:
    assert messages(input=[{"type": None, "role": "user", "content": "Who?"}]) == messages()
    assert json.loads(asked(text={"format": None}).repeated(Sampling()))["text"] == {"format": {"type": "text"}}


def test_what_is_long_and_wrong_is_refused_at_once() -> None:
    began = time.process_time()
    for fields in ({"include": [1] * 300_000}, {"metadata": dict.fromkeys(map(str, range(300_000)), 1)}):
        with pytest.raises(ApiError) as caught:
            asked(**fields)
        assert (caught.value.param or "").startswith(tuple(fields))
    assert time.process_time() - began < 3


def test_an_object_repeats_what_was_asked_in_openais_own_type() -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    body = asked(
        instructions="Be brief.", tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, temperature=0.5,
        text=form, metadata={"a": "b"}, parallel_tool_calls=False, max_output_tokens=9,
    )  # fmt: skip
    told = json.loads(response_object(new_head("tiny", True), body.repeated(Sampling(temperature=0.5)), "in_progress"))
    found = Response.model_validate(told)
    assert (found.instructions, found.temperature, found.top_p, found.metadata) == ("Be brief.", 0.5, 1.0, {"a": "b"})
    assert (found.parallel_tool_calls, found.max_output_tokens, found.status) == (False, 9, "in_progress")
    assert told["tools"] == [{**TOOL, "strict": None}]
    assert (told["text"], told["tool_choice"]) == (form, {"type": "function", "name": "weather"})
    plain = json.loads(response_object(new_head("tiny", True), asked().repeated(Sampling()), "in_progress"))
    Response.model_validate(plain)
    assert (plain["tool_choice"], plain["text"], plain["tools"]) == ("auto", {"format": {"type": "text"}}, [])


def test_an_object_tells_how_its_tokens_are_picked() -> None:
    """The model's makers have a say in that, and a request that says something itself the last word."""
    card = replace(card_for(tiny_tokenizer()), sampling_defaults=QWEN)

    def told(**fields: Any) -> tuple[float, float]:
        body = asked(**fields)
        params = sampling_params(body.as_chat(), card, 3, 1)
        repeated = json.loads(body.repeated(sampling_of(body.as_chat(), card)))
        assert (repeated["temperature"], repeated["top_p"]) == (params.temperature, params.top_p)
        return repeated["temperature"], repeated["top_p"]

    assert told() == (0.7, 0.8)
    assert told(temperature=0) == (0.0, 0.8)
    assert told(temperature=1.5, top_p=1) == (1.5, 1.0)
    assert told(temperature=None, top_p=0.5) == (0.7, 0.5)
