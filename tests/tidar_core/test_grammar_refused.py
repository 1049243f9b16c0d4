"""Grammars that are refused before an engine sees them, in one line that names what is wrong."""

import json
import re
from typing import Any

import pytest

from tidar_core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError, choice_grammar, schema_grammar

REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "if": {}, "then": {}}, "`if`"),
    ({"type": "array", "items": {"type": "string", "pattern": "a", "maxLength": 3}}, "pattern"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "beside `$ref`"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "beside `anyOf`"),
    ({"type": "integer", "enum": [1, "a"]}, "type"),
    ({"type": "integer", "enum": [1, True]}, "type"),
    ({"const": 3, "minimum": 5}, "beside `const`"),
    ({"properties": {"a": {"properties": {}, "required": ["b"]}}}, "'b'"),
    ({"properties": {}, "required": [["b"]]}, "['b']"),
    ({"properties": []}, "properties"),
    ({"anyOf": {"type": "integer"}}, "anyOf"),
    ([], "object"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED_SCHEMAS)
def test_schemas_that_could_not_be_kept_are_refused(schema: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)):
        Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"not": {"enum": [{"if": 1}]}, "if": True}, "required": ["not"]},
        {"$ref": "#/$defs/a", "title": "A", "$defs": {"a": {"type": ["integer", "null"], "enum": [1.0]}}},
    ],
)
def test_what_only_looks_like_a_keyword_is_none(schema: dict[str, Any]) -> None:
    assert json.loads(schema_grammar(schema).text) == schema


def test_grammars_are_bounded_before_any_work() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    deeper = "[" * 100_000
    for grammar in (
        lambda: schema_grammar({"type": "array", "items": {"type": "object", "properties": {"a": deep, "b": deep}}}),
        lambda: Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        lambda: Grammar("json_schema", deeper[:MAX_GRAMMAR_BYTES]),
        lambda: Grammar("json_schema", "{"),
        lambda: Grammar("regex"),
        lambda: Grammar("ebnf"),
        lambda: choice_grammar([]),
        lambda: choice_grammar(["a", ""]),
    ):
        with pytest.raises(GrammarError) as caught:
            grammar()
        assert "\n" not in str(caught.value)
