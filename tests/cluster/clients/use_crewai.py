"""CrewAI: its model, and a crew of one with a tool."""

import os

from asking import ASK, SERVED, run

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


class Verdict(BaseModel):
    good: bool


@tool("weather")
def weather(city: str) -> str:
    """Looks up the weather."""
    return f"It is sunny in {city}."


def model(**more):
    told = {"base_url": SERVED.url, "api_key": SERVED.key, "temperature": 0, "max_tokens": 200}
    return LLM(model=f"openai/{SERVED.model}", **(told | more))


def chat():
    answer = model().call(ASK)
    assert answer
    assert model(stream=True).call(ASK) == answer


def chat_structured():
    assert model(response_format=Verdict).call(ASK)


def crew():
    helper = Agent(role="helper", goal="help", backstory="Helps.", llm=model(), tools=[weather], max_iter=2)
    task = Task(description=ASK, expected_output="a city", agent=helper)
    assert Crew(agents=[helper], tasks=[task], verbose=False).kickoff().raw


def errors():
    try:
        model(api_key="another").call(ASK)
    except Exception as error:
        assert "key" in str(error).lower(), error  # noqa: PT017
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("crewai", chat, chat_structured, crew, errors)
