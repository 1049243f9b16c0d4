"""Answers as OpenAI's objects: its own types take them."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from statistics import median
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.errors import ApiError
from cluster.wire.answer import Answer, Piece, ResponseOptions, requests_for
from cluster.wire.completions_told import chunk, event_stream, logprobs_of, new_head, streamed_logprobs, whole
from cluster.wire.encoding import as_json
from cluster.wire.thoughts import Thought
from cluster.wire.tool_calls import CallDelta
from tests.cluster.ingress.test_outcomes import pieces
from tests.cluster.wire.test_answer import ids, output
from tests.cluster.wire.test_schemas import card_for
from tests.servers import REPOSITORY
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams, StepOutput, TokenLogprobs

CARD = card_for(tiny_tokenizer())
ENTRY = TokenLogprobs(300, -0.5, ((300, -0.5), (301, -9.5)))
ENDS = Finish(FinishReason.STOP, "x")


def answered(*parts: Piece, logprobs: int | None = None, ids: bool = False, named: bool = False) -> Answer:
    """An answer of as many choices as the parts are of, the prompt of each as long as its number says."""
    prompts = [(1,) * (number + 1) for number in sorted({part.choice for part in parts})]
    params = [SamplingParams(max_tokens=5, logprobs=logprobs)] * len(prompts)
    options = ResponseOptions(include_usage=True, continuous_usage=True, return_token_ids=ids, tokens_as_ids=named)
    answer = Answer(CARD, requests_for("answer", prompts, params), options)
    for part in parts:
        answer.choices[part.choice].finish = part.finish
    return answer


def told(chat: bool, *parts: Piece, **asked: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the same as a stream."""

    async def streamed() -> list[bytes]:
        stream = event_stream(head, answered(*parts, **asked), parts[0], pieces(*parts[1:]), print)
        return [event async for event in stream]

    head = new_head("tiny", chat)
    *events, last = [event.removeprefix(b"data: ") for event in asyncio.run(streamed())]
    assert last == b"[DONE]\n\n"
    return json.loads(whole(head, answered(*parts, **asked), parts)), [json.loads(event) for event in events]


@pytest.mark.parametrize("chat", [True, False])
def test_text_and_log_probabilities(chat: bool) -> None:
    parts = Piece(0, ("a",), logprobs=(ENTRY,)), Piece(0, ("b",), ENDS, logprobs=(ENTRY, ENTRY))
    body, events = told(chat, *parts, logprobs=1)
    kind: Any = ChatCompletion if chat else Completion
    found = kind.model_validate(body)
    assert (found.choices[0].finish_reason, found.usage.prompt_tokens) == ("stop", 1)
    assert body["choices"][0]["stop_reason"] == "x"
    for event in events:
        for choice in event["choices"]:
            if not chat and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # OpenAI's type forbids the null that its server sends
        (ChatCompletionChunk if chat else Completion).model_validate(event)
    assert [len(event["choices"]) for event in events] == [1, 1, 0]
    assert all(event["usage"]["prompt_tokens"] == 1 for event in events)


def test_what_json_has_no_word_for_is_null() -> None:
    assert as_json({"a": [float("inf"), float("nan"), "€"]}) == '{"a":[null,null,"€"]}'.encode()


@pytest.mark.parametrize("chat", [True, False])
def test_an_event_is_one_line_whatever_ends_lines(chat: bool) -> None:
    """httpx, and with it Hugging Face's client, end one at U+0085, U+2028 and U+2029 too."""
    said = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e"

    async def streamed() -> list[bytes]:
        stream = event_stream(new_head("tiny", chat), answered(part), part, pieces(), print)
        return [event async for event in stream]

    async def broken() -> list[bytes]:
        stream = event_stream(new_head("tiny", chat), answered(part), part, failing(), print)
        return [event async for event in stream]

    async def failing() -> AsyncGenerator[Piece, None]:
        raise ApiError(400, said)
        yield part

    part = Piece(0, (said,), ENDS)
    for events in (asyncio.run(streamed()), asyncio.run(broken())):
        assert [len(event.decode().splitlines()) for event in events] == [2] * len(events)
    body, (event,) = told(chat, part)[0], told(chat, part)[1][:1]
    for choice in (body["choices"][0], event["choices"][0]):
        assert (choice["text"] if not chat else (choice.get("message") or choice["delta"])["content"]) == said


