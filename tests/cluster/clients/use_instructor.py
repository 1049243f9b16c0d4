"""Instructor, in the modes that the OpenAI client has there."""

from typing import Literal

import instructor
from asking import ASK, SERVED, run
from openai import OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """A verdict."""

    good: bool
    marks: Literal[1, 2, 3]


ASKED = {"model": SERVED.model, "messages": [{"role": "user", "content": ASK}], "response_model": Verdict}


def client(mode):
    return instructor.from_openai(OpenAI(base_url=SERVED.url, api_key=SERVED.key), mode=mode)


def tools():
    assert client(instructor.Mode.TOOLS).chat.completions.create(**ASKED, temperature=0, max_tokens=200).marks


def json_schema():
    assert client(instructor.Mode.JSON_SCHEMA).chat.completions.create(**ASKED, temperature=0, max_tokens=200).marks


def strict_tools():
    assert client(instructor.Mode.TOOLS_STRICT).chat.completions.create(**ASKED, temperature=0, max_tokens=200).marks


def streamed():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(client(mode).chat.completions.create_partial(**ASKED, temperature=0, max_tokens=200))
        assert parts[-1].marks


def responses():
    own = client(instructor.Mode.RESPONSES_TOOLS)
    assert own.responses.create(
        model=SERVED.model, input=ASK, response_model=Verdict, temperature=0, max_output_tokens=200
    ).marks


if __name__ == "__main__":
    run("instructor", tools, json_schema, strict_tools, streamed, responses)
