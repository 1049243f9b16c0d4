"""smolagents: its OpenAI model, and an agent that calls tools."""

from asking import ASK, SERVED, run
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Looks up the weather.

    Args:
        city: the city
    """
    return f"It is sunny in {city}."


def model(**more):
    told = {"api_base": SERVED.url, "api_key": SERVED.key, "temperature": 0, "max_tokens": 200}
    return OpenAIModel(SERVED.model, **(told | more))


SAID = [ChatMessage(role="user", content=[{"type": "text", "text": ASK}])]


def chat():
    answer = model().generate(SAID)
    assert answer.content
    assert answer.token_usage.output_tokens > 0
    assert "".join(part.content or "" for part in model().generate_stream(SAID)) == answer.content


def chat_stops():
    assert "Paris" not in model().generate(SAID, stop_sequences=["Paris"]).content


def chat_tools():
    message = model(parallel_tool_calls=False).generate(SAID, tools_to_call_from=[weather])
    assert message.tool_calls[0].function.name == "weather"


def agent():
    own = ToolCallingAgent(tools=[weather], model=model(parallel_tool_calls=False), max_steps=2, verbosity_level=0)
    own.run("Weather in Paris?")
    errors = [step.error for step in own.memory.steps if getattr(step, "error", None)]
    assert not [error for error in errors if "400" in str(error)], errors


if __name__ == "__main__":
    run("smolagents", chat, chat_stops, chat_tools, agent)
