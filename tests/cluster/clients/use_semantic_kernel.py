"""Semantic Kernel: its chat completion for OpenAI, with functions that it calls by itself."""

from typing import Annotated, Literal

from asking import ASK, SERVED, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


class Weather:
    def __init__(self):
        self.asked = []

    @kernel_function(description="Looks up the weather.")
    def weather(self, city: Annotated[str, "the city"]) -> str:
        self.asked.append(city)
        return f"It is sunny in {city}."


def service(key=SERVED.key):
    client = AsyncOpenAI(base_url=SERVED.url, api_key=key, max_retries=0)
    return OpenAIChatCompletion(ai_model_id=SERVED.model, async_client=client)


def settings(**more):
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=200, **more)


def history():
    made = ChatHistory()
    made.add_user_message(ASK)
    return made


async def chat():
    answer = await service().get_chat_message_content(history(), settings())
    assert answer.content
    assert answer.metadata["usage"].completion_tokens > 0
    parts = [part async for part in service().get_streaming_chat_message_content(history(), settings())]
    assert "".join(str(part) for part in parts) == answer.content


async def chat_structured():
    answer = await service().get_chat_message_content(history(), settings(response_format=Verdict))
    assert Verdict.model_validate_json(answer.content)


async def chat_tools():
    for streamed in (False, True):
        kernel, plugin = Kernel(), Weather()
        kernel.add_plugin(plugin, "weather")
        wanted = settings(
            function_choice_behavior=FunctionChoiceBehavior.Required(auto_invoke=True), parallel_tool_calls=False
        )
        if streamed:
            told = service().get_streaming_chat_message_content(history(), wanted, kernel=kernel)
            assert [part async for part in told]
        else:
            await service().get_chat_message_content(history(), wanted, kernel=kernel)
        assert plugin.asked


async def errors():
    try:
        await service("another").get_chat_message_content(history(), settings())
    except ServiceResponseException:
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("semantic-kernel", chat, chat_structured, chat_tools, errors)
