"""Tools on the wire: what a request may say of them, and how the model's chat template writes a call."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, Tag

from cluster.errors import bad_request
from cluster.wire.limits import OBJECT, WORD, word_or_object
from cluster.wire.schema_types import values_of
from cluster.wire.structured import ResponseFormat, grammar_of
from cluster.wire.tagged_schemas import arguments_format
from cluster.wire.tool_calls import (
    HERMES,
    LLAMA,
    LONGEST_NAME,
    MISTRAL,
    QWEN_CODER,
    ToolFormat,
    ToolParser,
    begun_call,
)
from tidar_core.grammar.grammar import Grammar, schema_grammar, tag_grammar
from tidar_core.grammar.schemas import ANNOTATIONS, GrammarError, without_remarks

if TYPE_CHECKING:  # as for `ModelCard`
    from transformers import PreTrainedTokenizerFast

MAX_TOOLS = 128  # as OpenAI
# By which a chat template fails: it says so, or cannot do with what it was given.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{LONGEST_NAME}}}$")]


NOTHING_SAID: tuple[tuple[str, Any], ...] = (("required", []), ("minProperties", 0))


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of the arguments: one that allows none where the request gave none, or remarks alone."""
        given = self.parameters or {}
        says = any(name not in ANNOTATIONS and (name, value) not in NOTHING_SAID for name, value in given.items())
        return given if says else {"type": "object", "properties": {}}


