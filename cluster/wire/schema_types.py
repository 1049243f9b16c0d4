"""Of which JSON types the values are that a schema allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_OF_OBJECTS = {"properties", "additionalProperties", "patternProperties", "propertyNames"}  # by themselves
_SAY_MORE = {"enum", "const", "type"}  # than alternatives beside them


@dataclass(frozen=True, slots=True)
class Values:
    """What a schema allows. types: the JSON types. texts: the strings, None where they are not listed one by one."""

    types: frozenset[str]
    texts: frozenset[str] | None


def values_of(schema: Any, whole: Any) -> Values:
    """The values that a schema allows: all where it names no type, none where its references lead in a circle. whole:
    what they lead into."""
    types, texts = set[str](), set[str]()
    listed = True
    for leaf in leaves_of(schema, whole):
        values = constants_of(leaf)
        if values is None:
            named = _named_types(leaf)
            types |= named
            listed = listed and "string" not in named
        else:
            types |= {_type_of(value) for value in values}
            texts |= {value for value in values if isinstance(value, str)}
    return Values(frozenset(types), frozenset(texts) if listed else None)


def leaves_of(schema: Any, whole: Any) -> list[Any]:
    """What a schema's references and alternatives lead to in the end, in their order. whole: what the references lead
    into; each is followed once. A schema that allows nothing is none of them; None stands for what is not there."""
    found = []
    seen = set[str]()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and "$ref" in one:
            reference = str(one["$ref"])
            if reference not in seen:
                seen.add(reference)
                waiting.append(led_to(reference, whole))
        elif isinstance(one, dict) and _SAY_MORE.isdisjoint(one) and (names := _alternatives_in(one)):
            waiting.extend(schema for name in reversed(names) for schema in reversed(one[name]))
        elif one is not False:
            found.append(one)
    return found


def constants_of(leaf: Any) -> list[Any] | None:
    """The values that a schema lists; None where it lists none."""
    if not isinstance(leaf, dict) or ("enum" not in leaf and "const" not in leaf):
        return None
    values = leaf.get("enum", [leaf.get("const")])
    return values if isinstance(values, list) else None


def _named_types(leaf: Any) -> frozenset[str]:
    if not isinstance(leaf, dict) or "enum" in leaf:
        return TYPES
    if "type" not in leaf:
        return TYPES if _OF_OBJECTS.isdisjoint(leaf) else frozenset({"object"})
    named = leaf["type"] if isinstance(leaf["type"], list) else [leaf["type"]]
    return TYPES.intersection(name for name in named if isinstance(name, str)) or TYPES


def _alternatives_in(schema: dict[str, Any]) -> list[str]:
    return [name for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)]


def led_to(reference: str, whole: Any) -> Any:
    """What a reference within a schema leads to; None where that is nothing."""
    if not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        name = plain_name(name)
        if isinstance(whole, list):
            # As often as references are followed: neither the whole list nor a long number is read for one of them.
            place = int(name) if name.isdecimal() and len(name) <= len(str(len(whole))) else len(whole)
            whole = whole[place] if place < len(whole) else None
        else:
            whole = whole.get(name) if isinstance(whole, dict) else None
    return whole


def plain_name(name: str) -> str:
    """A name as it is, where a reference spells it."""
    return name.replace("~1", "/").replace("~0", "~")


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function's schema says of its parameters: the schemas of those that it names, and that of all others, None
    where it says nothing of these."""

    named: Mapping[str, Any]
    other: Any


def parameters_of(schema: Any) -> Parameters:
    """Behind references and single alternatives."""
    leaves = leaves_of(schema, schema)
    top = leaves[0] if len(leaves) == 1 else schema
    if not isinstance(top, dict):
        return Parameters({}, None)
    named = top.get("properties")
    other = top.get("additionalProperties", top.get("unevaluatedProperties"))
    return Parameters(named if isinstance(named, dict) else {}, other)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = (("string", str), ("integer", int), ("number", float), ("array", list), ("object", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), "null")
