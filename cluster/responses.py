"""Answers as OpenAI's objects: whole, or as the chunks of an event stream."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, server_error
from cluster.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from cluster.streams import Answer, Choice, Piece
from cluster.tool_calls import CallDelta
from tidar_core.request import Finish, FinishReason, TokenLogprobs
from tidar_core.text import token_bytes, token_text

log = logging.getLogger("ray.serve")
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer says. `chat` chooses between OpenAI's two families of objects."""

    model: str
    chat: bool
    id: str
    created: int = field(default_factory=lambda: int(time.time()))


def new_head(model: str, chat: bool) -> Head:
    return Head(model, chat, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}")


def usage_of(choices: Sequence[Choice]) -> CompletionUsage:
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = PromptTokensDetails(cached_tokens=sum(choice.cached_tokens for choice in choices))
    told: dict[str, Any] = {}
    if any(choice.thoughts is not None for choice in choices):
        told["completion_tokens_details"] = CompletionTokensDetails(reasoning_tokens=reasoning_tokens(choices))
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=cached,
        **told,
    )


def reasoning_tokens(choices: Sequence[Choice]) -> int:
    """Tokens of thoughts."""
    return sum(choice.thoughts.tokens for choice in choices if choice.thoughts is not None)


def stop_reason(finish: Finish, eos_ids: Sequence[int]) -> int | str | None:
    """vLLM's `stop_reason`: the stop string or id that was asked for and came up; null for the model's own end."""
    return None if finish.stop in eos_ids else finish.stop


def logprobs_of(
    head: Head, answer: Answer, choice: int, entries: Sequence[TokenLogprobs], offset: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a choice or of one of its chunks; null where none were asked for.

    As plain data: OpenAI has a type of its own for the same thing in chunks.
    """
    if answer.requests[choice].params.logprobs is None:
        return None
    tokenizer = answer.card.tokenizer
    spelled, bytes_of = partial(token_text, tokenizer), partial(token_bytes, tokenizer)
    if head.chat:
        return {"content": chat_logprobs(entries, spelled, bytes_of), "refusal": None}
    leading = answer.echoes[choice].first if answer.echoes and offset == 0 else None
    return completion_logprobs(entries, spelled, bytes_of, offset, leading)


def told_of_prompt(answer: Answer, choice: Choice) -> list[Any]:
    """vLLM's `prompt_logprobs`."""
    return prompt_logprobs(choice.prompt_logprobs, partial(token_text, answer.card.tokenizer))


@dataclass(slots=True)
class Gathered:
    """All pieces of a choice that is not streamed."""

    text: str = ""
    thoughts: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ChatCompletionMessageFunctionToolCall] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.thoughts += piece.thoughts
        self.logprobs += piece.logprobs
        for delta in piece.calls:
            if delta.id is None or delta.name is None:
                self.calls[delta.index].function.arguments += delta.arguments
            else:
                called = Function(name=delta.name, arguments=delta.arguments)
                self.calls.append(ChatCompletionMessageFunctionToolCall(id=delta.id, type="function", function=called))

    def message(self) -> ChatCompletionMessage:
        told: dict[str, Any] = {}
        if self.thoughts:
            told["reasoning_content"] = self.thoughts
        if self.calls:
            told["tool_calls"] = list(self.calls)
        content = self.text or None if told else self.text
        return ChatCompletionMessage(role="assistant", content=content, refusal=None, **told)


def finish_reason(finish: Finish, choice: Choice) -> str:
    """OpenAI's word for how a choice ended."""
    return "tool_calls" if finish.reason is FinishReason.STOP and choice.called else finish.reason.value


def whole(head: Head, answer: Answer, pieces: Sequence[Piece]) -> bytes:
    """The body of an answer that is not streamed."""
    gathered = [Gathered() for _ in answer.choices]
    for piece in pieces:
        gathered[piece.choice].add(piece)
    made: list[Any] = []
    for one, choice in zip(gathered, answer.choices, strict=True):
        assert choice.finish is not None
        end: dict[str, Any] = {
            "index": choice.number,
            "finish_reason": finish_reason(choice.finish, choice),
            "logprobs": logprobs_of(head, answer, choice.number, one.logprobs),
            "stop_reason": stop_reason(choice.finish, answer.card.eos_ids),
        }
        if head.chat:
            # As they are: to check thousands against OpenAI's type takes longer than to make them, and no stream
            # goes on meanwhile.
            checked = ChatChoice(message=one.message(), **{**end, "logprobs": None})
            made.append(checked.model_copy(update={"logprobs": end["logprobs"]}))
        else:
            if answer.tells_prompt:
                end["prompt_logprobs"] = told_of_prompt(answer, choice)
            # OpenAI's type forbids the null that stands for the first token of a prompt.
            made.append(CompletionChoice.model_construct(text=one.text, **end))
    common: dict[str, Any] = {"id": head.id, "created": head.created, "model": head.model, "choices": made}
    extra: dict[str, Any] = {"usage": usage_of(answer.choices), "metrics": answer.metrics()}
    if head.chat:
        if answer.tells_prompt:
            extra["prompt_logprobs"] = told_of_prompt(answer, answer.choices[0])
        return dump(ChatCompletion(object="chat.completion", **common, **extra))
    return dump(Completion(object="text_completion", **common, **extra))


