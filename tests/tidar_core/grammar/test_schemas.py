"""Grammars that are refused before an engine sees them, in one line that names what is wrong."""

import json
import re
from typing import Any

import pytest

from tidar_core.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar, choice_grammar, schema_grammar, tag_grammar
from tidar_core.grammar.schemas import REMARKS, GrammarError, without_remarks

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
    ({"type": "string", "pattern": 3}, "`pattern` must be a string"),
    ({"type": "string", "maxLength": -1}, "`maxLength` must be a non-negative integer"),
    ({"type": "string", "minLength": -1}, "`minLength` must be a non-negative integer"),
    ({"type": "array", "minItems": True}, "`minItems` must be a non-negative integer"),
    ({"anyOf": []}, "`anyOf` must be a list of at least one schema"),
    ({"properties": {"a": {"oneOf": []}}}, "`oneOf` must be a list of at least one schema"),
    ({"allOf": []}, "`allOf` must be a list of at least one schema"),
    ({"enum": []}, "`enum` must be a list of at least one value"),
    ({"type": []}, "`type` must name at least one type"),
    ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "between `minimum` and `maximum`"),
    ({"minimum": 1e-9, "maximum": 2e-9}, "between `minimum` and `maximum`"),
    (
        {"type": ["number", "null"], "exclusiveMinimum": 1, "exclusiveMaximum": 1.0000001},
        "between `exclusiveMinimum` and `exclusiveMaximum`",
    ),
    ({"const": 2**63}, "`const` has a number beyond 64 bits"),
    ({"enum": [0, [{"a": -(2**63) - 1}]]}, "`enum` has a number beyond 64 bits"),
    ({"const": 10**400}, "`const` has a number beyond 64 bits"),
    ({"properties": {"abc": {}}, "patternProperties": {"^a": {}}}, "'^a' may match the property 'abc'"),
    ({"properties": {"abc": {}}, "patternProperties": {"b": {}}}, "'b' may match the property 'abc'"),
    ({"properties": {"abc": {}}, "patternProperties": {"^(x|a)": {}}}, "'^(x|a)' may match"),
    ({"properties": {"abc": {}}, "patternProperties": {"^x|b": {}}}, "'^x|b' may match"),
    ({"properties": {"abc": {}}, "patternProperties": {"^x*a": {}}}, "'^x*a' may match"),
    (
        {"properties": {"abc": {}}, "patternProperties": {"^x": {"const": 1}}, "additionalProperties": {}},
        "`additionalProperties` beside properties and patternProperties",
    ),
    ({"$ref": "#/components/schemas/X"}, "`$ref` #/components/schemas/X cannot be followed"),
    ({"$ref": "#/properties/a/default", "properties": {"a": {"default": 1}}}, "cannot be followed"),
    ({"$ref": "https://example.org/schema"}, "cannot be followed"),
    ({"type": "integer", "minimum": 10**400}, "`minimum` is beyond 64 bits"),
    (
        {"properties": {"1": {}}, "patternProperties": {"^[0-9a]{1,3}$": {}}},
        "may match the property '1'",
    ),
    ({"patternProperties": {"^a": {}, "b$": {}}}, "match two of its patterns"),
    ({"patternProperties": {"^a": {}, f"^[{'b' * 255}]": {}}}, "match two of its patterns"),
    ({"patternProperties": {f"^{chr(500 + count)}": {} for count in range(65)}}, "at most 64 patterns"),
    ({"properties": {"abc": {}}, "propertyNames": {"maxLength": 2}}, "`propertyNames` beside `properties`"),
    (
        {"patternProperties": {"^a": {}}, "propertyNames": {"maxLength": 2}},
        "beside `patternProperties`",
    ),
    ({"type": "object", "additionalProperties": True, "minProperties": 2}, "`minProperties` cannot be enforced"),
    ({"type": "object", "patternProperties": {"^a": {}}, "minProperties": 2}, "`minProperties` cannot be enforced"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED_SCHEMAS)
