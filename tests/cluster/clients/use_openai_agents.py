"""OpenAI's Agents SDK, over chats and over the Responses API: a loop with a tool, an output type, a stream."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from asking import ASK, SERVED, THINK, run
from openai import AsyncOpenAI, AuthenticationError
from openai.types.shared import Reasoning
from pydantic import BaseModel

QUIET = RunConfig(tracing_disabled=True)


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


@function_tool
def capital(country: Literal["France"]) -> str:
    """Looks up a country's capital."""
    return "Paris"


def agent(kind, key=SERVED.key, **more):
    client = AsyncOpenAI(base_url=SERVED.url, api_key=key)
    settings = ModelSettings(temperature=0, max_tokens=200, include_usage=True).resolve(more.pop("settings", None))
    return Agent(
        name="helper", instructions="Be brief.", model=kind(SERVED.model, client), model_settings=settings, **more
    )


async def loop_of(kind):
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    found = await Runner.run(agent(kind, tools=[capital], settings=forced), ASK, run_config=QUIET)
    assert found.final_output
    assert "function_call_output" in str(found.to_input_list()), found.to_input_list()
    streamed = Runner.run_streamed(agent(kind, tools=[capital], settings=forced), ASK, run_config=QUIET)
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output
    assert "run_item_stream_event" in kinds
    assert streamed.context_wrapper.usage.output_tokens > 0
    again = [*streamed.to_input_list(), {"role": "user", "content": ASK}]
    assert (await Runner.run(agent(kind, tools=[capital]), again, run_config=QUIET)).final_output


async def output_of(kind):
    found = await Runner.run(agent(kind, output_type=Verdict), ASK, run_config=QUIET)
    assert isinstance(found.final_output, Verdict)


async def thoughts_of(kind):
    settings = ModelSettings(reasoning=Reasoning(effort="low", summary="auto"), extra_body=THINK)
    found = await Runner.run(agent(kind, settings=settings), ASK, run_config=QUIET)
    assert any(item.type == "reasoning_item" for item in found.new_items), found.new_items
    assert found.context_wrapper.usage.output_tokens_details.reasoning_tokens
    streamed = Runner.run_streamed(agent(kind, settings=settings), ASK, run_config=QUIET)
    assert [event async for event in streamed.stream_events()]
    assert any(item.type == "reasoning_item" for item in streamed.new_items), streamed.new_items


async def refused_by(kind):
    try:
        await Runner.run(agent(kind, key="another"), ASK, run_config=QUIET)
    except AuthenticationError:
        return
    raise AssertionError("any key will do")


def chat_tools():
    return loop_of(OpenAIChatCompletionsModel)


def chat_output():
    return output_of(OpenAIChatCompletionsModel)


def chat_thoughts():
    return thoughts_of(OpenAIChatCompletionsModel)


def responses_tools():
    return loop_of(OpenAIResponsesModel)


def responses_output():
    return output_of(OpenAIResponsesModel)


def responses_thoughts():
    return thoughts_of(OpenAIResponsesModel)


def wrong_key():
    return refused_by(OpenAIResponsesModel)


if __name__ == "__main__":
    run(
        "openai-agents", chat_tools, chat_output, chat_thoughts, responses_tools, responses_output, responses_thoughts,
        wrong_key,
    )  # fmt: skip
