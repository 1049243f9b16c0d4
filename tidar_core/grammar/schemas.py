"""JSON schemas: which can be kept in every answer, and what a grammar has no use for.

A schema is refused where an answer could follow what is enforced of it and still not be valid: the grammar behind it
knows no negation, no conditions, no conjunctions, and reads nothing beside a reference or a list of alternatives.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import ceil, floor, isfinite
from typing import Any

from tidar_core.grammar.compiling import NAMED_SCHEMAS

MAX_SCHEMA_DEPTH = 64  # levels of JSON, of which a nested object takes two
TOO_DEEP = f"a schema may be nested at most {MAX_SCHEMA_DEPTH} levels deep"
MAX_PATTERNS = 64  # of an object, each of which is held against the others
MOST_COMPARED = 32  # characters of what names may begin with
LONGEST_PART = 256  # of a pattern that stands for one character of them; it is kept
RANGE = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
BEYOND_ASCII = "\u0100"
# Else what is reached is none of the schemas that are checked.
_KEYWORD = r"/(?:items|additionalProperties|propertyNames|(?:anyOf|oneOf|allOf|prefixItems)/\d+)"
_LEADS_HERE = re.compile(rf"#(?:{_KEYWORD}|/(?:\$defs|definitions|properties)/[^/]+)*/?")
RANGE_DECIMALS = 6  # of a number that has a range, as xgrammar 0.2.8 writes it
# What says nothing about an instance by itself.
ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
        "discriminator", "example", "examples", "id", "nullable", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
# What is said to who reads the schema, and that nothing in it may lead to.
REMARKS = frozenset(
    {"$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly"}
)
_NEVER_ENFORCED = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "then", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ONE_SCHEMA = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTED_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,), "boolean": (bool,), "integer": (int,), "null": (type(None),), "number": (int, float),
    "object": (dict,), "string": (str,),
}  # fmt: skip


class GrammarError(ValueError):
    """A grammar that cannot be followed; the message is one line for the user."""


def check_depth(value: Any) -> None:
    """Raises GrammarError where a value of JSON is nested too deep for a schema."""
    layer = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        layer = [
            item
            for value in layer
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not layer:
            return
    raise GrammarError(TOO_DEEP)


def check_schema(schema: Any) -> None:
    """Raises GrammarError with the first thing in a schema that could not be kept in every answer."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise GrammarError("a schema must be a JSON object")
        _check_level(one)
        waiting.extend(_inside(one))


