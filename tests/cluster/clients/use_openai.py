"""openai (Python): chats and the Responses API, whole, streamed and asynchronous."""

from typing import Literal

import openai
from asking import ASK, SERVED, THINK, run
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=SERVED.url, api_key=SERVED.key)
MODEL = SERVED.model
SAID = [{"role": "user", "content": ASK}]


class Weather(BaseModel):
    """Looks up the weather."""

    city: Literal["Paris", "Rome"]


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


TOOL = pydantic_function_tool(Weather)
FUNCTION = {"type": "function"} | TOOL["function"]


def chat():
    whole = client.chat.completions.create(model=MODEL, messages=SAID, temperature=0, max_completion_tokens=24)
    parts = client.chat.completions.create(
        model=MODEL, messages=SAID, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = parts
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.choices[0].message.content == text
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.completion_tokens <= 24


def chat_stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=SAID, temperature=0) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert stream.get_final_completion().choices[0].message.content


async def chat_async():
    async with AsyncOpenAI(base_url=SERVED.url, api_key=SERVED.key) as own:
        stream = await own.chat.completions.create(model=MODEL, messages=SAID, max_tokens=8, stream=True)
        assert [part async for part in stream]
        async with own.chat.completions.stream(model=MODEL, messages=SAID, temperature=0) as helper:
            assert [event async for event in helper]
        async with own.responses.stream(model=MODEL, input=ASK, temperature=0) as helper:
            assert [event async for event in helper]
            assert (await helper.get_final_response()).output_text


def chat_parse():
    found = client.chat.completions.parse(model=MODEL, messages=SAID, response_format=Verdict, temperature=0)
    assert isinstance(found.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(model=MODEL, messages=SAID, response_format=Verdict, temperature=0) as stream:
        events = list(stream)
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)
    assert any(event.type == "content.delta" and event.parsed is not None for event in events)


def chat_tools():
    said = list(SAID)
    found = client.chat.completions.parse(
        model=MODEL, messages=said, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = found.choices[0].message
    assert found.choices[0].finish_reason == "tool_calls"
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    said += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny."}]
    answer = client.chat.completions.create(model=MODEL, messages=said, tools=[TOOL], max_tokens=24)
    assert answer.choices[0].message.content
    ask = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(model=MODEL, messages=SAID, **ask) as stream:
        kinds = [event.type for event in stream]
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert stream.get_final_completion().choices[0].message.tool_calls[0].function.parsed_arguments


def chat_thoughts():
    found = client.chat.completions.create(
        model=MODEL, messages=SAID, max_tokens=64, reasoning_effort="low", extra_body=THINK
    )
    assert found.choices[0].message.reasoning_content
    assert found.usage.completion_tokens_details.reasoning_tokens


def responses():
    whole = client.responses.create(model=MODEL, input=ASK, instructions="Be brief.", max_output_tokens=24)
    assert whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(model=MODEL, input=ASK, max_output_tokens=24, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model=MODEL, input=ASK, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text


def responses_parse():
    found = client.responses.parse(model=MODEL, input=ASK, text_format=Verdict, temperature=0, max_output_tokens=200)
    assert isinstance(found.output_parsed, Verdict)
    with client.responses.stream(
        model=MODEL, input=ASK, text_format=Verdict, temperature=0, max_output_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
    assert "response.completed" in kinds, kinds
    assert isinstance(stream.get_final_response().output_parsed, Verdict)


def responses_tools():
    said = [{"role": "user", "content": ASK}]
    ask = {
        "model": MODEL,
        "max_output_tokens": 200,
        "tools": [FUNCTION],
    }
    found = client.responses.parse(input=said, tool_choice="required", parallel_tool_calls=False, **ask)
    call = next(item for item in found.output if item.type == "function_call")
    assert call.parsed_arguments
    said += found.output
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."})
    assert client.responses.create(input=said, **ask).output_text
    named = {"type": "function", "name": "Weather"}
    with client.responses.stream(input=ASK, tool_choice=named, **ask) as stream:
        kinds = {event.type for event in stream}
    assert "response.function_call_arguments.done" in kinds, kinds
    assert stream.get_final_response().output[0].parsed_arguments


def responses_thoughts():
    ask = {"model": MODEL, "reasoning": {"effort": "low", "summary": "auto"}, "extra_body": THINK}
    ask |= {"include": ["reasoning.encrypted_content"], "store": False}
    found = client.responses.create(input=ASK, max_output_tokens=64, **ask)
    assert found.output[0].type == "reasoning", found.output
    assert found.usage.output_tokens_details.reasoning_tokens
    said = [{"role": "user", "content": ASK}, *found.output, {"role": "user", "content": "Again."}]
    with client.responses.stream(input=said, max_output_tokens=64, **ask) as stream:
        kinds = {event.type for event in stream}
    assert "response.reasoning_text.delta" in kinds, kinds


def counting():
    found = client.responses.input_tokens.count(model=MODEL, input=ASK)
    assert found.input_tokens


def models():
    assert MODEL in [one.id for one in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def completions():
    found = client.completions.create(model=MODEL, prompt=["One, two,", "A, b,"], max_tokens=8, logprobs=2)
    assert len(found.choices) == 2
    assert found.choices[1].logprobs.tokens


def errors():
    for kind, ask in (
        (openai.NotFoundError, {"model": "nobody", "messages": SAID}),
        (openai.BadRequestError, {"model": MODEL, "messages": [{"role": "user", "content": "word " * 20_000}]}),
        (openai.BadRequestError, {"model": MODEL, "messages": SAID, "top_p": 5}),
    ):
        try:
            client.chat.completions.create(**ask)
        except kind as error:
            assert error.type, error  # noqa: PT017
        else:
            raise AssertionError(f"no {kind.__name__}")
    try:
        OpenAI(base_url=SERVED.url, api_key="another").models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run(
        "openai", chat, chat_stream_helper, chat_async, chat_parse, chat_tools, chat_thoughts, responses,
        responses_parse, responses_tools, responses_thoughts, counting, models, completions, errors,
    )  # fmt: skip
