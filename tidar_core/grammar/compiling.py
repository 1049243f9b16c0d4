"""Compiles a `Grammar`, with what xgrammar 0.2.8 takes otherwise than JSON or its schemas mean it put right before.

The guard does so in its process (`guarding.py`), and the engine once more where that is quicker than to send it.
"""

import json
import re
from math import inf
from typing import TYPE_CHECKING, Any

from tidar_core.grammar.patterns import pattern_in_json

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

MOST_WHITESPACE = 32  # characters between two parts of a JSON text: a model could go on with them for ever
# What of that may be there: all usual layouts. Where empty lines may stand, a small model that writes one goes on with
# them, and has no tokens left for what it was asked.
_GAP = rf'tidar_gap ::= "" | " " | "\r"? "\n" [ \t]{{0, {MOST_WHITESPACE - 2}}}'
_BOUNDED_CHARACTER = r"[^\"\\\r\n]"  # of a string of bounded length, as xgrammar 0.2.8 writes it
_NO_CONTROL_CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff]"
_TEXT_CLASS_OR_GAP = re.compile(
    rf'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\b(?P<gap>whitespace(?:_\d+)*\{{0, {MOST_WHITESPACE}\}})'
)
# `{1\,2}` stays as it is: without its backslash it would count.
_ESCAPE = re.compile(
    r"\{\d*\\,|\\(?:(?P<needless>[\t\n\v\f\r !#%&,:;<=>@_`~])|x(?P<short>[0-9A-Fa-f]{2})|.)", re.DOTALL
)
_SHORT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\x([0-9a-f]{2})")
# What is enforced, with the lengths that it may have at least and at most.
STRING_FORMATS = {
    "date": (10, 10), "date-time": (20, inf), "duration": (3, inf), "email": (3, inf), "hostname": (1, inf),
    "ipv4": (7, 15), "ipv6": (2, inf), "json-pointer": (0, inf), "relative-json-pointer": (1, inf), "time": (9, inf),
    "uri": (2, inf), "uri-reference": (0, inf), "uri-template": (0, inf), "uuid": (36, 36),
}  # fmt: skip
# Which xgrammar 0.2.8 gives control characters and quotes.
_POINTERS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
_SAYS_TYPE = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NAMES_TYPE = {"additionalProperties", "items", "prefixItems", "properties"}  # by themselves
_KINDS_OF = {
    **dict.fromkeys(("maxLength", "minLength", "pattern"), "string"),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), "number"),
    **dict.fromkeys(("items", "maxItems", "minItems", "prefixItems"), "array"),
    **dict.fromkeys(
        ("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "propertyNames"),
        "object",
    ),
}
NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_NO_SCHEMAS = ("const", "default", "enum", "example", "examples")
_OTHER_NAMES = re.compile(r"^\S+_addl_key(?:_\d+)* ::= .*$", re.MULTILINE)
_ESCAPED_IN_NAME = re.compile(
    r' \| \("\\(?:"|[^"]+)" \S+_addl_key(?:_\d+)*\)| \| \("\\\\" basic_escape basic_string_sub\)'
)
_BYTE_IN_NAME = re.compile(r"\\u00[89a-f][0-9a-f]")


def compile_grammar(compiler: "GrammarCompiler", kind: str, text: str) -> "CompiledGrammar":
    """Compiles a `Grammar`'s kind and text. Raises whatever the compiler raises."""
    from xgrammar.grammar import Grammar

    if kind == "regex":
        return compiler.compile_regex(_escaped_as_needed(text))
    if kind == "ebnf":
        return compiler.compile_grammar(text)
    if kind == "structural_tag":
        written = Grammar.from_structural_tag(as_alone(json.loads(text)))
    else:
        schema = '{"type": "object"}' if kind == "json_object" else _schema_in_json(text)
        written = Grammar.from_json_schema(
            schema, max_whitespace_cnt=MOST_WHITESPACE, strict_mode=kind == "json_schema"
        )
    return compiler.compile_grammar(Grammar.from_ebnf(_mended(str(written))))


