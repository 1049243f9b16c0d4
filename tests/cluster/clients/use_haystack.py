"""Haystack: its generator over chats, its generator over the Responses API, and an agent."""

import json
from typing import Annotated, Literal

from asking import ASK, SERVED, run
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from openai import AuthenticationError
from pydantic import BaseModel


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


def weather(city: Annotated[Literal["Paris", "Rome"], "the city"]) -> str:
    """Looks up the weather."""
    return f"It is sunny in {city}."


TOOL = create_tool_from_function(weather)
SAID = [ChatMessage.from_user(ASK)]


def generator(kind=OpenAIChatGenerator, key=SERVED.key, **more):
    return kind(model=SERVED.model, api_base_url=SERVED.url, api_key=Secret.from_token(key), **more)


def talks(kind, limit):
    told = {"temperature": 0, limit: 200}
    answer = generator(kind, generation_kwargs=told).run(SAID)["replies"][0]
    assert answer.text
    parts = []
    streamed = generator(kind, generation_kwargs=told, streaming_callback=parts.append).run(SAID)["replies"][0]
    assert streamed.text == answer.text
    assert len(parts) > 1
    forced = told | {"tool_choice": "required", "parallel_tool_calls": False}
    said = [ChatMessage.from_user("Weather in Paris?")]
    said += generator(kind, generation_kwargs=forced, tools=[TOOL]).run(said)["replies"]
    call = said[-1].tool_calls[0]
    said.append(ChatMessage.from_tool(weather(**call.arguments), origin=call))
    assert generator(kind, generation_kwargs=told, tools=[TOOL]).run(said)["replies"]


def chat():
    talks(OpenAIChatGenerator, "max_completion_tokens")


def chat_structured():
    told = {"temperature": 0, "max_tokens": 200, "response_format": Verdict}
    assert json.loads(generator(generation_kwargs=told).run(SAID)["replies"][0].text)["marks"]


def responses():
    talks(OpenAIResponsesChatGenerator, "max_output_tokens")


def responses_structured():
    told = {"temperature": 0, "max_output_tokens": 200, "text_format": Verdict}
    made = generator(OpenAIResponsesChatGenerator, generation_kwargs=told)
    assert json.loads(made.run(SAID)["replies"][0].text)["marks"]


def errors():
    try:
        generator(key="another", max_retries=0).run(SAID)
    except AuthenticationError:
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("haystack-ai", chat, chat_structured, responses, responses_structured, errors)
