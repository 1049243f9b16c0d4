"""The messages of a chat as they come, and as a chat template takes them."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_core import from_json

from cluster.errors import FieldError
from cluster.wire.limits import few, shallow
from cluster.wire.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice

MAX_TEMPLATE_ARGUMENTS = 32
MAX_ARGUMENT_DEPTH = 32
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


Content = str | list[TextPart | RefusalPart] | None


PARTS: Mapping[str, str] = {"text": "text", "refusal": "refusal"}


def check_content(value: object, parts: Mapping[str, str] = PARTS) -> str | None:
    """A message's text: a string, or parts of text or of a refusal, which are joined by line ends as vLLM does.

    parts: the types that they may have, and where each has its text.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("content must be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise ValueError("each content part must be an object with a `type`")
        place = parts.get(kind) if isinstance(kind, str) else None
        if place is None:
            raise ValueError(f"content parts of type {kind!r} are not supported; this model reads text")
        if not isinstance(part.get(place), str):
            raise ValueError(f"a {kind} part needs a string in `{place}`")
        texts.append(part[place])
    return "\n".join(texts)


def arguments_object(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as the object that they are as text, or begin: an answer may have been cut off within them,
    and agents send it back as it came. None where they are neither."""
    try:
        found = json.loads(arguments or "{}")
    except RecursionError:
        return None
    except ValueError:
        found = begun_object(arguments)
    try:
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is legal JSON and no text
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def begun_object(text: str) -> Any:
    """What there is of a JSON object that breaks off, a number there as if it were whole; None where it is wrong
    before, or no object."""
    if not text.lstrip(" \t\r\n").startswith("{"):
        return None
    try:
        from_json(text)
    except TypeError:  # a lone surrogate
        return None
    except ValueError as error:
        return from_json(text, allow_partial="trailing-strings") if str(error).startswith("EOF") else None
    return None


def short_id(call_id: str) -> str:
    """The id of a call in nine letters and digits, itself where it is that already."""
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", call_id)
    return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:9]


class FunctionCall(BaseModel):
    """A call that the model made in an earlier turn. arguments: a JSON object, as text, of which the end may lack."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def are_an_object(cls, arguments: str) -> str:
        if arguments_object(arguments) is None:
            raise ValueError("must be a JSON object as text")
        return arguments


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One turn. content may be null where the assistant called tools, refused, or came no further than its thoughts,
    which not every client sends back."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(check_content, json_schema_input_type=Content)] = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def says_something(self) -> "Message":
        if self.role != "assistant" and self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.refusal is not None and self.role != "assistant":
            raise ValueError("refusal is for messages of the assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for messages of the assistant")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id that it answers")
        for name in ("function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported in messages")
        return self

    @property
    def is_of_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def thought(self) -> str:
        """What the model thought before it said this, as a client sends it back: by DeepSeek's name, or vLLM's newer
        one."""
        given = self.model_extra or {}
        told = (given.get("reasoning_content"), given.get("reasoning"))
        return next((text for text in told if text and isinstance(text, str)), "")

    def for_template(self, short_ids: bool = False) -> dict[str, Any]:
        """As chat templates expect it: arguments as an object, and of what is not there no word. short_ids: for one
        that takes no ids of calls but those of nine letters and digits."""
        of_template = short_id if short_ids else str
        # Templates of open models know `system`, OpenAI's newer name for the same role is `developer`.
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        turn["content"] = self.content or self.refusal or ""
        if self.name is not None:
            turn["name"] = self.name
        if self.thought and self.role == "assistant":
            turn["reasoning_content"] = self.thought
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": of_template(call.id),
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_object(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = of_template(self.tool_call_id)
        return turn


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
TemplateArguments = Annotated[
    dict[str, JsonValue],
    Field(description="What the model's chat template takes besides, as Qwen3's `enable_thinking`."),
    few(MAX_TEMPLATE_ARGUMENTS),
    shallow(MAX_ARGUMENT_DEPTH),
]


class Templated(BaseModel):
    """What of a body becomes a prompt by the model's chat template. Null means the same as leaving a field out."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Left out: true, but where the last message is gone on with.")
    ] = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Annotated[
        Effort | None, Field(description="Told the model's chat template, which may not care; `none`: no thoughts.")
    ] = None

    @model_validator(mode="after")
    def can_go_on(self) -> "Templated":
        name, begun = "continue_final_message", self.begun_answer
        if begun is None:
            return self
        if self.add_generation_prompt:
            raise FieldError(f"{name} goes on with the last message: set add_generation_prompt to false", name)
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls or not begun.strip():
            raise FieldError(f"{name} needs a last message of the assistant, with text and without tool_calls", name)
        return self

    @model_validator(mode="after")
    def choice_is_among_tools(self) -> "Templated":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools: two functions have the same name", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise FieldError(f"tool_choice names `{name}`, which is not among the tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice required needs tools to choose from", "tool_choice")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model hears of: none where it may not call them."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the template is told besides. Few have a word for the effort, most for whether there is any."""
        effort = self.reasoning_effort
        told = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return told | (self.chat_template_kwargs or {})

    @property
    def begun_answer(self) -> str | None:
        """The last message's text where the answer goes on with it; None where it is a turn of its own."""
        if not self.continue_final_message:
            return None
        return (self.messages[-1].content if self.messages else None) or ""
