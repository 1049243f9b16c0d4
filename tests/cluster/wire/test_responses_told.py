"""Answers of the Responses API: their events and the whole object, by themselves and from a real server."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import pairwise
from typing import Any, get_args

import jsonschema
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from cluster.wire.answer import Answer, Piece, joined, requests_for
from cluster.wire.responses_told import Entries, Output, as_json, dumped, new_response_head, response_events
from cluster.wire.responses_tools import Namespaced
from cluster.wire.tool_calls import CallDelta
from tests import plain_http
from tests.cluster.guarded import Guarded
from tests.cluster.wire.test_schemas import card_for
from tests.cluster.wire.test_tools import WEATHER
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams, TokenLogprobs

CARD = card_for(tiny_tokenizer())
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
    if hasattr(kind, "model_fields")
}
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]

parts = st.one_of(
    st.text("ab ", min_size=1, max_size=5).map(lambda text: ("text", text)),
    st.text("cd{", min_size=1, max_size=5).map(lambda text: ("call", text)),
)


def pieces_of(said: list[tuple[str, str]], cuts: list[int]) -> list[Piece]:
    """What is said, its calls whole or in parts as `cuts` tells."""
    made: list[Piece] = []
    calls = 0
    for (kind, text), cut in zip(said, cuts, strict=True):
        cut = min(cut, len(text))
        if kind == "text":
            made += [Piece(0, (text[:cut],)), Piece(0, (text[cut:],))]
            continue
        begun = CallDelta(calls, text[:cut], f"call_{calls}", "weather")
        made += [Piece(0, (begun,)), Piece(0, (CallDelta(calls, text[cut:]),))]
        calls += 1
    return made


def together(pieces: list[Piece], sizes: list[int]) -> list[Piece]:
    """The same with so many at a time as one, as where several steps come together."""
    made = []
    for size in sizes:
        some, pieces = pieces[:size], pieces[size:]
        made += [joined(some)] if some else []
    return [*made, *([joined(pieces)] if pieces else [])]


def told_by(pieces: list[Piece], status: str) -> tuple[list[Any], list[Any]]:
    """The events, and the items at the end."""
    output = Output({})
    events = [json.loads(json.dumps(event)) for piece in pieces for event in output.add(piece, Entries())]
    events += [json.loads(json.dumps(event)) for event in output.end(status)]
    return events, output.items


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@given(said=st.lists(parts, max_size=6), data=st.data(), status=st.sampled_from(["completed", "incomplete"]))
def test_events_tell_the_items_however_an_answer_is_cut(
    said: list[tuple[str, str]], data: st.DataObject, status: str
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 5), min_size=len(said), max_size=len(said)))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=6))
    events, items = told_by(together(pieces_of(said, cuts), sizes), status)
    assert without_ids(items) == without_ids(told_by(pieces_of(said, [9] * len(said)), status)[1])
    last = "completed" if items[-1]["type"] == "function_call" else status
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [last]
    texts = "".join(text for kind, text in said if kind == "text")
    assert "".join(item["content"][0]["text"] for item in items if item["type"] == "message") == texts
    assert [item["arguments"] for item in items if item["type"] == "function_call"] == [
        text for kind, text in said if kind == "call"
    ]
    for number, event in enumerate(events):
        EVENTS[event["type"]].model_validate({**event, "sequence_number": number}, strict=True)
    for index, item in enumerate(items):
        mine = [event for event in events if event["output_index"] == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[0]["item"]["status"] == "in_progress"
        assert (mine[-1]["type"], mine[-1]["item"]) == ("response.output_item.done", item)
        deltas = [event["delta"] for event in mine if event["type"].endswith(".delta")]
        whole = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert "".join(deltas) == whole
    assert all(one["output_index"] <= two["output_index"] for one, two in pairwise(events))


def test_a_call_is_complete_where_its_arguments_are() -> None:
    """Whatever ended the answer: a limit behind it, or a stop string within them."""
    pieces = [Piece(0, (CallDelta(0, "{", "call_0", "weather"),))]
    for in_arguments, told in ((True, "incomplete"), (False, "completed")):
        for status in ("completed", "incomplete"):
            output = Output({})
            for piece in pieces:
                list(output.add(piece, Entries()))
            list(output.end(status, in_arguments))
            assert output.items[0]["status"] == told


def test_a_call_tells_the_namespace_of_its_function_apart() -> None:
    output = Output({"crm__find": Namespaced("crm", "find")})
    calls = [CallDelta(0, "{}", "call_0", "crm__find"), CallDelta(1, "{}", "call_1", "find")]
    events = [event for call in calls for event in output.add(Piece(0, (call,)))] + list(output.end("completed"))
    assert [(item.get("namespace"), item["name"]) for item in output.items] == [("crm", "find"), (None, "find")]
    for number, event in enumerate(events):
        told = EVENTS[event["type"]].model_validate({**event, "sequence_number": number}, strict=True)
        if event["type"] in ("response.output_item.added", "response.output_item.done"):
            assert told.item.namespace == (None if event["output_index"] else "crm")
        if event["type"] == "response.function_call_arguments.done":
            assert told.name == "find"


def test_tokens_that_bring_no_text_have_log_probabilities_too() -> None:
    """As those of a stop string with which an answer begins; behind a call nothing has a place for them."""
    entries = Entries(as_json({"token": token}) for token in "abc")
    silent = Output({})
    list(silent.add(Piece(0, ("",)), [entries]))
    list(silent.end("completed"))
    assert silent.items[0]["content"][0]["logprobs"] == entries
    called = Output({})
    list(called.add(Piece(0, (CallDelta(0, "{}", "call_0", "weather"), "")), [Entries(), entries]))
    list(called.end("completed"))
    assert [item["type"] for item in called.items] == ["function_call"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values, st.lists(json_values, max_size=3))
def test_what_is_json_already_stands_as_it_is(value: Any, entries: list[Any]) -> None:
    given = {"value": value, "entries": Entries(map(as_json, entries))}
    plain = {"value": value, "entries": entries}
    assert json.loads(dumped(given)) == plain
    assert dumped(given) == as_json(plain)


def test_the_end_of_a_stream_does_not_make_its_log_probabilities_anew() -> None:
    """While it did, the last events of 2,000 tokens with twenty rivals each held up all other streams for 0.3 s."""
    params = SamplingParams(max_tokens=5000, logprobs=20)
    finish = Finish(FinishReason.STOP)
    entry = TokenLogprobs(300, -0.5, tuple((token, -0.5) for token in range(300, 320)))
    pieces = [Piece(0, ("ab",), logprobs=(entry,), shares=((entry,),)) for _ in range(500)]
    pieces.append(Piece(0, ("ab",), finish, logprobs=(entry,), shares=((entry,),)))

    async def rest() -> AsyncGenerator[Piece, None]:
        for piece in pieces[1:]:
            yield piece

    async def told() -> tuple[float, float, list[Any]]:
        answer = Answer(CARD, requests_for("answer", [(1,)], [params]))
        answer.choices[0].finish = finish
        events = response_events(new_response_head("tiny"), '{"a":1}', {}, answer, pieces[0], rest(), broke=pytest.fail)
        growing, ending, made = 0.0, 0.0, []
        before = time.thread_time()
        async for event in events:
            took = time.thread_time() - before
            made.append(json.loads(event.split(b"data: ")[1]))
            if made[-1]["type"].endswith("text.delta"):
                growing += took
            else:
                ending += took
            before = time.thread_time()
        return growing, ending, made

    runs = [asyncio.run(told()) for _ in range(5)]
    events = runs[0][2]
    streamed = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
    assert len(streamed) == 501
    assert [len(one["top_logprobs"]) for one in streamed] == [20] * 501
    text, part, item, whole = events[-4:]
    for content in (text, part["part"], item["item"]["content"][0], whole["response"]["output"][0]["content"][0]):
        assert content["logprobs"] == streamed
    assert min(ending / growing for growing, ending, _ in runs) < 0.4


def test_a_client_that_leaves_at_once_ends_the_pieces() -> None:
    ended = False

    async def more() -> AsyncGenerator[Piece, None]:
        nonlocal ended
        try:
            yield Piece(0, ("b",))
        finally:
            ended = True

    async def leave() -> None:
        pieces = more()
        first = await anext(pieces)
        answer = Answer(CARD, requests_for("answer", [(1,)], [SamplingParams(max_tokens=5)]))
        events = response_events(new_response_head("tiny"), "{}", {}, answer, first, pieces, broke=pytest.fail)
        assert b"response.created" in await anext(events)
        await events.aclose()
        assert ended

    asyncio.run(leave())


@pytest.fixture(scope="module")
def client(guarded: Guarded) -> Iterator[openai.OpenAI]:
    """The server whose model has tools."""
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=guarded.key, max_retries=0, timeout=120) as made:
        yield made


def stream_of(client: openai.OpenAI, **fields: Any) -> tuple[list[Any], Response]:
    """The events of a response, each of OpenAI's type, and the object at the end."""
    with client.responses.create(**fields, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        EVENTS[event.type].model_validate(event.model_dump(exclude_unset=True, by_alias=True))
    return events, events[-1].response


def said(response: Response) -> list[tuple[Any, ...]]:
    return [
        (item.type, item.name, item.arguments) if item.type == "function_call" else (item.type, item.content[0].text)  # type: ignore[union-attr]
        for item in response.output
    ]


def test_a_response_is_what_a_chat_says(client: openai.OpenAI) -> None:
    sampling: Any = {"temperature": 0, "extra_body": {"ignore_eos": True, "tidar": {"drafts": "full"}}}
    chat = client.chat.completions.create(
        model="tiny", max_tokens=40, **sampling,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
    )  # fmt: skip
    asked: Any = {"model": "tiny", "instructions": "Be brief.", "input": "Who?", "max_output_tokens": 40, **sampling}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 40)
    assert whole.model_dump()["metrics"]["tidar"]["decode_steps"] > 0
    events, last = stream_of(client, **asked)
    assert events[-1].type == "response.incomplete"
    assert said(last) == said(whole)
    assert last.usage is not None
    assert last.usage.output_tokens == 40
    assert len([event for event in events if event.type == "response.output_text.delta"]) > 5


