"""Constrained output: what requests may say, and what a real server makes of it."""

import json
import re
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from cluster.errors import ApiError
from cluster.wire.prompts import read_body
from cluster.wire.schemas import CompletionBody
from tests.tiny import tiny_tokenizer
from tidar_core.grammar.grammar import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"enum": ["S", "M", "L"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["size", "count", "note"],
    "additionalProperties": False,
}


def grammar(**fields: Any) -> Grammar | None:
    return read_body({"prompt": "a", **fields}, CompletionBody).grammar


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def test_every_way_to_ask_becomes_one_grammar() -> None:
    assert grammar() is None
    assert grammar(response_format={"type": "text"}, structured_outputs=None) is None
    assert grammar(response_format={"type": "json_object"}) == Grammar("json_object")
    assert grammar(structured_outputs={"json_object": True}) == Grammar("json_object")
    wanted = Grammar("json_schema", json.dumps(SCHEMA))
    assert grammar(response_format=json_schema(SCHEMA)) == wanted
    assert grammar(structured_outputs={"json": SCHEMA}) == wanted
    assert grammar(structured_outputs={"json": json.dumps(SCHEMA)}) == wanted
    assert grammar(structured_outputs={"regex": "a+"}) == Grammar("regex", "a+")
    untouched = {"json": None, "json_object": None, "structural_tag": None, "disable_any_whitespace": False}
    assert grammar(structured_outputs={"regex": "a+", **untouched}) == Grammar("regex", "a+")
    assert grammar(structured_outputs={"grammar": 'root ::= "a"'}) == Grammar("ebnf", 'root ::= "a"')
    assert grammar(structured_outputs={"choice": ["a", 'b"']}) == Grammar("ebnf", 'root ::= "a" | "b\\""')


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": json_schema([])}, "schema"),
        ({"response_format": json_schema({"not": {}})}, "`not` cannot be enforced"),
        ({"response_format": json_schema({"description": "a" * 70_000})}, "at most 65536 bytes"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "at least one text"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "1024"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "disable_any_whitespace"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "not both"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.status == 400
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert (caught.value.param or "").split(".")[0] in fields


class Order(pydantic.BaseModel):
    size: str = pydantic.Field(pattern="^(S|M|L)$")
    count: int = pydantic.Field(ge=1, le=99)
    gift: bool


def test_a_chat_keeps_to_its_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is your order?"}],
        "response_format": json_schema(SCHEMA),
        "max_tokens": 400,
        "seed": 11,
        "n": 3,
    }
    texts = {}
    for drafts in ("off", "full"):
        answer = client.chat.completions.create(**body, extra_body={"tidar": {"drafts": drafts}})
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
        texts[drafts] = [choice.message.content or "" for choice in answer.choices]
        for text in texts[drafts]:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert texts["off"] == texts["full"]
    assert answer.model_dump()["metrics"]["tidar"]["tokens_per_step"] > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts["off"]


def test_the_client_parses_its_own_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "Order!"}], response_format=Order, seed=3, max_tokens=400
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Order)
    assert parsed.size in "SML"


def test_vllms_ways_to_ask(client: openai.OpenAI) -> None:
    def said(**fields: Any) -> str:
        extra = {"structured_outputs": fields}
        answer = client.completions.create(model="tiny", prompt="Well,", max_tokens=60, seed=1, extra_body=extra)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert said(choice=["yes", "größe"]) in ("yes", "größe")
    assert len(said(regex="[0-9]{4}")) == 4
    assert said(grammar='root ::= "a" root "b" | "ab"').strip("a").strip("b") == ""


@pytest.mark.parametrize("literal", ["[a b], #1", "~c~ & d: e;", "<f>=`g`@h!"])
def test_an_expression_may_escape_more_than_it_must(client: openai.OpenAI, literal: str) -> None:
    """As `re.escape` does, and clients that build expressions with it."""
    for expression in (re.escape(literal), "".join(one if one.isalnum() else f"\\{one}" for one in literal)):
        extra = {"structured_outputs": {"regex": f"(?:{expression})[{expression}]"}}
        said = client.completions.create(model="tiny", prompt="Well,", max_tokens=90, extra_body=extra).choices[0].text
        assert said[:-1] == literal
        assert said[-1] in literal
    short = r"\x2cb[\x2Cb]\\x2cb"
    said = client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": short}})
    assert re.fullmatch(short, said.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="Escape sequence"):
        client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "\\Aa"}})


def test_a_model_that_likes_empty_lines_does_not_fill_its_answer_with_them(client: openai.OpenAI) -> None:
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3}
    schema = {"type": "object", "properties": {"a": numbers, "b": numbers}, "required": ["a", "b"]}
    (line,) = tiny_tokenizer().encode("\n", add_special_tokens=False)
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Which numbers?"}],
        response_format=json_schema(schema),
        max_tokens=400,
        logit_bias={str(line): 100},
        seed=5,
    )
    text = answer.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), schema)
    assert "\n" in text
    assert not re.search(r"\n\s*\n", text)


@pytest.mark.parametrize("stream", [True, False])
def test_a_grammar_that_does_not_compile_is_a_400(client: openai.OpenAI, stream: bool) -> None:
    for wanted, said in (({"regex": "(a"}, "parenthesis"), ({"grammar": "root = 1"}, "grammar cannot be used")):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            client.completions.create(
                model="tiny", prompt="a", stream=stream, extra_body={"structured_outputs": wanted}
            )
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "structured_outputs")
    fine = client.completions.create(model="tiny", prompt="a", max_tokens=3, extra_body={"ignore_eos": True})
    assert fine.usage is not None
    assert fine.usage.completion_tokens == 3
