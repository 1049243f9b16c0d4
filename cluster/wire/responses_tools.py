"""The tools of OpenAI's Responses API as the functions of a chat, and whom a call is told of.

A namespace groups functions that the client runs; coding agents send their own and each MCP server's so. The model
hears of each by one name, which has both in it; in items they are apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from cluster.errors import FieldError
from cluster.wire.limits import OBJECT
from cluster.wire.tool_calls import LONGEST_NAME
from cluster.wire.tools import MAX_TOOLS, OF_CHOICES, ChoiceWord, Function, FunctionName

SEARCH = "web_search"  # by which the types of OpenAI's search begin


class FunctionTool(Function):
    """A function that the model may call, its fields beside `type`."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def is_a_function(cls, value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else "function"
        if kind != "function":
            raise ValueError(f"tools of type {kind!r} are not supported; this server takes functions")
        return value


class NamespaceTool(BaseModel):
    """Functions that belong together."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]

    @model_validator(mode="after")
    def names_are_short(self) -> "NamespaceTool":
        for function in self.tools:
            if len(name_of(self.name, function.name)) > LONGEST_NAME:
                what = f"{self.name} and {function.name} have more than {LONGEST_NAME} characters together"
                raise ValueError(f"{what}: shorten one of them")
        return self


class SearchTool(BaseModel):
    """OpenAI's own search, which is done on its servers alone."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Annotated[str, Field(pattern=rf"^{SEARCH}(_preview)?(_[0-9]{{4}}_[0-9]{{2}}_[0-9]{{2}})?$")]


def kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(kind, str) and kind.startswith(SEARCH):
        return "(search)"
    return "(namespace)" if kind == "namespace" else "(function)"


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("(function)")]
    | Annotated[NamespaceTool, Tag("(namespace)")]
    | Annotated[SearchTool, Tag("(search)")],
    Discriminator(kind_of_tool),
]
Tools = Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)]


class FunctionToolChoice(BaseModel):
    """A `tool_choice` that names the function to call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    name: FunctionName


Choice = Annotated[ChoiceWord | Annotated[FunctionToolChoice, Tag(OBJECT)], OF_CHOICES]


@dataclass(frozen=True, slots=True)
class Namespaced:
    """A function of a namespace."""

    namespace: str
    name: str


def name_of(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def namespaced(tools: Sequence[Any]) -> Mapping[str, Namespaced]:
    """The functions of namespaces, by what the model calls them."""
    groups = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {
        name_of(group.name, function.name): Namespaced(group.name, function.name)
        for group in groups
        for function in group.tools
    }


def check_search(tools: Sequence[Any]) -> None:
    """A model that may search need not; one that may do nothing else is asked to. Raises FieldError."""
    searches = [tool for tool in tools if isinstance(tool, SearchTool)]
    if searches and not any(chat_tools(tools)):
        what = f"tools of type {searches[0].type!r} are not supported where there are no functions beside them"
        raise FieldError(f"{what}: this server searches nothing", "tools.0")


def chat_tools(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """As a chat has them. What is said of a namespace is said with its first function."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield chat_tool(tool, {})
        elif isinstance(tool, NamespaceTool):
            for number, function in enumerate(tool.tools):
                told = {"name": name_of(tool.name, function.name)}
                if tool.description and not number:
                    told["description"] = f"{tool.name}: {tool.description}\n\n{function.description or ''}".rstrip()
                yield chat_tool(function, told)


def chat_tool(tool: FunctionTool, told: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "function", "function": {**tool.model_dump(exclude={"type"}, exclude_unset=True), **told}}


def chat_choice(choice: str | FunctionToolChoice | None) -> Any:
    if isinstance(choice, FunctionToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def repeated_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Those that the model heard of, as they came, and what they left out."""
    return [repeated(tool) for tool in tools if not isinstance(tool, SearchTool)]


def repeated(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    told = tool.model_dump(exclude_unset=True)
    if isinstance(tool, NamespaceTool):
        return told | {"description": tool.description or ""}
    return {"parameters": None, "strict": None} | told