def without_remarks(schema: Any) -> Any:
    """A schema without what is of no use to a grammar, and often most of it. What merely looks like a schema, in
    `enum` or `const`, stays as it is, and so do properties that are named like a remark."""
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name not in REMARKS}
    for name, value in kept.items():
        if name in _ONE_SCHEMA:
            kept[name] = without_remarks(value)
        elif name in NAMED_SCHEMAS and isinstance(value, dict):
            kept[name] = {named: without_remarks(one) for named, one in value.items()}
        elif name in _LISTED_SCHEMAS and isinstance(value, list):
            kept[name] = [without_remarks(one) for one in value]
    return kept


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas right inside a schema. What merely looks like one, in `enum` or `default`, is none."""
    for name in _ONE_SCHEMA:
        if name in schema:
            yield schema[name]
    for name in NAMED_SCHEMAS:
        if name in schema:
            if not isinstance(schema[name], dict):
                raise GrammarError(f"`{name}` must be an object of schemas")
            yield from schema[name].values()
    for name in _LISTED_SCHEMAS:
        if name in schema:
            if not isinstance(schema[name], list):
                raise GrammarError(f"`{name}` must be a list of schemas")
            yield from schema[name]


def _check_level(schema: dict[str, Any]) -> None:
    for name in _NEVER_ENFORCED:
        if name in schema:
            raise GrammarError(f"`{name}` cannot be enforced: leave it out of the schema")
    if schema.get("uniqueItems"):
        raise GrammarError("`uniqueItems` cannot be enforced: leave it out of the schema")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not _LEADS_HERE.fullmatch(reference):
        shown = str(reference)[:60]
        raise GrammarError(f"`$ref` {shown} cannot be followed: put the schema under `$defs` and lead there")
    if schema.get("type") == []:
        raise GrammarError("`type` must name at least one type")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise GrammarError("`allOf` of more than one schema cannot be enforced: write them as one")
    for name in ("$ref", "anyOf", "oneOf", "allOf"):
        beside = sorted(schema.keys() - ANNOTATIONS - {name})
        # `type` with `anyOf` is common and harmless only where each branch says it again
        if name in schema and beside:
            raise GrammarError(f"`{beside[0]}` beside `{name}` cannot be enforced: move it into the schemas there")
        if schema.get(name) == []:
            raise GrammarError(f"`{name}` must be a list of at least one schema")
    _check_values(schema)
    _check_string(schema)
    _check_range(schema)
    _check_names(schema)


def _check_string(schema: dict[str, Any]) -> None:
    if not isinstance(schema.get("pattern", ""), str):
        raise GrammarError("`pattern` must be a string")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise GrammarError("`pattern` beside minLength or maxLength cannot be enforced: say the length in the pattern")


def _check_range(schema: dict[str, Any]) -> None:
    for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GrammarError(f"`{name}` must be a non-negative integer")
    for name in RANGE:
        value = schema.get(name)
        if isinstance(value, int) and not _is_64_bit(value):
            raise GrammarError(f"`{name}` is beyond 64 bits, which cannot be enforced: leave it out of the schema")
    if "number" not in _types_of(schema):
        return
    finite = {}
    for name in RANGE:
        value = schema.get(name)
        if isinstance(value, float) and isfinite(value):
            finite[name] = Fraction(str(value)) * 10**RANGE_DECIMALS
        elif isinstance(value, int) and not isinstance(value, bool):
            finite[name] = Fraction(value) * 10**RANGE_DECIMALS
    least = [ceil(finite["minimum"])] if "minimum" in finite else []
    least += [floor(finite["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in finite else []
    most = [floor(finite["maximum"])] if "maximum" in finite else []
    most += [ceil(finite["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in finite else []
    if least and most and max(least) > min(most):
        first, last = (next(name for name in finite if end in name) for end in ("inimum", "aximum"))
        raise GrammarError(
            f"no number of {RANGE_DECIMALS} decimals lies between `{first}` and `{last}`: widen the range"
        )


def _check_names(schema: dict[str, Any]) -> None:
    """What names an object may have: each keyword is read by itself, and what was named already may come again."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        raise GrammarError("`required` must be a list of names, `properties` an object of schemas")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise GrammarError(f"`required` names {str(name)[:60]!r}, which `properties` does not have")
    if "object" not in _types_of(schema):
        return
    for other in ("properties", "patternProperties"):
        if schema.get("propertyNames", True) not in (True, {}, {"type": "string"}) and schema.get(other):
            raise GrammarError(f"`propertyNames` beside `{other}` cannot be enforced: leave it out of the schema")
    patterns = schema.get("patternProperties", {})
    if isinstance(patterns, dict):
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
        anything = all(one in (True, {}) for one in patterns.values())
        if patterns and properties and others is not False and not anything:
            raise GrammarError("`additionalProperties` beside properties and patternProperties cannot be enforced")
        _check_patterns(list(patterns), properties)
    free = bool(patterns) or "propertyNames" in schema or schema.get("additionalProperties", False) is not False
    free |= schema.get("unevaluatedProperties", False) is not False
    if free and schema.get("minProperties", 0) > len(set(required)) + 1:
        raise GrammarError("`minProperties` cannot be enforced where a name may come again: list `properties` instead")


def _types_of(schema: dict[str, Any]) -> list[Any]:
    """The types that a schema names; where it names none, all."""
    types = schema.get("type", [*_TYPES])
    return types if isinstance(types, list) else [types]


