"""What a call has to follow whose arguments stand in tags, so that they are what the function's schema asks for.

Parameters come in the schema's order, as the model's template writes them. A text is written as it is, anything else as
JSON, and `TaggedArguments` makes the same values of it. Texts cannot be told from numbers: a parameter that may be
either is written as a text, unless the texts are listed.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.wire.schema_types import TYPES, constants_of, leaves_of, values_of
from cluster.wire.tagged_arguments import LONGEST_KEY, VALUE_END
from tidar_core.grammar.compiling import format_of
from tidar_core.grammar.patterns import pattern_of_a_line
from tidar_core.grammar.schemas import ANNOTATIONS, GrammarError, without_remarks

_HERE = "in this model's tags"
_FOR_ALL = f"for all parameters cannot be enforced {_HERE}"
_OWN_TAG = r"<parameter=[^\x00-\x1f<>\ud800-\udfff]{1,64}>"  # of a parameter that the model makes up
_BEHIND = f"{VALUE_END}\n"
_ANY_TEXT = {"type": "any_text", "excludes": [VALUE_END]}
# Of a text whose length is held to something. It has one line, since the end of a value begins with another.
_CHARACTER = r"[^\x00-\x08\x0a-\x1f\ud800-\udfff]"
_NOT_OPENING = r"[^\x00-\x20\[{\ud800-\udfff]"
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]{0,60})')

# Formats, as xgrammar 0.2.8 has them in JSON or narrower.
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LONGER_LABEL = r"[A-Za-z0-9][A-Za-z0-9-]{0,61}[A-Za-z0-9]"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IN_PATH = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_HOURS = r"(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)(T{_HOURS})?|T{_HOURS})",
    "email": rf"[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@{_LABEL}(\.{_LONGER_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*".replace("A-Z", ""),
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "time": _TIME,
    "uri": (
        rf"[A-Za-z][A-Za-z+.-]*:(//([A-Za-z0-9._~-]+@)?{_LABEL}(\.{_LABEL})*(:\d{{1,5}})?(/{_IN_PATH}*)*"
        rf"|/?{_IN_PATH}+(/{_IN_PATH}*)*)(\?({_IN_PATH}|[/?])*)?(#({_IN_PATH}|[/?])*)?"
    ),
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}


def arguments_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The structural tag of a call's arguments that a schema of an object allows. Raises GrammarError with the first
    thing that could not be kept."""
    top, *others = leaves_of(schema, schema)
    if others:
        raise GrammarError(f"alternatives {_FOR_ALL}: describe one object")
    if top.get("patternProperties"):
        raise GrammarError(f"`patternProperties` {_FOR_ALL}: name them under `properties`")
    properties, required = top.get("properties", {}), top.get("required", [])
    least, most = top.get("minProperties", 0), top.get("maxProperties", -1)
    own = top.get("additionalProperties", top.get("unevaluatedProperties", False))
    if not properties and own is not False:
        if top.get("propertyNames", True) not in (True, {}, {"type": "string"}):
            raise GrammarError(f"`propertyNames` {_FOR_ALL}: leave it out of the schema")
        one = _in_order({"type": "regex", "pattern": _OWN_TAG}, _value("\n", own, schema))
        return {"type": "repeat", "min": least, "max": most, "content": one}
    if least > len(required) or 0 <= most < len(properties):
        name = "minProperties" if least > len(required) else "maxProperties"
        raise GrammarError(f"`{name}` {_FOR_ALL}: say under `required` which there must be")
    elements = []
    for name, of_one in properties.items():
        if of_one is False and name not in required:
            continue
        try:
            written = _parameter(name, of_one, schema)
        except GrammarError as error:
            raise GrammarError(f"parameter {name[:60]!r}: {error}") from None
        elements.append(written if name in required else {"type": "optional", "content": written})
    return _in_order(*elements) if elements else _text("")


