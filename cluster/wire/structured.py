"""Constrained output on the wire: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.errors import bad_request
from tidar_core.grammar.grammar import Grammar, choice_grammar, schema_grammar
from tidar_core.grammar.schemas import GrammarError

MAX_OPTIONS = 1024  # of structured_outputs.choice


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one way to say what the answer has to follow."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_OPTIONS)] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, value: object) -> object:
        """vLLM's own class, written out, has all of its fields."""
        if not isinstance(value, dict):
            return value
        return {name: asked for name, asked in value.items() if asked is not None and asked is not False}

    @model_validator(mode="after")
    def one_way(self) -> "StructuredOutputs":
        ways = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self

    def as_grammar(self) -> Grammar:
        """Raises GrammarError."""
        if self.json_ is not None:
            return Grammar("json_schema", self.json_) if isinstance(self.json_, str) else schema_grammar(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        return Grammar("json_object") if self.grammar is None else Grammar("ebnf", self.grammar)


class JsonSchema(BaseModel):
    """OpenAI's `json_schema` of a `response_format`. An answer always keeps to the schema, `strict` or not."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def schema_is_there(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def as_grammar(self) -> Grammar | None:
        """None for plain text. Raises GrammarError."""
        if self.type == "text":
            return None
        return Grammar("json_object") if self.json_schema is None else schema_grammar(self.json_schema.schema_)


def grammar_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """What an answer has to follow, if anything. Raises ApiError (400)."""
    name, grammar = "response_format", None
    try:
        if form is not None:
            grammar = form.as_grammar()
        if structured is not None:
            name = "structured_outputs"
            if grammar is not None:
                raise bad_request("give either response_format or structured_outputs, not both", name)
            grammar = structured.as_grammar()
    except GrammarError as error:
        raise bad_request(f"{name}: {error}", name) from error
    return grammar
