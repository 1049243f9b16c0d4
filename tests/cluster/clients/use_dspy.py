"""DSPy: its language model, over chats and over the Responses API."""

import json
from typing import Literal

import dspy
from asking import ASK, SERVED, run
from pydantic import BaseModel


class Verdict(BaseModel):
    good: bool
    marks: Literal[1, 2, 3]


def model(key=SERVED.key, **more):
    told = {"api_base": SERVED.url, "api_key": key, "temperature": 0, "max_tokens": 200, "cache": False}
    return dspy.LM(f"openai/{SERVED.model}", num_retries=0, **told, **more)


def chat():
    own = model()
    assert own(ASK)[0]
    assert own.history[-1]["usage"]["completion_tokens"] > 0


def chat_structured():
    schema = {"name": "verdict", "schema": Verdict.model_json_schema()}
    told = model()(ASK, response_format={"type": "json_schema", "json_schema": schema})[0]
    assert Verdict.model_validate(json.loads(told))


def responses():
    assert model(model_type="responses")(ASK)[0]


def errors():
    try:
        model(key="another")(ASK)
    except Exception as error:
        assert "key" in str(error).lower(), error  # noqa: PT017
        return
    raise AssertionError("any key will do")


if __name__ == "__main__":
    run("dspy", chat, chat_structured, responses, errors)
