"""LlamaIndex: OpenAILike over chats, OpenAIResponses, and a function agent."""

from typing import Literal

from asking import ASK, SERVED, run
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from openai import AuthenticationError
from pydantic import BaseModel


class Verdict(BaseModel):
    """A verdict."""

    good: bool
    marks: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Looks up the weather."""
    return f"It is sunny in {city}."


TOOL = FunctionTool.from_defaults(weather)
SAID = [ChatMessage(role="user", content=ASK)]


def model(key=SERVED.key, **more):
    told = {"model": SERVED.model, "api_base": SERVED.url, "api_key": key, "temperature": 0, "max_tokens": 200}
    return OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=4096, **told, **more)


def chat():
    answer = model().chat(SAID)
    assert answer.message.content
    assert "".join(part.delta for part in model().stream_chat(SAID)) == answer.message.content
    assert model().complete(ASK).text


def chat_tools():
    found = model().predict_and_call([TOOL], "Weather in Paris?", tool_required=True, allow_parallel_tool_calls=False)
    assert "sunny" in found.response
    answer = model().chat_with_tools([TOOL], "Weather in Rome?", tool_required=True)
    assert model().get_tool_calls_from_response(answer)


def chat_structured():
    assert isinstance(model().structured_predict(Verdict, PromptTemplate(ASK)), Verdict)
    wanted = model(should_use_structured_outputs=True)
    assert isinstance(wanted.structured_predict(Verdict, PromptTemplate(ASK)), Verdict)


async def agent():
    own = FunctionAgent(tools=[TOOL], llm=model(), initial_tool_choice="weather", system_prompt="Be brief.")
    assert str(await own.run("Weather in Paris?", max_iterations=5))


def responses():
    own = OpenAIResponses(
        model=SERVED.model, api_base=SERVED.url, api_key=SERVED.key, max_output_tokens=200, context_window=4096
    )
    answer = own.chat(SAID)
    assert answer.message.content
    assert [part.delta for part in own.stream_chat(SAID)]
    found = own.predict_and_call([TOOL], "Weather in Paris?", tool_required=True, allow_parallel_tool_calls=False)
    assert "sunny" in found.response


def errors():
    try:
        model(key="another", max_retries=0).chat(SAID)
    except AuthenticationError:
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("llama-index-llms-openai-like", chat, chat_tools, chat_structured, agent, responses, errors)
