"""OpenAI's Responses API as it is asked: its items and fields as those of a chat.

Nothing is stored here: a client sends the whole conversation each time, what the model said and called among its items.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from cluster.errors import ApiError, FieldError, bad_request, from_validation
from cluster.wire.encoding import in_one_line
from cluster.wire.limits import few, stated
from cluster.wire.messages import Effort, FunctionCall, RefusalPart, check_content
from cluster.wire.responses_tools import (
    Choice,
    Namespaced,
    Tools,
    chat_choice,
    chat_tools,
    check_search,
    name_of,
    namespaced,
    repeated_tools,
)
from cluster.wire.schemas import ChatBody, first_in_vain
from cluster.wire.structured import JsonSchema
from tidar_core.request import MAX_LOGPROBS, Sampling

TEXT_PARTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
LOGPROBS = "message.output_text.logprobs"  # of `include`

# Fields that would change the answer and are not supported, with the values that ask for nothing (null always does).
UNSUPPORTED_HERE: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}
STORED = frozenset({"previous_response_id", "conversation", "prompt"})  # at OpenAI, and nowhere here
# What a chat calls these is not passed on as if it had been asked for.
CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}
# They cannot change the answer: a text that is too long is refused, whatever `truncation` says.
HARMLESS_HERE = frozenset(
    {
        "client_metadata",
        "max_tool_calls",
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
        "user",
    }
)


class InputPart(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


ItemContent = str | list[InputPart | RefusalPart]


def item_content(value: object) -> str | None:
    return check_content(value, TEXT_PARTS)


ItemText = Annotated[str, BeforeValidator(item_content, json_schema_input_type=ItemContent)]


class MessageItem(BaseModel):
    """A turn of the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText


class CallItem(FunctionCall):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    namespace: str | None = None


class CallOutputItem(BaseModel):
    """What a call brought."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function_call_output"]
    call_id: str
    output: ItemText


class ReasoningItem(BaseModel):
    """What a model thought in an earlier turn, sent back: its text, where it is told, is for the template."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["reasoning"]
    content: Any = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else ()
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
        return "".join(text for text in texts if isinstance(text, str))


def kind_of(value: object) -> str | None:
    if isinstance(value, BaseModel):
        return f"({getattr(value, 'type', None)})"
    if not isinstance(value, dict):
        return None
    return "(message)" if value.get("type") is None and "role" in value else f"({value.get('type')})"


Item = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[CallItem, Tag("(function_call)")]
    | Annotated[CallOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(
        kind_of,
        custom_error_type="item",
        custom_error_message="must be an item of type message, function_call, function_call_output or reasoning; "
        "others are not supported, an item_reference neither: no response is stored, so send the item itself (clients "
        "do where `store` is false)",
    ),
]


def text_as_item(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of items")
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(JsonSchema):
    """`text.format`: what the answer has to follow."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""

    @model_validator(mode="after")
    def schema_has_a_name(self) -> "TextFormat":
        if self.type == "json_schema" and not {"name", "schema_"} <= self.model_fields_set:
            raise ValueError("a json_schema needs a `name` and a `schema`")
        return self


class TextOptions(BaseModel):
    """`text`: how the answer is to be written."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`: how much the model is to think."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: Effort | None = None


class ResponsesBody(BaseModel):
    """`POST /v1/responses`. Null means the same as leaving a field out; what is not named here is as in a chat."""

    model_config = ConfigDict(extra="allow", strict=True)

    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(text_as_item, json_schema_input_type=str | list[Item]),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, stated(minimum=1)] = None
    include: Annotated[list[str], Field(max_length=32, fail_fast=True)] | None = None
    top_logprobs: Annotated[int | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str] | None, few(16)] = None

    @model_validator(mode="after")
    def nothing_is_asked_for_in_vain(self) -> "ResponsesBody":
        given = self.model_extra or {}
        for name, here in CHAT_NAMES.items():
            if given.get(name) is not None:
                raise FieldError(f"{name} is a field of chats: use {here}", name)
        in_vain = first_in_vain(given, UNSUPPORTED_HERE)
        if in_vain is not None:
            why = ": no response is stored, send the whole conversation" if in_vain in STORED else ""
            raise FieldError(f"{in_vain} is not supported by this server{why}", in_vain)
        tidar = given.get("tidar")
        if isinstance(tidar, dict) and tidar.get("trace"):
            raise FieldError("tidar.trace is for /v1/chat/completions and /v1/completions", "tidar.trace")
        check_search(self.tools or ())
        return self

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def namespaced(self) -> Mapping[str, Namespaced]:
        """The functions of namespaces, by what the model calls them."""
        return namespaced(self.tools or ())

    def as_chat(self) -> ChatBody:
        """The same question to /v1/chat/completions. Raises ApiError (400), by the name of the field here."""
        own = HARMLESS_HERE | UNSUPPORTED_HERE.keys()
        fields = {name: value for name, value in (self.model_extra or {}).items() if name not in own}
        fields |= {
            "model": self.model,
            "messages": messages_of(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "tools": None if self.tools is None else list(chat_tools(self.tools)),
            "tool_choice": chat_choice(self.tool_choice),
            "response_format": None if self.text is None else chat_format(self.text.format),
            "reasoning_effort": self.effort,
        }
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise as_here(from_validation(error)) from error

    def repeated(self, sampling: Sampling) -> str:
        """What every object of its answer repeats of it, or says of what it left out, as JSON; `sampling` is how the
        tokens are picked. Raises ApiError (400) where JSON has no word for it."""
        passed = self.model_extra or {}
        given = self.model_dump(include={"tool_choice", "text"}, exclude_unset=True, by_alias=True)
        text = {name: value for name, value in (given.get("text") or {}).items() if value is not None}
        told = {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": passed.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": repeated_tools(self.tools or ()),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }
        try:
            made = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (ValueError, RecursionError) as error:
            raise bad_request("tools and text must be JSON, and not nested too deeply", "tools") from error
        return in_one_line(made.encode()).decode()


def messages_of(instructions: str | None, items: Sequence[Any]) -> list[dict[str, Any]]:
    """The items as a chat's messages: calls join the assistant's turn that they follow, thoughts the one before which
    they stand."""
    messages: list[dict[str, Any]] = []
    thought = ""
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, ReasoningItem):
            thought += item.text
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": item.content})
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            called = {"name": name_of(item.namespace, item.name), "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": called})
        if not isinstance(item, ReasoningItem):
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thought
            thought = ""
    if not messages:
        raise bad_request("input has nothing that this model reads", "input")
    return messages


def chat_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}


def as_here(error: ApiError) -> ApiError:
    """An error about a chat, by the names of the fields here. What is quoted is the client's own."""
    field, dot, rest = (error.param or "").partition(".")
    message = error.message
    for chat, here in CHAT_NAMES.items():
        message = re.sub(rf"(?<![\w.`'\"]){chat}(?![\w`'\"])", here, message)
    if field not in CHAT_NAMES:
        return error if message == error.message else ApiError(error.status, message, error.param, error.code)
    return ApiError(error.status, message, CHAT_NAMES[field] + (dot + rest if field != "messages" else ""), error.code)
