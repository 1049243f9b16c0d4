"""LangChain's ChatOpenAI, over chats and over the Responses API, and LangGraph's agent on top of it."""

from typing import Literal

from asking import ASK, SERVED, THINK, run
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import AuthenticationError, BadRequestError, NotFoundError
from pydantic import BaseModel


class Verdict(BaseModel):
    """A verdict."""

    good: bool
    marks: Literal[1, 2, 3]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Looks up the weather."""
    return f"It is sunny in {city}."


def model(**more):
    told = {
        "base_url": SERVED.url,
        "api_key": SERVED.key,
        "model": SERVED.model,
        "temperature": 0,
        "max_tokens": 200,
        "stream_usage": True,
    }
    return ChatOpenAI(**(told | more))


def text_of(message):
    return message.text if isinstance(message.text, str) else message.text()


def talks(**more):
    chat = model(**more)
    answer = chat.invoke(ASK)
    assert text_of(answer)
    assert answer.usage_metadata["output_tokens"] > 0
    parts = list(chat.stream(ASK))
    assert "".join(text_of(part) for part in parts) == text_of(answer)
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"], whole.usage_metadata
    assert [text_of(one) for one in chat.batch([ASK] * 4)] == [text_of(answer)] * 4


def calls(**more):
    bound = model(**more).bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    said = [HumanMessage("Weather in Paris?")]
    said.append(bound.invoke(said))
    call = said[-1].tool_calls[0]
    said.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert text_of(model(**more).bind_tools([weather]).invoke(said))
    parts = list(bound.stream("Weather in Rome?"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
    assert text_of(model(**more).bind_tools([weather], strict=True).invoke(ASK))


def structures(**more):
    for method in ("json_schema", "function_calling"):
        assert isinstance(model(**more).with_structured_output(Verdict, method=method).invoke(ASK), Verdict), method
    found = model(**more).with_structured_output(Verdict, include_raw=True).invoke(ASK)
    assert isinstance(found["parsed"], Verdict)
    assert model(**more).with_structured_output(Verdict.model_json_schema()).invoke(ASK)["marks"]
    assert isinstance(model(**more).with_structured_output(None, method="json_mode").invoke(ASK), dict)
    streamed = list(model(**more).with_structured_output(Verdict).stream(ASK))
    assert isinstance(streamed[-1], Verdict)


def agent(**more):
    """It goes on while the model calls the tool again and again, in answers that come to their limit within a call."""
    asked = {"messages": [{"role": "user", "content": ASK}]}
    seen = []
    try:
        for step in create_agent(model(**more), [weather]).stream(asked, {"recursion_limit": 6}, stream_mode="updates"):
            seen += step
    except GraphRecursionError:
        assert seen.count("model") == 3, seen
    assert "model" in seen
    found = create_agent(model(**more), [], response_format=ProviderStrategy(Verdict)).invoke(
        asked, {"recursion_limit": 6}
    )
    assert isinstance(found["structured_response"], Verdict), found


def chat():
    talks()


def chat_tools():
    calls()


def chat_structured():
    structures()


def chat_agent():
    agent()


def chat_logprobs():
    found = model(logprobs=True, top_logprobs=2).invoke(ASK)
    assert found.response_metadata["logprobs"]["content"]


def responses():
    talks(use_responses_api=True)


def responses_tools():
    calls(use_responses_api=True)


def responses_structured():
    structures(use_responses_api=True)


def responses_agent():
    agent(use_responses_api=True)


def responses_thoughts():
    ask = {"reasoning": {"effort": "low", "summary": "auto"}, "extra_body": THINK}
    for version in ("responses/v1", "v1"):
        chat = model(use_responses_api=True, output_version=version, store=False, **ask)
        answer = chat.invoke(ASK)
        assert any(block["type"] == "reasoning" for block in answer.content_blocks), answer.content
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        assert text_of(chat.invoke([HumanMessage(ASK), answer, HumanMessage(ASK)]))
        parts = list(chat.stream(ASK))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
        assert any(block["type"] == "reasoning" for block in whole.content_blocks), whole.content
        assert text_of(chat.invoke([HumanMessage(ASK), whole, HumanMessage(ASK)]))


def errors():
    for kind, more, text in (
        (AuthenticationError, {"api_key": "another"}, ASK),
        (NotFoundError, {"model": "nobody"}, ASK),
        (BadRequestError, {}, "word " * 20_000),
    ):
        try:
            model(max_retries=0, **more).invoke(text)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    run(
        "langchain-openai", chat, chat_tools, chat_structured, chat_agent, chat_logprobs, responses, responses_tools,
        responses_structured, responses_agent, responses_thoughts, errors,
    )  # fmt: skip