def _parameter(name: str, schema: Any, whole: dict[str, Any]) -> dict[str, Any]:
    if not 0 < len(name) <= LONGEST_KEY or not {">", "\n"}.isdisjoint(name):
        raise GrammarError(f"such a name cannot be written {_HERE}: give it another")
    return _value(f"<parameter={name}>\n", schema, whole)


def _value(before: str, schema: Any, whole: dict[str, Any]) -> dict[str, Any]:
    """All ways to write a value, between what stands before it and the end of its tag."""
    leaves, values = leaves_of(schema, whole), values_of(schema, whole)
    if any(isinstance(leaf, bool) or leaf.keys() <= ANNOTATIONS for leaf in leaves):
        return _tagged(before, _ANY_TEXT)
    if values.types == TYPES:
        raise GrammarError(f"values of any type cannot be held to something {_HERE}: say their `type`")
    opening = not values.types.isdisjoint({"array", "object"})
    texts, others = [], list[dict[str, Any]]()
    for leaf in leaves:
        constants = constants_of(leaf)
        if constants is None:
            types = values_of(leaf, whole).types
            texts += [_held_text(before, leaf, opening)] if "string" in types else []
            others += [{**leaf, "type": one} for one in sorted(types - {"string"})]
        else:
            listed = [one for one in constants if isinstance(one, str) and VALUE_END not in one]
            texts += [_text(f"{before}{one}{_BEHIND}") for one in listed if not (opening and one[:1] in ("[", "{"))]
            others += [{"const": one} for one in constants if not isinstance(one, str)]
    if values.texts is None:
        others = [one for one in others if values_of(one, whole).types <= {"array", "null", "object"}]
    ways = [*texts, *_as_json(before, others, whole)]
    if not ways:
        raise GrammarError(f"none of its values can be written {_HERE}")
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _held_text(before: str, schema: dict[str, Any], opening: bool) -> dict[str, Any]:
    """A text. opening: as a list or an object opens it must not."""
    least, most, form = schema.get("minLength", 0), schema.get("maxLength"), format_of(schema)
    if "pattern" in schema:
        if opening:
            raise GrammarError(f"`pattern` of what may be a list or an object cannot be enforced {_HERE}")
        try:
            expression = pattern_of_a_line(schema["pattern"])
        except ValueError as error:
            raise GrammarError(f"{error}: leave that out of `pattern`") from error
    elif form is not None:
        if form not in FORMATS:
            raise GrammarError(f"`format` {form} cannot be enforced {_HERE}: leave it out of the schema")
        expression = f"({FORMATS[form]})"
    elif least or most is not None:
        expression = _of_length(least, most, opening)
    elif opening:
        some = _in_order({"type": "regex", "pattern": _NOT_OPENING}, _ANY_TEXT)
        return _tagged(before, {"type": "optional", "content": some})
    else:
        return _tagged(before, _ANY_TEXT)
    # In one piece: where characters that are counted stand at an end of it, each count takes its time to compile.
    return {"type": "regex", "pattern": f"{re.escape(before)}{expression}{re.escape(_BEHIND)}"}


def _of_length(least: int, most: int | None, opening: bool) -> str:
    last = "" if most is None else most
    if not opening or most == 0:
        return f"{_CHARACTER}{{{least},{last}}}"
    some = f"{_NOT_OPENING}{_CHARACTER}{{{max(0, least - 1)},{last if most is None else most - 1}}}"
    return some if least else f"({some})?"


def _as_json(before: str, schemas: list[dict[str, Any]], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not schemas:
        return
    led_into: dict[str, Any] = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    text = json.dumps(schema, ensure_ascii=False)
    if '"$ref"' in text:
        schema = schema | led_into
        if found := _REFERENCE.search(json.dumps(schema, ensure_ascii=False)):
            raise GrammarError(f"`$ref` {found[1]} cannot be followed {_HERE}: put the schema under `$defs`")
    content = {"type": "json_schema", "json_schema": without_remarks(schema)}
    yield _tagged(before, content)


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _tagged(before: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": before, "content": content, "end": _BEHIND}


def _in_order(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