def test_log_probabilities_may_name_tokens_by_their_ids() -> None:
    """As vLLM does where `return_tokens_as_token_ids` is asked for; all else is as without."""
    parts = Piece(0, ("a",), logprobs=(ENTRY,)), Piece(0, ("b",), ENDS, logprobs=(ENTRY, ENTRY))

    def logprobs(chat: bool, named: bool) -> Any:
        return told(chat, *parts, logprobs=1, named=named)[0]["choices"][0]["logprobs"]

    plain, named = logprobs(False, False), logprobs(False, True)
    assert named["tokens"] == ["token_id:300"] * 3
    assert named["top_logprobs"] == [{"token_id:300": -0.5, "token_id:301": -9.5}] * 3
    assert (named["text_offset"], named["token_logprobs"]) == (plain["text_offset"], plain["token_logprobs"])
    for before, entry in zip(logprobs(True, False)["content"], logprobs(True, True)["content"], strict=True):
        assert entry["token"] == "token_id:300"
        assert [one["token"] for one in entry["top_logprobs"]] == ["token_id:300", "token_id:301"]
        assert (entry["bytes"], entry["logprob"]) == (before["bytes"], before["logprob"])


def test_calls_and_thoughts() -> None:
    calls = (CallDelta(0, "", "id0", "f"), CallDelta(0, "{"), CallDelta(0, "}"), CallDelta(1, "{}", "id1", "g"))
    parts = Piece(0, (Thought("Hm."),)), Piece(0, calls[:2]), Piece(0, calls[2:], ENDS)
    body, events = told(True, *parts)
    message = ChatCompletion.model_validate(body).choices[0].message
    assert message.content is None
    assert [call.model_dump() for call in message.tool_calls or ()] == [
        {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
        for name, function in (("id0", "f"), ("id1", "g"))
    ]
    names = ("reasoning", "reasoning_content")
    assert [body["choices"][0]["message"][name] for name in names] == ["Hm."] * 2
    assert [[name in event["choices"][0]["delta"] for name in names] for event in events[:-1]] == [
        [True] * 2,
        [False] * 2,
        [False] * 2,
    ]
    assert [events[0]["choices"][0]["delta"][name] for name in names] == ["Hm."] * 2
    deltas = [ChatCompletionChunk.model_validate(event).choices[0].delta for event in events[:-1]]
    assert [delta.role for delta in deltas] == ["assistant", None, None]
    assert [len(delta.tool_calls or ()) for delta in deltas] == [0, 2, 2]


IDS = (
    Piece(1, (), tokens=(5,)),  # its text is held back
    Piece(0, (Thought("Hm."), CallDelta(0, "{", "id0", "f")), tokens=(3, 4)),
    Piece(1, ("a",), ENDS, tokens=(6, 2)),
    Piece(0, (CallDelta(0, "}"),), ENDS, tokens=(7,)),
)


@pytest.mark.parametrize("chat", [True, False])
def test_token_ids_are_told_as_vllm_tells_them(chat: bool) -> None:
    body, events = told(chat, *IDS, ids=True)
    (ChatCompletion if chat else Completion).model_validate(body)
    assert [choice["token_ids"] for choice in body["choices"]] == [[3, 4, 7], [5, 6, 2]]
    chunks = [event["choices"][0] for event in events[:-1]]
    assert [(told["index"], told["token_ids"]) for told in chunks] == [(part.choice, [*part.tokens]) for part in IDS]
    if chat:
        assert body["prompt_token_ids"] == [1]
        assert ["prompt_token_ids" in event for event in events] == [True, False, False, False, False]
        assert events[0]["prompt_token_ids"] == [1]
    assert [told.get("prompt_token_ids") for told in body["choices"]] == ([None] * 2 if chat else [[1], [1, 1]])
    of_chunks = [told.get("prompt_token_ids") for told in chunks]
    assert of_chunks == ([None] * 4 if chat else [[1, 1], [1], None, None])


@pytest.mark.parametrize("chat", [True, False])
def test_token_ids_that_nobody_asked_for_are_not_told(chat: bool) -> None:
    body, events = told(chat, *IDS)
    assert "token_ids" not in json.dumps([body, events])
    assert len(events) == (5 if chat else 4), "a chunk without text has nothing to tell but whose turn it is"


def test_offsets_of_a_streams_tokens_are_those_of_the_whole_answer() -> None:
    """Even where a step shows less than its tokens, for a stop string may have begun or a character is not whole."""
    tokens = ids("the quick 東京 fo")
    entries = [TokenLogprobs(token, -0.5, ()) for token in tokens]
    params = SamplingParams(max_tokens=50, logprobs=0, stop=("fox",))
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]))
    offsets: list[int] = []
    before: dict[int, int] = {}
    for token, entry in zip(tokens, entries, strict=True):
        piece = answer.choices[0].add(output([token])._replace(logprobs=(entry,)), "r1")
        told = streamed_logprobs(new_head("tiny", False), answer, piece, before)
        assert told is not None
        offsets += told["text_offset"]
    together = logprobs_of(new_head("tiny", False), answer, 0, entries)
    assert together is not None
    assert offsets == together["text_offset"] == sorted(set(offsets))


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_fit_openais_objects(chat: bool) -> None:
    params = SamplingParams(max_tokens=5, logprobs=1)
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]))
    entries = tuple(TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in (300, 301))
    finish = Finish(FinishReason.LENGTH)
    piece = answer.choices[0].add(StepOutput("answer-0", (300, 301), finish=finish, logprobs=entries), "r1")
    head = new_head("tiny", chat)
    streamed = chunk(head, answer, piece, streamed_logprobs(head, answer, piece, {}), True, True)
    for raw in (whole(head, answer, [piece]), streamed[6:]):
        logprobs = json.loads(raw)["choices"][0]["logprobs"]
        if chat:
            assert b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]).decode() == piece.text
            assert [entry["logprob"] for entry in logprobs["content"]] == [-0.5, -0.5]
        else:
            assert "".join(logprobs["tokens"]) == piece.text
            assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]


