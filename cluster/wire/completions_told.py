"""Answers as OpenAI's objects: whole, or as the chunks of an event stream."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ApiError, server_error
from cluster.wire.answer import Answer, Choice, Piece
from cluster.wire.encoding import Json, as_json
from cluster.wire.logprobs import by_id, by_text, chat_logprobs, completion_logprobs, prompt_logprobs, with_likeliest
from cluster.wire.tool_calls import CallDelta
from tidar_core.request import Finish, FinishReason, TokenLogprobs
from tidar_core.text import token_bytes, token_text

log = logging.getLogger("ray.serve")
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
SILENT_SECONDS = 15.0  # for which a stream may say nothing: proxies on the way take longer silence for an end
UNREAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer says. `chat` chooses between OpenAI's two families of objects."""

    model: str
    chat: bool
    id: str
    created: int = field(default_factory=lambda: int(time.time()))


def new_head(model: str, chat: bool) -> Head:
    return Head(model, chat, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}")


def usage_of(choices: Sequence[Choice]) -> Json:
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.completion_tokens for choice in choices)
    told: Json = {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": prompt + completion}
    if any(choice.thoughts is not None for choice in choices):
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens(choices)}
    told["prompt_tokens_details"] = {"cached_tokens": sum(choice.cached_tokens for choice in choices)}
    return told


def reasoning_tokens(choices: Sequence[Choice]) -> int:
    """Tokens of thoughts."""
    return sum(choice.thoughts.tokens for choice in choices if choice.thoughts is not None)


def stop_reason(finish: Finish, eos_ids: Sequence[int]) -> int | str | None:
    """vLLM's `stop_reason`: the stop string or id that was asked for and came up; null for the model's own end."""
    return None if finish.stop in eos_ids else finish.stop


def logprobs_of(
    head: Head, answer: Answer, choice: int, entries: Sequence[TokenLogprobs], offset: int | None = None
) -> Json | None:
    """`logprobs` of a choice or of one of its chunks; null where none were asked for. offset: characters of the tokens
    that chunks before told of; None where none did."""
    if answer.requests[choice].params.logprobs is None:
        return None
    tokenizer = answer.card.tokenizer
    spelled, bytes_of = partial(token_text, tokenizer), partial(token_bytes, tokenizer)
    by_ids = answer.options.tokens_as_ids
    if head.chat:
        return {"content": chat_logprobs(entries, by_id if by_ids else spelled, bytes_of), "refusal": None}
    leading = answer.echoes[choice].first if answer.echoes and offset is None else None
    name = by_id if by_ids else by_text(spelled, bytes_of)
    return completion_logprobs(entries, spelled, name, offset or 0, leading)


def streamed_logprobs(head: Head, answer: Answer, piece: Piece, offsets: dict[int, int]) -> Json | None:
    """`logprobs` of a chunk. offsets: of each choice that chunks have told of, for the next one."""
    told = logprobs_of(head, answer, piece.choice, piece.logprobs, offsets.get(piece.choice))
    if told is not None and told.get("text_offset"):
        last = piece.logprobs[-1].token if piece.logprobs else answer.echoes[piece.choice].first
        offsets[piece.choice] = told["text_offset"][-1] + len(token_text(answer.card.tokenizer, last))
    return told


def told_of_prompt(answer: Answer, choice: Choice) -> list[Any]:
    """vLLM's `prompt_logprobs`."""
    entries = with_likeliest(choice.prompt_logprobs, answer.options.prompt_logprobs or 0)
    return prompt_logprobs(entries, partial(token_text, answer.card.tokenizer))


def prompt_ids(head: Head, answer: Answer, choice: int) -> tuple[int, ...]:
    """vLLM's `prompt_token_ids`: in a chat beside the choices, which have one prompt, in a completion in each."""
    return answer.requests[0 if head.chat else choice].prompt


