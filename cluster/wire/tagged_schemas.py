"""What a call has to follow whose arguments stand in tags, so that they are what the function's schema asks for.

Parameters come in the schema's order, as the model's template writes them. A text is written as it is, anything else as
JSON, and `TaggedArguments` makes the same values of it. Texts cannot be told from numbers: a parameter that may be
either is written as a text, unless the texts are listed.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.wire.schema_types import TYPES, constants_of, leaves_of, parameters_of, plain_name, values_of
from cluster.wire.tagged_arguments import LONGEST_KEY, SPACE, VALUE_END
from tidar_core.grammar.compiling import format_of
from tidar_core.grammar.grammar import MAX_GRAMMAR_BYTES, MOST_TIMES_LARGER
from tidar_core.grammar.patterns import pattern_of_a_line
from tidar_core.grammar.schemas import ANNOTATIONS, GrammarError, without_remarks

_HERE = "in this model's tags"
_UNENFORCED = f"for all parameters cannot be enforced {_HERE}"
_NOTHING = f"none of its values can be written {_HERE}: allow others"
_MOST_BYTES = MOST_TIMES_LARGER * MAX_GRAMMAR_BYTES
_OWN_TAG = r"<parameter=[^\x00-\x1f<>\ud800-\udfff]{1,64}>"  # of a parameter that the model makes up
_BEHIND = f"{VALUE_END}\n"
_ANY_TEXT = {"type": "any_text", "excludes": [VALUE_END]}
# Of a text whose length is held to something. It has one line, since the end of a value begins with another.
_CHARACTER = r"[^\x00-\x08\x0a-\x1f\ud800-\udfff]"
_NOT_OPENING = r"[^\x00-\x20\[{\ud800-\udfff]"
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]{0,60})')
_DEFINITION = re.compile(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)')

# Formats, as xgrammar has them in JSON or narrower.
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
    top, *others = _leaves(schema, schema)
    if others or constants_of(top) is not None:
        what = "alternatives" if others else "`const` and `enum`"
        raise GrammarError(f"{what} {_UNENFORCED}: describe one object by its `properties`")
    if top.get("patternProperties"):
        raise GrammarError(f"`patternProperties` {_UNENFORCED}: name them under `properties`")
    found, required = parameters_of(schema), frozenset(top.get("required", ()))
    least, most = top.get("minProperties", 0), top.get("maxProperties", -1)
    if not found.named and found.other not in (None, False):
        if top.get("propertyNames", True) not in (True, {}, {"type": "string"}):
            raise GrammarError(f"`propertyNames` {_UNENFORCED}: leave it out of the schema")
        one = _in_order({"type": "regex", "pattern": _OWN_TAG}, _value("\n", found.other, schema))
        return {"type": "repeat", "min": least, "max": most, "content": one}
    if least > len(required) or 0 <= most < len(found.named):
        name = "minProperties" if least > len(required) else "maxProperties"
        raise GrammarError(f"`{name}` {_UNENFORCED}: say under `required` which there must be")
    elements, room = list[dict[str, Any]](), _MOST_BYTES
    for name, of_one in found.named.items():
        if name not in required and not leaves_of(of_one, schema):
            continue  # none of its values is allowed
        try:
            written = _parameter(name, of_one, schema)
        except GrammarError as error:
            raise GrammarError(f"parameter {name[:60]!r}: {error}") from None
        room -= len(json.dumps(written))
        if room < 0:  # before all of them are there: each may repeat what a reference leads to
            raise GrammarError(f"the parameters are too many or too large {_HERE}: leave some out, or values of `enum`")
        elements.append(written if name in required else {"type": "optional", "content": written})
    return _in_order(*elements) if elements else _text("")


def _leaves(schema: Any, whole: dict[str, Any]) -> list[Any]:
    """As `leaves_of`. Raises GrammarError where one is not there, or none is."""
    leaves = leaves_of(schema, whole)
    if any(not isinstance(leaf, bool | dict) for leaf in leaves):
        raise GrammarError("a `$ref` leads to nothing: put the schema under `$defs` and lead there")
    if not leaves:
        raise GrammarError(_NOTHING)
    return leaves


def _parameter(name: str, schema: Any, whole: dict[str, Any]) -> dict[str, Any]:
    if not 0 < len(name) <= LONGEST_KEY or not {">", "\n", "\0"}.isdisjoint(name):
        raise GrammarError(f"such a name cannot be written {_HERE}: give it another")
    return _value(f"<parameter={name}>\n", schema, whole)


def _value(before: str, schema: Any, whole: dict[str, Any]) -> dict[str, Any]:
    """All ways to write a value, between what stands before it and the end of its tag."""
    leaves, values = _leaves(schema, whole), values_of(schema, whole)
    if any(_is_free(leaf) for leaf in leaves):
        return _tagged(before, _ANY_TEXT)
    if values.types == TYPES:
        raise GrammarError(f"values of all types cannot be held to something {_HERE}: name fewer under `type`")
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
            kept = [one for one in listed if not (opening and one.lstrip(SPACE).startswith(("[", "{")))]
            texts += [_tagged(before, {"type": "or", "elements": [_text(one) for one in kept]})] if kept else []
            others += [{"const": one} for one in constants if not isinstance(one, str)]
    if values.texts is None:
        others = [one for one in others if values_of(one, whole).types <= {"array", "null", "object"}]
    ways = [*texts, *_as_json(before, others, whole)]
    if not ways:
        raise GrammarError(_NOTHING)
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _is_free(leaf: Any) -> bool:
    """Whether a schema allows any value at all."""
    if isinstance(leaf, bool):
        return leaf
    return leaf.keys() <= ANNOTATIONS | {"type"} and values_of(leaf, leaf).types == TYPES


def _held_text(before: str, schema: dict[str, Any], opening: bool) -> dict[str, Any]:
    """A text. opening: as a list or an object opens it must not."""
    least, most, form = schema.get("minLength", 0), schema.get("maxLength"), format_of(schema)
    if "pattern" in schema:
        if opening:
            raise GrammarError(f"`pattern` of what may be a list or an object cannot be enforced {_HERE}")
        try:
            expression = pattern_of_a_line(schema["pattern"])
        except ValueError as error:
            raise GrammarError(f"`pattern` {error}") from error
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
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    schema = without_remarks(schema) | _led_into(schema, whole)
    if found := _REFERENCE.search(json.dumps(schema, ensure_ascii=False)):
        raise GrammarError(f"`$ref` {found[1]} cannot be followed {_HERE}: put the schema under `$defs`")
    yield _tagged(before, {"type": "json_schema", "json_schema": schema})


def _led_into(schema: Any, whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The definitions that a schema's references lead into, and what these lead into."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        for group, name in _DEFINITION.findall(json.dumps(waiting.pop(), ensure_ascii=False)):
            defined = whole.get(group, {}).get(plain_name(name))
            if defined is not None and plain_name(name) not in found.setdefault(group, {}):
                found[group][plain_name(name)] = without_remarks(defined)
                waiting.append(defined)
    return found


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _tagged(before: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": before, "content": content, "end": _BEHIND}


def _in_order(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
