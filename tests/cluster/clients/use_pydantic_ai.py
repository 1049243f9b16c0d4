"""Pydantic AI, over chats and over the Responses API."""

from typing import Literal

from asking import ASK, SERVED, THINK, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Verdict(BaseModel):
    """A verdict."""

    good: bool
    marks: Literal[1, 2, 3]


def agent(kind, key=SERVED.key, name=SERVED.model, settings=(), **more):
    provider = OpenAIProvider(base_url=SERVED.url, api_key=key)
    told = {"temperature": 0, "max_tokens": 200} | dict(settings)
    return Agent(kind(name, provider=provider), model_settings=told, instructions="Be brief.", **more)


async def talks(kind):
    found = await agent(kind).run(ASK)
    assert found.output
    assert found.usage.output_tokens > 0
    async with agent(kind).run_stream(ASK) as stream:
        assert [text async for text in stream.stream_text(delta=True)]
    assert (await agent(kind).run(ASK, message_history=found.all_messages())).output


async def calls(kind):
    with_tools = agent(kind, output_type=[Verdict])
    asked = []

    def once(_, definition):
        return None if asked else definition

    @with_tools.tool_plain(prepare=once)
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Looks up the weather."""
        asked.append(city)
        return f"It is sunny in {city}."

    found = await with_tools.run("Weather in Paris?")
    assert isinstance(found.output, Verdict)
    assert asked
    asked.clear()
    async with with_tools.run_stream("Weather in Rome?") as stream:
        assert isinstance(await stream.get_output(), Verdict)


async def structures(kind):
    for wanted in (NativeOutput(Verdict), Verdict):
        found = await agent(kind, output_type=wanted, retries=3).run(ASK)
        assert isinstance(found.output, Verdict)


async def thinks(kind, settings):
    thinker = agent(kind, settings={**settings, "extra_body": THINK})
    found = await thinker.run(ASK)
    assert any(isinstance(part, ThinkingPart) for part in found.response.parts), found.response
    async with thinker.run_stream(ASK) as stream:
        assert await stream.get_output()
    assert any(isinstance(part, ThinkingPart) for part in stream.response.parts), stream.response
    assert (await thinker.run(ASK, message_history=stream.all_messages())).output


def chat():
    return talks(OpenAIChatModel)


def chat_tools():
    return calls(OpenAIChatModel)


def chat_structured():
    return structures(OpenAIChatModel)


def chat_thoughts():
    return thinks(OpenAIChatModel, {"openai_reasoning_effort": "low"})


def responses():
    return talks(OpenAIResponsesModel)


def responses_tools():
    return calls(OpenAIResponsesModel)


def responses_structured():
    return structures(OpenAIResponsesModel)


def responses_thoughts():
    return thinks(OpenAIResponsesModel, {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"})


async def errors():
    for status, more, text in (
        (401, {"key": "another"}, ASK),
        (404, {"name": "nobody"}, ASK),
        (400, {}, "word " * 20_000),
    ):
        try:
            await agent(OpenAIChatModel, **more).run(text)
        except ModelHTTPError as error:
            assert error.status_code == status, error  # noqa: PT017
            continue
        raise AssertionError(f"no {status}")


if __name__ == "__main__":
    run(
        "pydantic-ai-slim", chat, chat_tools, chat_structured, chat_thoughts, responses, responses_tools,
        responses_structured, responses_thoughts, errors,
    )  # fmt: skip