@dataclass(slots=True)
class WholeChoice:
    """All pieces of a choice that is not streamed."""

    text: str = ""
    thoughts: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.thoughts += piece.thoughts
        self.logprobs += piece.logprobs
        self.tokens += piece.tokens
        for delta in piece.calls:
            if delta.id is None:
                self.calls[delta.index]["function"]["arguments"] += delta.arguments
            else:
                called = {"arguments": delta.arguments, "name": delta.name}
                self.calls.append({"id": delta.id, "function": called, "type": "function"})

    def message(self) -> Json:
        content = self.text if self.text or not (self.calls or self.thoughts) else None
        told: Json = {"content": content, "refusal": None, "role": "assistant"}
        if self.calls:
            told["tool_calls"] = self.calls
        if self.thoughts:
            told |= told_thoughts(self.thoughts)
        return told


def told_thoughts(thoughts: str) -> Json:
    """By both names: some clients read DeepSeek's alone, others the one that vLLM and OpenRouter use."""
    return {"reasoning": thoughts, "reasoning_content": thoughts}


def finish_reason(finish: Finish, choice: Choice) -> str:
    """OpenAI's word for how a choice ended."""
    return "tool_calls" if finish.reason is FinishReason.STOP and choice.called else finish.reason.value


def whole(head: Head, answer: Answer, pieces: Sequence[Piece]) -> bytes:
    """The body of an answer that is not streamed."""
    gathered = [WholeChoice() for _ in answer.choices]
    for piece in pieces:
        gathered[piece.choice].add(piece)
    made: list[Json] = []
    extra: Json = {"usage": usage_of(answer.choices), "metrics": answer.metrics()}
    for one, choice in zip(gathered, answer.choices, strict=True):
        assert choice.finish is not None
        told: Json = {
            "finish_reason": finish_reason(choice.finish, choice),
            "index": choice.number,
            "logprobs": logprobs_of(head, answer, choice.number, one.logprobs),
            **({"message": one.message()} if head.chat else {"text": one.text}),
            "stop_reason": stop_reason(choice.finish, answer.card.eos_ids),
        }
        if answer.options.prompt_logprobs is not None and not head.chat:
            told["prompt_logprobs"] = told_of_prompt(answer, choice)
        if answer.options.return_token_ids:
            told["token_ids"] = one.tokens
            (extra if head.chat else told)["prompt_token_ids"] = prompt_ids(head, answer, choice.number)
        made.append(told)
    if answer.options.prompt_logprobs is not None and head.chat:
        extra["prompt_logprobs"] = told_of_prompt(answer, answer.choices[0])
    return as_json(told_object(head, "chat.completion", made, extra))


def told_object(head: Head, of_chat: str, choices: list[Json], extra: Json) -> Json:
    """`of_chat`: the object's kind where it is one of a chat."""
    kind = of_chat if head.chat else "text_completion"
    return {"id": head.id, "choices": choices, "created": head.created, "model": head.model, "object": kind, **extra}


def chunk(
    head: Head,
    answer: Answer,
    piece: Piece,
    logprobs: Json | None,
    first: bool,
    first_of_all: bool,
) -> bytes:
    """One step of one choice as an event. `first`: of this choice, which in a chat says whose turn it is."""
    finish = finish_reason(piece.finish, answer.choices[piece.choice]) if piece.finish else None
    told: Json
    if head.chat:
        told = {"delta": delta_of(piece, first), "index": piece.choice, "finish_reason": finish, "logprobs": logprobs}
    else:
        told = {"finish_reason": finish, "index": piece.choice, "logprobs": logprobs, "text": piece.text}
    if piece.finish:
        told["stop_reason"] = stop_reason(piece.finish, answer.card.eos_ids)
    extra: Json = {}
    options = answer.options
    if options.include_usage:  # OpenAI: null in all chunks but the last
        extra["usage"] = usage_of(answer.choices) if options.continuous_usage else None
    if piece.trace is not None:
        extra["tidar"] = piece.trace
    if answer.options.return_token_ids:
        told["token_ids"] = piece.tokens
        if first_of_all or (first and not head.chat):
            (extra if head.chat else told)["prompt_token_ids"] = prompt_ids(head, answer, piece.choice)
    return event(told_object(head, "chat.completion.chunk", [told], extra))


def delta_of(piece: Piece, first: bool) -> Json:
    told: Json = {}
    if piece.text or not (piece.calls or piece.thoughts):
        told["content"] = piece.text
    if first:
        told["role"] = "assistant"
    if piece.calls:
        told["tool_calls"] = [call_delta(delta) for delta in piece.calls]
    if piece.thoughts:
        told |= told_thoughts(piece.thoughts)
    return told


