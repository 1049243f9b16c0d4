"""Texts that a compiled grammar takes: JSON, and what its schema asks for."""

import json
import re
import time
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from tidar_core.grammar.compiling import STRING_FORMATS, compile_grammar
from tidar_core.grammar.grammar import schema_grammar, tag_grammar
from tidar_core.grammar.patterns import pattern_in_json

COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([bytes([value]) for value in range(256)]), max_threads=1, cache_enabled=False
)
CODES = (*range(0x25), *range(0x2A, 0x31), *range(0x3F, 0x43), *range(0x5A, 0x64), 0x6E, 0x74, 0x7E, 0x7F, 0xE9)


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    grammar = schema_grammar(schema)
    return compile_grammar(COMPILER, grammar.kind, grammar.text)


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text.encode("utf-8", "surrogatepass")) and matcher.is_completed())


def of_pattern(pattern: str) -> xgrammar.CompiledGrammar:
    return compiled({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ('^"a"$', '"a"'),
        (r"^\u0022$", '"'),
        (r"^\x22\u{22}$", '""'),
        (r'^"\\$', '"\\'),
        (r"^a\\b$", "a\\b"),
        ("^a\nb$", "a\nb"),
        (r"^a\nb\t\x01\cJ$", "a\nb\t\x01\n"),
        (r"^C:\\\d+\\[a-z]$", "C:\\12\\x"),
        (r'^["]{2,3}[\\]$', '""\\'),
        (r'^["\\]+$', '"\\"'),
        (r"^[\n]$", "\n"),
        ("^[\n]$", "\n"),
        (r"^[\x00-\x1f]$", "\x0b"),
        (r'^[a-z]+="[^"]*"$', 'key="a b"'),
        (r'^[^a]\S."\s\W\D$', 'xyz"\n!x'),
        (r'^(a|b\\)[\s\S]"$', 'b\\x"'),
        (r'^[a-]"[^-x]"[^\s-]"$', '-"y"z"'),
        (r"^\x2cb\ \#[\@b]$", ",b #@"),
        (r"^[^\x00-\x7f][😀-😏]$", "é😊"),
        ("^a]$", "a]"),
    ],
)
def test_characters_of_a_pattern_are_escaped_as_json_has_them(pattern: str, value: str) -> None:
    assert re.search(pattern.replace(r"\u{22}", '"').replace(r"\cJ", "\n"), value), "which the test takes for granted"
    grammar = of_pattern(pattern)
    assert takes(grammar, json.dumps(value, ensure_ascii=False))
    if '"' in value or "\n" in value:
        assert not takes(grammar, f'"{value}"')


ATOMS = st.sampled_from(
    [
        '"', r"\"", r"\\", r"\n", "\n", r"\x22", r"\u005c", r"\x1f", "a", "n", "/", r"\/", "é", ".", r"\s", r"\d",
        r"\W", r"\D", '["x]', '[^"]', r"[\\n]", r"[^\\]", r"[\x00-\x24]", r"[\s\S]", r"[^\s]", r"[ -~]",
        r"[\n\t]", r"[^\n]", r"[a-]", r"[\]^-]", r"[^-]", r"[\w\\]", r"[\D]", r"[!-\]]", '(a|")', r"(?:\\|b)", r"\S",
        r"[^\Sa]",
    ]
)  # fmt: skip
REPEATS = st.sampled_from(["", "", "", "?", "+", "{2}"])
PATTERNS = st.lists(st.tuples(ATOMS, REPEATS).map("".join), min_size=1, max_size=3).map("".join)


def some_texts(grammar: xgrammar.CompiledGrammar, choose: Any) -> str | None:
    """A text that the grammar takes, character by character as `choose` has it; None where it is not at its end."""
    pieces = [chr(code) for code in CODES] + ["🙂", "\ud800", "\u2003"]
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    text = ""
    for _ in range(40):
        if matcher.is_terminated():
            return text
        possible = []
        for piece in pieces:
            if matcher.fork().accept_string(piece.encode("utf-8", "surrogatepass")):
                possible.append(piece)
        if not possible:
            return None
        piece = choose(possible)
        matcher.accept_string(piece.encode("utf-8", "surrogatepass"))
        text += piece
    return None