def test_parts_of_characters_are_told_apart_by_their_bytes() -> None:
    parts = ids("€")
    entry = TokenLogprobs(parts[0], -0.5, tuple((token, -0.5) for token in parts))
    answer = Answer(CARD, requests_for("answer", [(1,)], [SamplingParams(max_tokens=5, logprobs=3)]))
    logprobs = logprobs_of(new_head("tiny", chat=False), answer, 0, [entry])
    assert logprobs is not None
    (likeliest,) = logprobs["top_logprobs"]
    assert len(likeliest) == len(parts) > 1
    assert logprobs["tokens"] == list(likeliest)[:1]
    assert "".join(name.removeprefix("bytes:") for name in likeliest) == r"\xe2\x82\xac"


def test_a_whole_answers_log_probabilities_are_made_without_a_detour() -> None:
    """They are made at once, and all streams wait: by way of OpenAI's types it took more than twice as long."""
    params = SamplingParams(max_tokens=5000, logprobs=20)
    entry = TokenLogprobs(300, -0.5, tuple((token, -0.5) for token in range(300, 320)))
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]))
    finish = answer.choices[0].finish = Finish(FinishReason.STOP)
    head, piece = new_head("tiny", True), Piece(0, ("ab",), finish, None, (entry,) * 500)
    body = whole(head, answer, [piece])

    def seconds(work: Callable[[], object]) -> float:
        before = time.thread_time()
        work()
        return time.thread_time() - before

    pairs = [(seconds(lambda: whole(head, answer, [piece])), seconds(lambda: json.loads(body))) for _ in range(9)]
    assert median(writing / reading for writing, reading in pairs) < 6
    ChatCompletion.model_validate_json(body)


def test_an_ingress_imports_neither_openais_types_nor_a_replica() -> None:
    code = "import sys, cluster.ingress.api; print({'openai', 'cluster.replica.replica', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
