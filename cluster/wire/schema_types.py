"""Of which JSON types the values are that a schema allows."""

from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_OF_OBJECTS = {"properties", "additionalProperties", "patternProperties", "propertyNames"}  # by themselves


def types_of(schema: Any, whole: Any) -> frozenset[str]:
    """The types of the values that a schema allows: all where it names none, none where its references lead in a
    circle. whole: what they lead into; each is followed once."""
    found = set[str]()
    seen = set[str]()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            found |= set() if one is False else TYPES
        elif "$ref" in one:
            reference = str(one["$ref"])
            if reference not in seen:
                seen.add(reference)
                waiting.append(led_to(reference, whole))
        elif "enum" in one or "const" in one:
            values = one.get("enum", [one.get("const")])
            found |= {_type_of(value) for value in values} if isinstance(values, list) else TYPES
        elif "type" in one:
            named = one["type"] if isinstance(one["type"], list) else [one["type"]]
            found |= TYPES.intersection(name for name in named if isinstance(name, str)) or TYPES
        elif alternatives := [name for name in ("anyOf", "oneOf", "allOf") if isinstance(one.get(name), list)]:
            waiting.extend(schema for name in alternatives for schema in one[name])
        else:
            found |= TYPES if _OF_OBJECTS.isdisjoint(one) else {"object"}
    return frozenset(found)


def led_to(reference: str, whole: Any) -> Any:
    """What a reference within a schema leads to; None where that is nothing."""
    if not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        whole = whole.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(whole, dict) else None
    return whole


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = (("string", str), ("integer", int), ("number", float), ("array", list), ("object", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), "null")