@given(pattern=PATTERNS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_a_pattern_takes_is_json_that_matches_it(pattern: str, data: st.DataObject) -> None:
    grammar = of_pattern(f"^{pattern}$")
    text = some_texts(grammar, lambda possible: data.draw(st.sampled_from(possible)))
    if text is not None:
        value = json.loads(text)
        value.encode("utf-8")
        # JSON Schema's expressions are ECMAScript's: letters and digits are ASCII's there, spaces are Unicode's.
        assert any(re.fullmatch(pattern, value, flag) for flag in (re.ASCII, re.UNICODE)), (text, value)


def test_a_class_that_no_character_is_in_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="cannot be written there"):
        of_pattern(r"^[\ud800-\udbff]$")
    assert takes(of_pattern(r"^\ud83d\ude42$"), r'"\ud83d\ude42"')


@pytest.mark.parametrize("form", STRING_FORMATS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_whatever_a_format_takes_is_json(form: str, data: st.DataObject) -> None:
    grammar = compiled({"type": "string", "format": form})
    text = some_texts(grammar, lambda possible: data.draw(st.sampled_from(possible)))
    assert text is None or isinstance(json.loads(text), str)


def test_pointers_are_taken() -> None:
    grammar = compiled({"type": "array", "items": {"format": "json-pointer"}})
    assert takes(grammar, '["", "/a b/~0~1", "/größe//"]')
    assert not any(takes(grammar, f'["{text}"]') for text in ("a", "/~2", "/\t", '/"', "/\\"))
    relative = compiled({"type": "string", "format": "relative-json-pointer"})
    assert takes(relative, '"12/a"')
    assert takes(relative, '"0#"')
    assert not takes(relative, '"01"')


@pytest.mark.parametrize("key", ['"', "\\", "a\nb"])
def test_keys_of_pattern_properties_are_escaped(key: str) -> None:
    escaped = re.escape(key)
    grammar = compiled({"type": "object", "patternProperties": {f"^{escaped}$": {"type": "integer"}}})
    assert takes(grammar, json.dumps({key: 3}))
    assert not takes(grammar, f'{{"{key}": 3}}')


def test_a_pattern_counts_and_not_a_format_beside_it() -> None:
    dates = compiled({"type": "string", "format": "date", "pattern": "^2026-.*$"})
    assert takes(dates, '"2026-11-30"')
    assert not takes(dates, '"1999-11-30"')


@pytest.mark.parametrize("lengths", [{"maxLength": 9}, {"minLength": 12, "maxLength": 14}])
def test_a_length_counts_and_not_a_format_beside_it(lengths: dict[str, int]) -> None:
    grammar = compiled({"type": "string", "format": "uri", **lengths})
    taken = [length for length in range(20) if takes(grammar, json.dumps("a:" + "b" * length))]
    assert taken == list(range(lengths.get("minLength", 2) - 2, lengths["maxLength"] - 1))


@pytest.mark.parametrize(
    ("form", "lengths", "value"),
    [
        ("uri", {"minLength": 1}, "a:b"),
        ("date", {"minLength": 10, "maxLength": 10}, "2026-11-30"),
        ("json-pointer", {"minLength": 0}, "/a~0"),
        ("our-own", {"maxLength": 5}, None),
    ],
)
def test_a_length_that_says_nothing_new_leaves_the_format(
    form: str, lengths: dict[str, int], value: str | None
) -> None:
    grammar = compiled({"type": "string", "format": form, **lengths})
    assert value is None or takes(grammar, json.dumps(value))
    assert takes(grammar, '"~2"') == (value is None)


ZOD = {
    "email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        "a.b+'@c-d.ef",
    ),
    "duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        "PYMWDTHS12.,",
    ),
}


@pytest.mark.parametrize("form", ZOD)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_what_zod_looks_ahead_for_is_kept(form: str, data: st.DataObject) -> None:
    pattern, letters = ZOD[form]
    text = data.draw(st.one_of(st.text(letters, max_size=9), st.from_regex(pattern, fullmatch=True, alphabet=letters)))
    grammar = compiled({"type": "string", "format": form, "pattern": pattern})
    assert takes(grammar, json.dumps(text)) == bool(re.fullmatch(pattern, text, re.ASCII))


def test_a_class_without_an_end_is_no_work() -> None:
    began = time.process_time()
    assert pattern_in_json("[" * 60_000) == "[" * 60_000
    assert time.process_time() - began < 1.0