def call_delta(delta: CallDelta) -> Json:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    begun = {"arguments": delta.arguments, "name": delta.name}
    return {"index": delta.index, "id": delta.id, "function": begun, "type": "function"}


def usage_chunk(head: Head, answer: Answer) -> bytes:
    """The last event of a stream whose client asked for usage: no choices, usage and metrics."""
    extra = {"usage": usage_of(answer.choices), "metrics": answer.metrics()}
    return event(told_object(head, "chat.completion.chunk", [], extra))


def event(told: Json) -> bytes:
    return b"data: " + as_json(told) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the stream began: the status line is long gone."""
    return event(error.body())


def failed_stream(error: ApiError) -> bytes:
    """All of a stream of which nothing but this came."""
    return error_event(error) + DONE


async def event_stream(
    head: Head,
    answer: Answer,
    first: Piece,
    rest: AsyncGenerator[Piece, None],
    broke: Callable[[Exception], None],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream whose first piece is here already; ends with [DONE], after an error too, of which `broke`
    is told."""
    begun: set[int] = set()
    offsets: dict[int, int] = {}
    try:
        async with aclosing(chain(first, rest)) as pieces:
            async for piece in pieces:
                is_first = piece.choice not in begun
                # A step whose text is still held back has nothing to show, except its tokens, in one way or another.
                shows = piece.told or piece.finish or piece.trace is not None or piece.logprobs
                if shows or answer.options.return_token_ids or (is_first and head.chat):
                    of_all = not begun
                    begun.add(piece.choice)
                    logprobs = streamed_logprobs(head, answer, piece, offsets)
                    yield chunk(head, answer, piece, logprobs, is_first, of_all)
        if answer.options.include_usage:
            yield usage_chunk(head, answer)
    except Exception as error:
        broke(error)
        if not isinstance(error, ApiError):
            log.exception("stream %s failed", head.id)
        yield error_event(error if isinstance(error, ApiError) else server_error())
    yield DONE


async def chain(first: Piece, rest: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


class EventStreamResponse(StreamingResponse):
    """Server-sent events. However the client leaves, the generator is closed at once, and with it the request. One that
    reads nothing, until all buffers on the way have been full for `UNREAD_SECONDS`, is taken to have left: its places
    are others'. While there is nothing to tell a comment is sent now and then (`SILENT_SECONDS`)."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        # X-Accel-Buffering: nginx would otherwise collect the events.
        self.events = events
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Serve's proxy hands on items that are ready before it looks whether the client is still there, so a fast
        # stream would outlive its client. Under this version of the ASGI specification Starlette listens itself.
        await super().__call__({**scope, "asgi": {**scope["asgi"], "spec_version": "2.3"}}, receive, send)

    async def stream_response(self, send: Send) -> None:
        async def soon(message: Message) -> None:
            try:
                async with asyncio.timeout(UNREAD_SECONDS):
                    await send(message)
            except TimeoutError:
                log.info("a stream ended: its client reads nothing")
                raise ClientDisconnect from None

        async with aclosing(self.events), never_silent(soon) as spoken:
            await super().stream_response(spoken)


@asynccontextmanager
async def never_silent(send: Send) -> AsyncIterator[Send]:
    """Within this what it gives sends as `send` does, and a comment goes out, which clients of server-sent events leave
    out, wherever nothing was sent for `SILENT_SECONDS`."""
    sent_at = time.monotonic()
    alone = asyncio.Lock()

    async def noted(message: Message) -> None:
        nonlocal sent_at
        async with alone:
            await send(message)
            sent_at = time.monotonic()

    async def comment() -> None:
        nonlocal sent_at
        while True:
            await asyncio.sleep(sent_at + SILENT_SECONDS - time.monotonic())
            async with alone:
                if time.monotonic() >= sent_at + SILENT_SECONDS:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                    sent_at = time.monotonic()

    try:
        async with asyncio.TaskGroup() as group:  # in which a comment that cannot be sent ends all
            commenting = group.create_task(comment())
            yield noted
            commenting.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
