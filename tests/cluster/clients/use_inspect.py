"""inspect-ai: its OpenAI-compatible provider, over chats and over the Responses API."""

from typing import Literal

from asking import ASK, SERVED, THINK, run
from inspect_ai.model import ChatMessageTool, ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

SAID = [ChatMessageUser(content=ASK)]


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


@tool
def weather():
    async def execute(city: Literal["Paris", "Rome"]) -> str:
        """Looks up the weather.

        Args:
            city: the city
        """
        return f"It is sunny in {city}."

    return execute


def model(**more):
    told = {"base_url": SERVED.url, "api_key": SERVED.key, "memoize": False}
    return get_model(
        f"openai-api/ours/{SERVED.model}", config=GenerateConfig(temperature=0, max_tokens=200), **told, **more
    )


async def talks(**more):
    answer = await model(**more).generate(SAID)
    assert answer.completion
    assert answer.usage.output_tokens > 0
    forced = GenerateConfig(parallel_tool_calls=False)
    called = await model(**more).generate(SAID, tools=[weather()], tool_choice="any", config=forced)
    call = called.message.tool_calls[0]
    result = ChatMessageTool(content="It is sunny.", tool_call_id=call.id, function=call.function)
    again = await model(**more).generate([*SAID, called.message, result], tools=[weather()])
    assert again.stop_reason


async def chat():
    await talks()


async def chat_structured():
    wanted = GenerateConfig(response_schema=ResponseSchema(name="verdict", json_schema=json_schema(Verdict)))
    assert Verdict.model_validate_json((await model().generate(SAID, config=wanted)).completion)


async def chat_thoughts():
    thinks = GenerateConfig(reasoning_effort="low", extra_body=THINK)
    answer = await model().generate(SAID, config=thinks)
    assert any(part.type == "reasoning" for part in answer.message.content), answer.message


async def responses():
    await talks(responses_api=True)


async def errors():
    answer = await model().generate([ChatMessageUser(content="word " * 20_000)])
    assert answer.stop_reason == "model_length", answer


if __name__ == "__main__":
    run("inspect-ai", chat, chat_structured, chat_thoughts, responses, errors)