def test_what_is_no_pattern_is_left_as_it_is() -> None:
    value = {"pattern": 'a"', "patternProperties": {'"': 1}}
    assert takes(compiled({"const": value}), json.dumps(value, separators=(",", ":")))
    schema = {"type": "object", "properties": {"pattern": {"const": '"'}, "enum": {"type": "string", "pattern": '^"$'}}}
    assert takes(compiled(schema), json.dumps({"pattern": '"', "enum": '"'}))


@pytest.mark.parametrize(
    ("schema", "before", "behind"),
    [
        ({"type": "string", "maxLength": 1}, '"', '"'),
        ({"type": "string", "minLength": 1, "maxLength": 1}, '"', '"'),
        ({"type": "array", "items": {"type": ["string", "null"], "maxLength": 1}}, '["', '"]'),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"', '":1}'),
    ],
)
def test_one_character_alone_is_no_control_character_and_no_surrogate(schema: Any, before: str, behind: str) -> None:
    grammar = compiled(schema)
    assert all(takes(grammar, before + character + behind) for character in "aé🙂\x7f")
    assert not any(takes(grammar, before + character + behind) for character in '\x00\t\n\x1f"\\\ud800\udfff')


@pytest.mark.parametrize("schemas", [1, 3])
def test_no_schema_of_several_has_empty_lines(schemas: int) -> None:
    """Each of them has rules of its own for what stands between two parts."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"type": "tag", "begin": f"<{number}>", "content": content, "end": "."} for number in range(schemas)]
    grammar = tag_grammar({"type": "or", "elements": [content, *tags]})
    taken = compile_grammar(COMPILER, grammar.kind, grammar.text)
    for number in range(schemas):
        for gap, fine in ((" ", True), ("\n", True), ("\r\n  ", True), ("\n\n", False), ("\r", False), ("  ", False)):
            for places in (0, 1, 2, 3, 4, 5, 6):
                parts = ["{", '"a"', ":", "[", "1", ",1", "]", "}"]
                text = f"<{number}>{''.join(parts[: places + 1])}{gap}{''.join(parts[places + 1 :])}."
                assert takes(taken, text) is fine, text


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"minimum": 3, "maximum": 4}, ["3", "3.5"], ["5", '"a"', "null"]),
        ({"multipleOf": 5}, ["0", "15"], ["3", '"a"']),
        ({"pattern": "^a$"}, ['"a"'], ['"b"', "1"]),
        ({"format": "date"}, ['"2024-02-03"'], ['"a"', "1"]),
        ({"maxLength": 1}, ['"a"'], ['"ab"', "1"]),
        ({"type": "array", "items": {"minimum": 3}}, ["[3]"], ["[2]", '["a"]']),
        ({"anyOf": [{"minimum": 3}, {"type": "null"}]}, ["3", "null"], ["2", '"a"']),
        ({"minItems": 2, "items": {"type": "integer"}}, ["[1,2]"], ["[1]", "1"]),
        ({"propertyNames": {"pattern": "^a$"}}, ['{"a":1}'], ['{"b":1}', "1"]),
        ({"minimum": 3, "pattern": "^a$"}, ["3", '"a"'], ["2", '"b"', "null"]),
        ({"format": "int32"}, ["3", '"a"'], []),
    ],
)
def test_what_names_no_type_is_held_to_the_types_it_speaks_of(
    schema: Any, taken: list[str], not_taken: list[str]
) -> None:
    grammar = compiled(schema)
    assert all(takes(grammar, text) for text in taken)
    assert not any(takes(grammar, text) for text in not_taken)


NAMES = ["ab", "abc", 'q"', "r\n", "s\\", "t\x01", "ä", "日", "🙂🙂", "", "]", "-", "u'"]


def test_an_additional_property_is_none_of_the_others() -> None:
    schema = {"properties": {name: {"type": "string"} for name in NAMES}, "additionalProperties": {"type": "integer"}}
    grammar = compiled(schema)
    for name in NAMES:
        escaped, plain = json.dumps(name), json.dumps(name, ensure_ascii=False)
        assert takes(grammar, f'{{{plain}: "a"}}')
        by_number = f'"{"".join(chr(92) + f"u{ord(one) % 65536:04x}" for one in name)}"'
        for key in (escaped, plain, by_number, f'"{name}"', f'"{name}x"', f'"x{name}"'):
            if takes(grammar, f"{{{key}: 3}}"):
                assert json.loads(key) not in NAMES
    assert all(takes(grammar, f"{{{key}: 3}}") for key in ('"abcd"', '"x"', '"a"', '"x\\n"', '"]x"'))