class Tool(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        told: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            told["description"] = self.function.description
        return {"type": "function", "function": {**told, "parameters": self.function.schema_}}


class FunctionChoice(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: FunctionName


class NamedTool(BaseModel):
    """A `tool_choice` that names the function to call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: FunctionChoice


ChoiceWord = Annotated[Literal["none", "auto", "required"], Tag(WORD)]
OF_CHOICES = word_or_object("none, auto, required or an object that names a function")
ToolChoice = Annotated[ChoiceWord | Annotated[NamedTool, Tag(OBJECT)], OF_CHOICES]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What the answer to one request may call. functions: the schemas of the arguments by the functions' names.
    grammar: what the answer has to follow, if anything. parallel: whether it may have several calls. alone: whether it
    is nothing but calls, or has none. begun: the beginning of a call that the prompt ends with."""

    form: ToolFormat
    functions: Mapping[str, Any]
    parallel: bool
    grammar: Grammar | None
    alone: bool = False
    begun: str = ""

    def behind(self, begun_answer: str) -> "Toolbox":
        """For an answer that goes on with `begun_answer`. Raises ApiError (400) where that ends within a call and the
        answer has to follow something, which begins with the answer."""
        begun = begun_call(self.form, self.functions, begun_answer)
        # Not the beginning of a tag alone.
        is_call = begun.startswith(self.form.begin.strip()) and self.form.opening in begun
        if is_call and self.grammar is not None:
            raise bad_request(
                "continue_final_message: the last message ends within a tool call, and what the answer is held to "
                "(tool_choice, strict or response_format) begins anew: end the call there, or leave that out",
                "continue_final_message",
            )
        return replace(self, begun=begun)

    def parser(self) -> ToolParser:
        """For one answer."""
        return ToolParser(
            self.form,
            self.functions,
            self.parallel,
            lambda: f"call_{secrets.token_hex(12)}",
            self.begun,
            constrained=self.grammar is not None,
            alone=self.alone,
        )


def toolbox(
    tokenizer: "PreTrainedTokenizerFast",
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    parallel: bool,
    response_format: ResponseFormat | None,
) -> Toolbox | None:
    """None where the answer may call nothing. Slow for large schemas. Raises ApiError (400) where the model's template
    has no tools, or a schema cannot be enforced and has to be."""
    if not tools or choice == "none":
        return None
    form = tool_format(tokenizer)
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        parallel = False
    try:
        if choice in (None, "auto"):
            grammar = free_grammar(form, functions, parallel, response_format)
        else:
            grammar = tag_grammar(calls(form, functions, parallel))
    except GrammarError as error:
        raise bad_request(f"tools: {error}", "tools") from error
    alone = choice not in (None, "auto") or (response_format is not None and response_format.type != "text")
    return Toolbox(form, {function.name: function.schema_ for function in functions}, parallel, grammar, alone)


def free_grammar(
    form: ToolFormat, functions: Sequence[Function], parallel: bool, response_format: ResponseFormat | None
) -> Grammar | None:
    """What an answer has to follow that may call functions: it is calls, or what `response_format` asks for. In any
    text a function's arguments are held to its schema where one of the functions is `strict`. Raises GrammarError, and
    ApiError (400) for a fault of `response_format` alone."""
    asked = grammar_of(response_format, None)
    if asked is not None:
        schema = json.loads(asked.text or '{"type": "object"}')
        content = {"type": "json_schema", "json_schema": without_remarks(schema)}
        either = {"type": "or", "elements": [content, calls(form, functions, parallel)]}
        return tag_grammar(either, (("response_format", asked),))
    if not any(function.strict for function in functions):
        return None
    if not form.begin:  # an answer that does not begin as calls do has none
        first = r"\[" if form.in_list else "{"
        text = {"type": "regex", "pattern": rf"([ \t\r\n]*[^{first} \t\r\n](.|[\r\n])*)?"}
        return tag_grammar({"type": "or", "elements": [calls(form, functions, parallel, strict_alone=True), text]})
    return tag_grammar(
        {
            "type": "triggered_tags",
            "triggers": [form.begin.strip()],
            "tags": [tag(form, function, loose=not function.strict) for function in functions],
            "stop_after_first": not parallel,
        }
    )


def calls(
    form: ToolFormat, functions: Sequence[Function], parallel: bool, strict_alone: bool = False
) -> dict[str, Any]:
    """A structural tag of calls and nothing else; strict_alone: other functions than those may have any arguments.
    Raises GrammarError."""
    listed = {
        "type": "tags_with_separator",
        "tags": [tag(form, function, loose=strict_alone and not function.strict) for function in functions],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"type": "tag", "begin": "[", "content": listed, "end": "]"} if form.in_list else listed


def tag(form: ToolFormat, function: Function, loose: bool = False) -> dict[str, Any]:
    """A structural tag of one call; loose: with any arguments. Raises GrammarError."""
    schema = {"type": "object"} if loose else function.schema_
    schema_grammar(schema)  # what cannot be enforced is told first
    if values_of(schema, schema).types != {"object"}:
        raise GrammarError(f"the `parameters` of {function.name} must be the schema of an object, with that `type`")
    content: dict[str, Any] = {"type": "json_schema", "json_schema": without_remarks(schema)}
    if form.key is None:
        content = arguments_format({"additionalProperties": True} if loose else schema)
    return {"type": "tag", "begin": form.head(function.name), "content": content, "end": form.tail}


_PROBE_CALL = {"name": "probe_function", "arguments": {"probe": "1"}}
_PROBE_TOOL: dict[str, Any] = {
    "name": "probe_function",
    "description": "probe description",
    "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
}
_PROBE_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "probe"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00000", "function": _PROBE_CALL}],
    },
]
_SPELLINGS = (
    (HERMES, r'<tool_call>\s*\{"name": "probe_function", "arguments": \{"probe": "1"\}\}\s*</tool_call>'),
    (
        QWEN_CODER,
        r"<tool_call>\s*<function=probe_function>\s*<parameter=probe>\n1\n</parameter>\s*</function>\s*</tool_call>",
    ),
    (MISTRAL, r'\[\s*\{"name": "probe_function", "arguments": \{"probe": "1"\}, "id": "call00000"\}\s*\]'),
    (LLAMA, r'\{"name": "probe_function", "parameters": \{"probe": "1"\}\}'),
)


def tool_format(tokenizer: "PreTrainedTokenizerFast", param: str = "tools") -> ToolFormat:
    """How the model's chat template writes a call: it is asked to write one.

    Raises ApiError (400), which names `param`, where it has no tools, or writes calls in a way that is not read here.
    """
    tools: list[Any] = [{"type": "function", "function": _PROBE_TOOL}]
    try:
        text = str(tokenizer.apply_chat_template(_PROBE_TURNS, tools=tools, tokenize=False))
    except TEMPLATE_ERRORS:
        text = ""
    if "probe description" not in text:
        raise bad_request(
            "this model's chat template has no tools: ask without them, or serve a model whose template has", param
        )
    for form, spelling in _SPELLINGS:
        found = re.search(spelling, text)
        if found and (not form.in_list or _ends_with_special_token(tokenizer, text[: found.start()].rstrip())):
            return form
    raise bad_request(
        "this model's chat template writes tool calls in a way that is not read here; Hermes' <tool_call>, "
        "Llama 3's and Mistral's JSON and Qwen3-Coder's tags are",
        param,
    )


def _ends_with_special_token(tokenizer: "PreTrainedTokenizerFast", text: str) -> bool:
    added = tokenizer.added_tokens_decoder.values()
    return any(token.special and token.content and text.endswith(token.content) for token in added)