def test_schemas_that_could_not_be_kept_are_refused(schema: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)):
        Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"not": {"enum": [{"if": 1}]}, "if": True}, "required": ["not"]},
        {"const": {"pattern": 3, "anyOf": [], "maxLength": -1}},
        {"const": [2**63 - 1, -(2**63), 1e300, True]},
        {"type": "number", "minimum": 1e-9},
        {"type": "number", "minimum": 3, "exclusiveMinimum": True, "maximum": 10**18},
        {"type": "number", "minimum": 0.000001, "maximum": 0.0000015},
        {"type": "integer", "minimum": -(2**62), "exclusiveMaximum": 10**18},
        {"properties": {"abc": {}}, "patternProperties": {"^x-": {}, r"^\d+$": {}, "^S_": {}}},
        {"properties": {"default": {}}, "patternProperties": {r"^[0-9]{3}$": {}}, "additionalProperties": False},
        {"patternProperties": {"^[a-z]+$": {}, r"^[0-9]+$": {}, r"^\x41": {}}, "additionalProperties": False},
        {"patternProperties": {"^a": {}, f"^[{'b' * 254}]": {}}},
        {"type": "array", "patternProperties": {"^a": {}}, "properties": {"a": {}}},
        {"properties": {"name": {}}, "patternProperties": {"^x-": {}}, "additionalProperties": True},
        {"properties": {"name": {}}, "propertyNames": {"type": "string"}, "additionalProperties": True},
        {"properties": {"a": {"$ref": "#/properties/b/items"}, "b": {"type": "array", "items": {}}}},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}, "minProperties": 1},
        {"properties": {"a": {}}, "required": ["a"], "additionalProperties": {}, "minProperties": 2},
        {"type": "string", "pattern": "a", "format": "our-own"},
        {"$ref": "#/$defs/a", "title": "A", "$defs": {"a": {"type": ["integer", "null"], "enum": [1.0]}}},
    ],
)
def test_what_only_looks_like_a_keyword_is_none(schema: dict[str, Any]) -> None:
    assert json.loads(schema_grammar(schema).text) == schema


def test_remarks_are_left_out_where_they_are_remarks() -> None:
    """And nowhere else: as the name of a property or a definition, and in a value."""
    named = {"type": "object", "properties": {"description": {"type": "string"}, "title": {"$ref": "#/$defs/default"}}}
    values = {"enum": [{"description": "a", "title": "b"}]}
    kept = {
        **named,
        "required": ["description"],
        "additionalProperties": {"anyOf": [values, {"const": {"default": 1}}, True]},
        "patternProperties": {"^examples$": {"prefixItems": [{}], "items": False}},
        "$defs": {"default": {"type": "string"}, "deprecated": {}},
    }

    def remarked(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        remarks = {name: {"properties": {"a": 1}} for name in REMARKS}
        said = dict(schema)
        for name in ("properties", "patternProperties", "$defs"):
            if name in schema:
                said[name] = {key: remarked(one) for key, one in schema[name].items()}
        for name in ("anyOf", "prefixItems"):
            if name in schema:
                said[name] = [remarked(one) for one in schema[name]]
        for name in ("additionalProperties", "items"):
            if name in schema:
                said[name] = remarked(schema[name])
        return remarks | said

    assert without_remarks(remarked(kept)) == kept
    assert list(without_remarks(remarked(kept))["properties"]) == ["description", "title"]
    for strange in (None, True, [], "a", {"properties": [1]}, {"anyOf": {"title": 1}}):
        assert without_remarks(strange) == strange


def test_what_many_schemas_make_may_be_larger() -> None:
    def tag(schemas: int, size: int) -> Grammar:
        text = {"type": "const_string", "value": "a" * size}
        parts = [text, *[{"type": "json_schema", "json_schema": {"type": "object"}}] * schemas]
        return tag_grammar({"type": "sequence", "elements": parts})

    for schemas, times in ((0, 1), (1, 1), (2, 2), (9, 4)):
        assert tag(schemas, times * MAX_GRAMMAR_BYTES - 1_000).text
        with pytest.raises(GrammarError, match=f"at most {times * MAX_GRAMMAR_BYTES} bytes"):
            tag(schemas, times * MAX_GRAMMAR_BYTES)


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
