"""`Grammar` is what a request carries. Making one checks all that is cheap to check, so that nothing oversized goes any
further."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tidar_core.grammar.schemas import TOO_DEEP, GrammarError, check_depth, check_schema

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]

MAX_GRAMMAR_BYTES = 64 * 1024
MOST_TIMES_LARGER = 4  # a structural tag may be, where it has as many schemas: those of 128 tools


@dataclass(frozen=True, slots=True)
class Grammar:
    """kind: how `text` is written: a JSON schema, a regular expression that matches the whole answer, GBNF, the EBNF
    of llama.cpp with the rule `root`, or xgrammar's structural tag, which puts schemas between fixed texts.
    json_object needs no text. parts: grammars within this one that a field of their own asks for, by its name; it is
    told where this one cannot be compiled since the part cannot. Raises GrammarError."""

    kind: GrammarKind
    text: str = ""
    parts: tuple[tuple[str, "Grammar"], ...] = ()

    def __post_init__(self) -> None:
        self._check_size(MOST_TIMES_LARGER if self.kind == "structural_tag" else 1)
        if self.kind == "json_schema":
            check_schema(_parsed(self.text))
        elif self.kind == "structural_tag":
            schemas = list(_schemas_between(_parsed(self.text)))
            self._check_size(max(1, min(len(schemas), MOST_TIMES_LARGER)))
            for schema in schemas:
                check_schema(schema)
        elif self.kind != "json_object" and not self.text:
            raise GrammarError(f"the {'regular expression' if self.kind == 'regex' else 'grammar'} is empty")

    def _check_size(self, times: int) -> None:
        most, size = times * MAX_GRAMMAR_BYTES, len(self.text.encode("utf-8", "surrogatepass"))
        if size > most:
            raise GrammarError(f"a grammar may have at most {most} bytes, this one has {size}")


def schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """The grammar of a schema that was parsed already."""
    check_depth(schema)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def tag_grammar(form: dict[str, Any], parts: tuple[tuple[str, Grammar], ...] = ()) -> Grammar:
    """The grammar of a format of xgrammar's structural tags."""
    check_depth(form)
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return Grammar("structural_tag", text, parts)


def choice_grammar(choices: list[str]) -> Grammar:
    """One of the texts, word for word."""
    if not choices or not all(choices):
        raise GrammarError("a choice needs at least one text, and none of them may be empty")
    return Grammar("ebnf", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    check_depth(schema)
    return schema


def _schemas_between(form: Any) -> Iterator[Any]:
    """The schemas in a structural tag. What a schema itself holds is none of the tag's."""
    if isinstance(form, list):
        for item in form:
            yield from _schemas_between(item)
    elif isinstance(form, dict):
        if form.get("type") == "json_schema":
            yield form.get("json_schema")
        else:
            yield from _schemas_between(list(form.values()))