def chunk(head: Head, answer: Answer, piece: Piece, first: bool, with_usage: bool, counts_on: bool) -> bytes:
    """One step of one choice as an event. `first`: of this choice, which in a chat says whose turn it is. counts_on:
    the usage so far is told with it."""
    end: dict[str, Any] = {
        "index": piece.choice,
        "finish_reason": finish_reason(piece.finish, answer.choices[piece.choice]) if piece.finish else None,
        "logprobs": logprobs_of(head, answer, piece.choice, piece.logprobs, piece.offset),
    }
    if piece.finish:
        end["stop_reason"] = stop_reason(piece.finish, answer.card.eos_ids)
    extra: dict[str, Any] = {}
    if with_usage:  # OpenAI: null in all chunks but the last
        extra["usage"] = usage_of(answer.choices) if counts_on else None
    if piece.trace is not None:
        extra["tidar"] = piece.trace
    if head.chat:
        return event(chunk_object(head, [ChunkChoice(delta=delta_of(piece, first), **end)], extra))
    # OpenAI's type forbids the null that its server sends while a completion goes on.
    choice = CompletionChoice.model_construct(text=piece.text, **end)
    return event(chunk_object(head, [choice], extra))


def delta_of(piece: Piece, first: bool) -> ChoiceDelta:
    fields: dict[str, Any] = {"role": "assistant"} if first else {}
    if piece.thoughts:
        fields["reasoning_content"] = piece.thoughts
    if piece.text or not (piece.calls or piece.thoughts):
        fields["content"] = piece.text
    if piece.calls:
        fields["tool_calls"] = [call_delta(delta) for delta in piece.calls]
    return ChoiceDelta(**fields)


def call_delta(delta: CallDelta) -> ChoiceDeltaToolCall:
    if delta.id is None:
        more = ChoiceDeltaToolCallFunction(arguments=delta.arguments)
        return ChoiceDeltaToolCall(index=delta.index, function=more)
    begun = ChoiceDeltaToolCallFunction(name=delta.name, arguments=delta.arguments)
    return ChoiceDeltaToolCall(index=delta.index, id=delta.id, type="function", function=begun)


def usage_chunk(head: Head, answer: Answer) -> bytes:
    """The last event of a stream whose client asked for usage: no choices, usage and metrics."""
    return event(chunk_object(head, [], {"usage": usage_of(answer.choices), "metrics": answer.metrics()}))


def chunk_object(head: Head, choices: list[Any], extra: dict[str, Any]) -> BaseModel:
    common: dict[str, Any] = {"id": head.id, "created": head.created, "model": head.model, "choices": choices}
    if head.chat:
        return ChatCompletionChunk(object="chat.completion.chunk", **common, **extra)
    return Completion(object="text_completion", **common, **extra)


def dump(answer: BaseModel) -> bytes:
    return answer.model_dump_json(exclude_unset=True, warnings=False).encode()


def event(answer: BaseModel) -> bytes:
    return b"data: " + dump(answer) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the stream began: the status line is long gone."""
    return b"data: " + bytes(error.response().body) + b"\n\n"


async def event_stream(
    head: Head,
    answer: Answer,
    first: Piece,
    rest: AsyncGenerator[Piece, None],
    broke: Callable[[Exception], None],
    with_usage: bool = False,
    counts_on: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream whose first piece is here already; ends with [DONE], after an error too, of which `broke`
    is told."""
    begun: set[int] = set()
    try:
        async with aclosing(chain(first, rest)) as pieces:
            async for piece in pieces:
                is_first = piece.choice not in begun
                # A step whose text is still held back has nothing to show, except its trace or log-probabilities.
                shows = piece.told or piece.finish or piece.trace is not None or piece.logprobs
                if shows or (is_first and head.chat):
                    begun.add(piece.choice)
                    yield chunk(head, answer, piece, is_first, with_usage, counts_on)
        if with_usage:
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
    """Server-sent events. However the client leaves, the generator is closed at once, and with it the request."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        # X-Accel-Buffering: nginx would otherwise collect the events.
        self._events = events
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Serve's proxy hands on items that are ready before it looks whether the client is still there, so a fast
        # stream would outlive its client. Under this version of the ASGI specification Starlette listens itself.
        await super().__call__({**scope, "asgi": {**scope["asgi"], "spec_version": "2.3"}}, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)
