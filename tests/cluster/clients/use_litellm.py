"""LiteLLM: chats by `openai/` and `hosted_vllm/`, and the Responses API."""

import json
from typing import Literal

import litellm
from asking import ASK, SERVED, THINK, run
from pydantic import BaseModel


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PLACE}}
SAID = [{"role": "user", "content": ASK}]


def told(provider="openai", key=SERVED.key):
    place = {"model": f"{provider}/{SERVED.model}", "api_base": SERVED.url, "api_key": key}
    return {**place, "temperature": 0, "max_tokens": 200}


def chat():
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(messages=SAID, **told(provider))
        assert answer.usage.completion_tokens > 0
        ask = told(provider) | {"stream": True, "stream_options": {"include_usage": True}}
        parts = list(litellm.completion(messages=SAID, **ask))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == answer.choices[0].message.content, text
        assert parts[-1].usage.completion_tokens == answer.usage.completion_tokens


def chat_tools():
    said = [{"role": "user", "content": "Weather in Paris?"}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(messages=said, tools=[TOOL], **forced, **told("hosted_vllm")).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    said += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny."}]
    assert litellm.completion(messages=said, tools=[TOOL], **told("hosted_vllm")).choices[0].message.content
    parts = list(litellm.completion(messages=said[:1], tools=[TOOL], stream=True, **forced, **told("hosted_vllm")))
    assert litellm.stream_chunk_builder(parts).choices[0].message.tool_calls[0].function.name == "weather"


def chat_structured():
    found = litellm.completion(messages=SAID, response_format=Verdict, **told("hosted_vllm"))
    assert Verdict.model_validate_json(found.choices[0].message.content)


def chat_thoughts():
    ask = {"reasoning_effort": "low", "extra_body": THINK}
    message = litellm.completion(messages=SAID, **ask, **told("hosted_vllm")).choices[0].message
    assert message.reasoning_content
    parts = list(litellm.completion(messages=SAID, stream=True, **ask, **told("hosted_vllm")))
    assert litellm.stream_chunk_builder(parts).choices[0].message.reasoning_content


def responses():
    ask = told() | {"max_output_tokens": 200}
    del ask["max_tokens"]
    found = litellm.responses(input=ASK, **ask)
    assert found.output[0].content[0].text
    assert found.usage.output_tokens > 0
    kinds = [event.type for event in litellm.responses(input=ASK, stream=True, **ask)]
    assert kinds[-1] == "response.completed", kinds
    tool = {"type": "function", **TOOL["function"]}
    found = litellm.responses(input="Weather?", tools=[tool], tool_choice="required", parallel_tool_calls=False, **ask)
    assert any(item.type == "function_call" for item in found.output)


def errors():
    for kind, more, text in (
        (litellm.AuthenticationError, {"api_key": "another"}, ASK),
        (litellm.NotFoundError, {"model": "hosted_vllm/nobody"}, ASK),
        (litellm.ContextWindowExceededError, {}, "word " * 20_000),
    ):
        try:
            litellm.completion(messages=[{"role": "user", "content": text}], **(told("hosted_vllm") | more))
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    run("litellm", chat, chat_tools, chat_structured, chat_thoughts, responses, errors)
