"""Answers as objects of OpenAI's Responses API: whole, or as its events."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from cluster.errors import ApiError, server_error
from cluster.wire.answer import Answer, Piece
from cluster.wire.completions_told import Head, chain, logprobs_of, reasoning_tokens, usage_of
from cluster.wire.encoding import Json, as_json
from cluster.wire.responses_tools import Namespaced
from cluster.wire.thoughts import Thought
from cluster.wire.tool_calls import CallDelta
from tidar_core.request import FinishReason

log = logging.getLogger("ray.serve")


def new_response_head(model: str) -> Head:
    return Head(model, True, f"resp_{uuid.uuid4().hex}")


class Entries(list[bytes]):
    """An array whose items are JSON already. The log-probabilities of an answer are told once as they come and four
    times at its end, and while some megabytes of them were made JSON each time all other streams waited."""


class Output:
    """The items of an answer as they grow. Its methods give the events that tell of it, but for their numbers.

    Text that stands before, between or behind calls is a message of its own each time; thoughts are an item too.
    namespaced: the functions of namespaces, by what the model calls them.
    """

    def __init__(self, namespaced: Mapping[str, Namespaced]) -> None:
        self.items: list[Json] = []
        self._namespaced = namespaced
        self._open = False  # whether the last of them still grows

    def add(self, piece: Piece, logprobs: Sequence[Entries] = ()) -> Iterator[Json]:
        """logprobs: of each part of the piece; empty where none were asked for."""
        for part, entries in zip(piece.told, logprobs or [Entries()] * len(piece.told), strict=True):
            if isinstance(part, CallDelta):
                yield from self._call(part)
            elif isinstance(part, Thought):
                yield from self._think(part.text)
            else:
                yield from self._text(part, entries)

    def end(self, status: str, in_arguments: bool = False) -> Iterator[Json]:
        """The last item ends as the whole answer does, but a call as its arguments do: whoever reads "completed" will
        call. An answer without a word is an empty message."""
        if not self.items:
            yield from self._begin_message()
        if self.items[-1]["type"] == "function_call":
            status = "incomplete" if in_arguments else "completed"
        yield from self._close(status)

    def _text(self, text: str, logprobs: Entries) -> Iterator[Json]:
        if not self._open or self.items[-1]["type"] != "message":
            if not text and self.items:  # tokens behind a call
                return
            yield from self._close("completed")
            yield from self._begin_message()
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Json]:
        yield from self._begin({"type": "message", "id": _id("msg"), "role": "assistant", "content": []})
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": Entries()}
        yield self._event("response.content_part.added", content_index=0, part=dict(part))
        self.items[-1]["content"].append(part)

    def _think(self, text: str) -> Iterator[Json]:
        if not self._open or self.items[-1]["type"] != "reasoning":
            yield from self._close("completed")
            yield from self._begin({"type": "reasoning", "id": _id("rs"), "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
            yield self._event("response.content_part.added", content_index=0, part=dict(part))
            self.items[-1]["content"].append(part)
        self.items[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _call(self, delta: CallDelta) -> Iterator[Json]:
        if delta.id is not None:
            yield from self._close("completed")
            own = self._namespaced.get(delta.name or "")
            who = {"name": delta.name} if own is None else {"namespace": own.namespace, "name": own.name}
            called = {"call_id": delta.id, **who, "arguments": ""}
            yield from self._begin({"type": "function_call", "id": _id("fc"), **called})
        if delta.arguments:
            self.items[-1]["arguments"] += delta.arguments
            yield self._event("response.function_call_arguments.delta", delta=delta.arguments)

    def _begin(self, item: Json) -> Iterator[Json]:
        item["status"] = "in_progress"
        self.items.append(item)
        self._open = True
        yield self._item_event("response.output_item.added")

    def _close(self, status: str) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            told = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **told)
            yield self._event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = item["content"][0]
            yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=part)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **told)
        yield self._item_event("response.output_item.done")

    def _event(self, kind: str, **told: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **told}

    def _item_event(self, kind: str) -> Json:
        item = self.items[-1]
        shown = item | {"content": list(item["content"])} if "content" in item else dict(item)
        return {"type": kind, "output_index": len(self.items) - 1, "item": shown}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def response_object(head: Head, repeated: str, status: str, **told: Any) -> bytes:
    """OpenAI's `Response` as JSON; `repeated`, an object too, is what it repeats of the request. That is as long as the
    client likes and told several times, so it was made JSON once, where streams did not wait for it."""
    common = {"id": head.id, "object": "response", "created_at": head.created, "model": head.model, "status": status}
    empty: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
    return dumped({**common, **empty, **told}).removesuffix(b"}") + b"," + repeated.removeprefix("{").encode()


def ended(head: Head, repeated: str, answer: Answer, items: list[Json]) -> bytes:
    """The object of an answer that has come to its end, by itself or at a limit."""
    usage = usage_of(answer.choices)
    counted = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": answer.choices[0].cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(answer.choices)},
        "total_tokens": usage["total_tokens"],
    }
    told: Json = {"output": items, "usage": counted, "metrics": answer.metrics()}
    if status_of(answer) == "completed":
        told["completed_at"] = int(time.time())
    else:
        told["incomplete_details"] = {"reason": "max_output_tokens"}
    return response_object(head, repeated, status_of(answer), **told)


def status_of(answer: Answer) -> str:
    finish = answer.choices[0].finish
    assert finish is not None
    return "incomplete" if finish.reason is FinishReason.LENGTH else "completed"


def logprobs_told(head: Head, answer: Answer, piece: Piece) -> list[Entries]:
    told = (logprobs_of(head, answer, 0, share) for share in piece.shares)
    return [Entries(map(as_json, found["content"])) for found in told if found is not None]


def in_arguments(answer: Answer) -> bool:
    tools = answer.choices[0].tools
    return tools is not None and tools.in_arguments


def whole_response(
    head: Head, repeated: str, namespaced: Mapping[str, Namespaced], answer: Answer, pieces: Sequence[Piece]
) -> bytes:
    """The body of an answer that is not streamed."""
    output = Output(namespaced)
    for piece in pieces:
        for _ in output.add(piece, logprobs_told(head, answer, piece)):
            pass
    for _ in output.end(status_of(answer), in_arguments(answer)):
        pass
    return ended(head, repeated, answer, output.items)


async def response_events(
    head: Head,
    repeated: str,
    namespaced: Mapping[str, Namespaced],
    answer: Answer,
    first: Piece,
    rest: AsyncGenerator[Piece, None],
    broke: Callable[[Exception], None],
) -> AsyncGenerator[bytes, None]:
    """The events of an answer whose first piece is here already; the last one tells the whole object. An error is told
    to `broke` too."""
    number = 0

    def event(told: Json, response: bytes | None = None) -> bytes:
        """Numbered; with the object, where it is one of those that tell it."""
        nonlocal number
        body = dumped({**told, "sequence_number": number})
        if response is not None:
            body = body.removesuffix(b"}") + b',"response":' + response + b"}"
        number += 1
        return f"event: {told['type']}\ndata: ".encode() + body + b"\n\n"

    output = Output(namespaced)
    begun = response_object(head, repeated, "in_progress")
    try:
        async with aclosing(chain(first, rest)) as pieces:
            async for piece in pieces:
                if piece is first:  # not before: a client that leaves at once must end the pieces too
                    yield event({"type": "response.created"}, begun)
                    yield event({"type": "response.in_progress"}, begun)
                for told in output.add(piece, logprobs_told(head, answer, piece)):
                    yield event(told)
        status = status_of(answer)
        for told in output.end(status, in_arguments(answer)):
            yield event(told)
        yield event({"type": f"response.{status}"}, ended(head, repeated, answer, output.items))
    except Exception as error:
        broke(error)
        shown = error if isinstance(error, ApiError) else server_error()
        if shown is not error:
            log.exception("stream %s failed", head.id)
        fault = {"code": "server_error", "message": shown.message}
        failed = response_object(head, repeated, "failed", error=fault, output=output.items)
        yield event({"type": "response.failed"}, failed)


def failed_response(error: ApiError) -> bytes:
    """All of a stream of which nothing but this came: OpenAI's `error` event, which some clients read by its own fields
    and some as the error object of any other answer."""
    fault = error.body()["error"]
    told = {"type": "error", "sequence_number": 0, **{name: fault[name] for name in ("code", "message", "param")}}
    return b"event: error\ndata: " + as_json({**told, "error": fault}) + b"\n\n"


def dumped(told: Any) -> bytes:
    """As JSON, in which `Entries` stand as they are."""
    if isinstance(told, Entries):
        return b"[" + b",".join(told) + b"]"
    if isinstance(told, list):
        return b"[" + b",".join(map(dumped, told)) + b"]"
    if isinstance(told, dict):
        return b"{" + b",".join(as_json(name) + b":" + dumped(value) for name, value in told.items()) + b"}"
    return as_json(told)
