"""AutoGen: its OpenAI client, and an agent with a tool."""

from typing import Literal

from asking import ASK, SERVED, run
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import AuthenticationError
from pydantic import BaseModel

ABLE = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
ABLE["family"] = ModelFamily.UNKNOWN
SAID = [UserMessage(content=ASK, source="user")]


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


async def weather(city: Literal["Paris", "Rome"]) -> str:
    """Looks up the weather."""
    return f"It is sunny in {city}."


def client(key=SERVED.key, **more):
    told = {"base_url": SERVED.url, "api_key": key, "model_info": ABLE, "temperature": 0, "max_tokens": 200}
    return OpenAIChatCompletionClient(model=SERVED.model, **told, **more)


async def chat():
    answer = await client().create(SAID)
    assert answer.content
    assert answer.usage.completion_tokens > 0
    *parts, last = [
        part
        async for part in client().create_stream(SAID, extra_create_args={"stream_options": {"include_usage": True}})
    ]
    assert "".join(parts) == answer.content
    assert last.usage.completion_tokens == answer.usage.completion_tokens


async def chat_structured():
    assert Verdict.model_validate_json((await client().create(SAID, json_output=Verdict)).content)


async def chat_tools():
    tool = FunctionTool(weather, description="Looks up the weather.")
    answer = await client(parallel_tool_calls=False).create(SAID, tools=[tool], tool_choice="required")
    assert answer.content[0].name == "weather"
    agent = AssistantAgent("helper", client(parallel_tool_calls=False), tools=[weather], reflect_on_tool_use=True)
    assert (await agent.run(task="Weather in Paris?")).messages[-1].content


async def errors():
    try:
        await client(key="another", max_retries=0).create(SAID)
    except AuthenticationError:
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("autogen-ext", chat, chat_structured, chat_tools, errors)