def _check_patterns(patterns: list[str], properties: dict[str, Any]) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise GrammarError(f"`patternProperties` may have at most {MAX_PATTERNS} patterns")
    beginnings = [_beginning(pattern) for pattern in patterns]
    for pattern, beginning in zip(patterns, beginnings, strict=True):
        for name in properties:
            if len(name) >= len(beginning) and all(map(_may_be, name, beginning)):
                raise GrammarError(
                    f"`patternProperties` cannot be enforced where {pattern[:60]!r} may match the property "
                    f"{name[:60]!r}: begin the pattern with ^ and what no property begins with"
                )
    for one, other in combinations(beginnings, 2):
        if all(map(_may_be, one, other)):
            raise GrammarError(
                "`patternProperties` cannot be enforced where a name may match two of its patterns: begin each with "
                "^ and another character"
            )


_BEGINNING = re.compile(
    r"([^\\^$.|?*+()\[\]{}]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[^a-zA-Z0-9]|\\[dDsSwW]|\[(?:\\.|[^\]\\\[])+\])"
    r"(?![?*]|\{0*[,}])(\+|\{[^}]*\})?",
    re.DOTALL,
)


def _beginning(pattern: str) -> list[str]:
    """The characters and classes of characters that each name a pattern matches certainly begins with."""
    beginning: list[str] = []
    place = 1
    while pattern.startswith("^") and "|" not in pattern and (found := _BEGINNING.match(pattern, place)):
        if len(found[1]) > LONGEST_PART:  # as if it might stand for anything
            break
        beginning.append(found[1])
        if found[2] or len(beginning) == MOST_COMPARED:
            break
        place = found.end()
    return beginning


@lru_cache(maxsize=4096)
def _characters(part: str) -> frozenset[str]:
    """What a part of a beginning may stand for, ASCII one by one and all else by one of them."""
    if len(part) == 1:
        return frozenset(part if part.isascii() else BEYOND_ASCII)
    try:
        written = re.compile(part, re.ASCII)
    except re.error:
        return frozenset((*map(chr, range(0x80)), BEYOND_ASCII))
    found = {character for character in map(chr, range(0x80)) if written.fullmatch(character)}
    beyond = not part.isascii() or "\\u" in part or "\\x" in part or part[:2] == "[^" or re.search(r"\\[DSW]", part)
    return frozenset(found | ({BEYOND_ASCII} if beyond else set()))


def _may_be(one: str, other: str) -> bool:
    """Whether two parts of beginnings may stand for the same character."""
    return not _characters(one).isdisjoint(_characters(other))


def _check_values(schema: dict[str, Any]) -> None:
    """`enum` and `const` are taken as they are: what else the schema says must hold for each of their values."""
    for name in ("enum", "const"):
        if name not in schema:
            continue
        beside = sorted(schema.keys() - ANNOTATIONS - {name, "type"})
        if beside:
            raise GrammarError(f"`{beside[0]}` beside `{name}` cannot be enforced: leave it out of the schema")
        values = schema[name] if name == "enum" else [schema[name]]
        if not isinstance(values, list) or not values:
            raise GrammarError("`enum` must be a list of at least one value")
        if any(not _is_kept(value) for value in values):
            raise GrammarError(f"`{name}` has a number beyond 64 bits, which would be changed: say it in another way")
        if "type" in schema and not all(_has_type(value, schema["type"]) for value in values):
            raise GrammarError(f"`{name}` has a value that is not of the schema's type")


def _is_kept(value: Any) -> bool:
    """Whether the compiler writes all numbers in a value as they are."""
    if isinstance(value, list | dict):
        return all(_is_kept(one) for one in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or (isfinite(value) if isinstance(value, float) else _is_64_bit(value))


def _is_64_bit(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _has_type(value: Any, types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    known = tuple(kind for name in names if isinstance(name, str) for kind in _TYPES.get(name, ()))
    if isinstance(value, bool):
        return bool in known
    if isinstance(value, float) and value.is_integer() and int in known:
        return True
    return isinstance(value, known)
