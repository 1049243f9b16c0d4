"""Answers as OpenAI's objects: its own types take them."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.encoding import as_json
from cluster.responses import event_stream, new_head, whole
from cluster.streams import Answer, Piece, requests_for
from cluster.thoughts import Thought
from cluster.tool_calls import CallDelta
from tests.cluster.test_outcomes import pieces
from tests.cluster.test_schemas import card_for
from tests.servers import REPOSITORY
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, SamplingParams, TokenLogprobs

CARD = card_for(tiny_tokenizer())
ENTRY = TokenLogprobs(300, -0.5, ((300, -0.5), (301, -9.5)))
ENDS = Finish(FinishReason.STOP, "x")


def answered(*parts: Piece, logprobs: int | None = None) -> Answer:
    params = SamplingParams(max_tokens=5, logprobs=logprobs)
    answer = Answer(CARD, requests_for("answer", [(1,)], [params]), trace=False)
    answer.choices[0].finish = parts[-1].finish
    return answer


def told(chat: bool, *parts: Piece, **asked: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the same as a stream."""

    async def streamed() -> list[bytes]:
        stream = event_stream(head, answered(*parts, **asked), parts[0], pieces(*parts[1:]), print, True, True)
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
    assert body["choices"][0]["message"]["reasoning_content"] == "Hm."
    deltas = [ChatCompletionChunk.model_validate(event).choices[0].delta for event in events[:-1]]
    assert [delta.role for delta in deltas] == ["assistant", None, None]
    assert [len(delta.tool_calls or ()) for delta in deltas] == [0, 2, 2]


def test_an_ingress_imports_neither_openais_types_nor_a_replica() -> None:
    code = "import sys, cluster.api; print({'openai', 'cluster.replica', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