def test_an_answer_that_ends_by_itself_is_complete(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Who?", "text": {"format": {"type": "json_object"}}}
    asked["extra_body"] = {"seed": 1, "logit_bias": {"2": 100, "0": 100}}
    events, last = stream_of(client, **asked)
    assert (events[-1].type, last.status, last.error) == ("response.completed", "completed", None)
    assert last.completed_at
    assert isinstance(json.loads(last.output_text), dict)
    assert client.responses.create(**asked).output_text == last.output_text


def test_calls_are_items_and_what_they_brought_is_read(client: openai.OpenAI) -> None:
    turn: Any = {"role": "user", "content": "How is the weather?"}
    asked: Any = {
        "model": "tiny", "input": [turn], "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "max_output_tokens": 400, "extra_body": {"seed": 5},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    if call.name == "weather":
        jsonschema.validate(json.loads(call.arguments), WEATHER)
    events, last = stream_of(client, **asked)
    assert said(last) == said(whole)
    assert events[-2].type == "response.output_item.done"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [turn, *(item.model_dump(exclude_none=True) for item in whole.output), output]
    after = client.responses.create(**asked | {"input": history, "tool_choice": "auto", "max_output_tokens": 9})
    assert after.output_text
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.input_tokens > whole.usage.input_tokens


def test_a_call_within_a_namespace_goes_round(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny", "input": "How is the weather?", "max_output_tokens": 400, "extra_body": {"seed": 5},
        "tools": [{"type": "namespace", "name": "mcp__sky", "description": "Skies.", "tools": TOOLS}],
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.namespace, call.name in ("weather", "now")) == ("mcp__sky", True)
    _, last = stream_of(client, **asked)
    assert (last.output[0].namespace, said(last)) == ("mcp__sky", said(whole))  # type: ignore[union-attr]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked |= {"input": [call.model_dump(exclude_none=True), output], "tool_choice": "auto", "max_output_tokens": 9}
    assert client.responses.create(**asked).output_text


def test_the_openai_package_reads_an_answer_as_a_type(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(pattern="^(Oslo|Rome)$")
        days: int = pydantic.Field(ge=1, le=9)

    answer = client.responses.parse(
        model="tiny", input="Rain?", text_format=Weather, max_output_tokens=400, extra_body={"seed": 4}
    )
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(
        model="tiny", input="Rain?", text_format=Weather, max_output_tokens=400, extra_body={"seed": 4}
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_log_probabilities_of_every_token(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny", "input": "Who?", "max_output_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True},
        "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    }  # fmt: skip
    events, last = stream_of(client, **asked)
    content: Any = last.output[0].content[0]  # type: ignore[union-attr]
    assert len(content.logprobs) == 12
    assert b"".join(bytes(entry.bytes) for entry in content.logprobs).decode() == content.text
    assert all(len(entry.top_logprobs) == 2 for entry in content.logprobs)
    streamed = [one.token for event in events if event.type.endswith("text.delta") for one in event.logprobs]
    assert streamed == [entry.token for entry in content.logprobs]


def test_what_is_wrong_is_told_as_elsewhere(guarded: Guarded, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.responses.create(model="other", input="Who?")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be at least 1"):
        client.responses.create(model="tiny", input="Who?", max_output_tokens=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="Who? " * 5000, stream=True)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert plain_http.post(f"{guarded.url}/v1/responses", json={"input": "Who?"}).status_code == 401