def as_alone(form: Any) -> Any:
    """A structural tag whose parts are read as those that stand alone: as much whitespace, the same escapes."""
    if isinstance(form, list):
        return [as_alone(item) for item in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        return {**form, "json_schema": in_json(form.get("json_schema")), "max_whitespace_cnt": MOST_WHITESPACE}
    if form.get("type") == "regex" and isinstance(form.get("pattern"), str):
        return {**form, "pattern": _escaped_as_needed(form["pattern"])}
    return {name: as_alone(value) for name, value in form.items()}


def _escaped_as_needed(expression: str) -> str:
    r"""A regular expression without the backslashes that xgrammar 0.2.8 warns of and that mean nothing, as in `\ `:
    Python's `re.escape` writes them. And where it would read `\x2cb` as one character, U+02CB."""
    return _ESCAPE.sub(
        lambda found: rf"\u00{found['short']}" if found["short"] else found["needless"] or found[0], expression
    )


def _schema_in_json(text: str) -> str:
    return json.dumps(in_json(json.loads(text)), ensure_ascii=False)


def in_json(schema: Any) -> Any:
    """A schema whose patterns match strings as they are written in a JSON text, since xgrammar 0.2.8 puts them there
    as they are, and that names the type of what it speaks of, without which most keywords are dropped."""
    if isinstance(schema, list):
        return [in_json(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mended = {name: _keyword_in_json(name, value) for name, value in schema.items()}
    kinds = {name: kind for name in schema if (kind := _kind_of(name, schema[name]))}
    if kinds.keys() - _NAMES_TYPE and not any(name in schema for name in _SAYS_TYPE):
        whole = kinds.get("multipleOf") == "integer"  # of such numbers alone
        mended["type"] = sorted({*kinds.values()} - ({"number"} if whole else set()))
    form = format_of(schema)
    for name in ("format",) if form is None else ("minLength", "maxLength"):
        mended.pop(name, None)  # of a format and what is beside it xgrammar would take the format
    if form in _POINTERS:
        del mended["format"]
        mended["pattern"] = pattern_in_json(_POINTERS[form])
    return mended


def format_of(schema: dict[str, Any]) -> str | None:
    """The `format` that a string is held to. Beside a pattern it is a remark (2020-12), and so it is beside a length
    that says more than the format does."""
    form = schema.get("format")
    if not isinstance(form, str) or form not in STRING_FORMATS or "pattern" in schema:
        return None
    shortest, longest = STRING_FORMATS[form]
    return form if schema.get("minLength", 0) <= shortest and longest <= schema.get("maxLength", inf) else None


def _kind_of(name: str, value: Any) -> str | None:
    """The type of the values that a keyword says something about."""
    if name == "format":
        return "string" if isinstance(value, str) and value in STRING_FORMATS else None
    if name == "multipleOf":  # which is enforced for these alone
        return "integer" if isinstance(value, int) else "number"
    return _KINDS_OF.get(name)


def _keyword_in_json(name: str, value: Any) -> Any:
    if name in _NO_SCHEMAS:
        return value
    if name == "pattern" and isinstance(value, str):
        return pattern_in_json(value)
    if name in NAMED_SCHEMAS and isinstance(value, dict):
        patterns = name == "patternProperties"
        return {pattern_in_json(key) if patterns else key: in_json(one) for key, one in value.items()}
    return in_json(value)


def _mended(written: str) -> str:
    """A schema's grammar as xgrammar 0.2.8 writes it, put right in four places: strings of bounded length take no
    control characters, of which JSON has none, and no surrogates, each of which would be decoded as three wrong
    characters; its \\xdf followed by an e would be read as \\xdfe; an additional property is none of the others'; and
    between two parts there is no empty line."""
    written = _SHORT_ESCAPE.sub(r"\1\\u00\2", written)
    written = _OTHER_NAMES.sub(_other_names, written)
    return _TEXT_CLASS_OR_GAP.sub(_mended_part, written) + _GAP


def _other_names(found: re.Match[str]) -> str:
    """The names of additional properties, but those that go on as the name of a property does that is not of plain
    ASCII: xgrammar 0.2.8 takes its bytes for characters, and escapes for none of its own."""
    plain = _ESCAPED_IN_NAME.sub("", found[0])
    return _BYTE_IN_NAME.sub(r"\\u0080-\\U0010ffff", plain)


def _mended_part(found: re.Match[str]) -> str:
    if found["gap"]:
        return "tidar_gap"
    return _NO_CONTROL_CHARACTER if found[0] == _BOUNDED_CHARACTER else found[0]
