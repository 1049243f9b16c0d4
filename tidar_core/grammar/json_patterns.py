"""Regular expressions of strings, as expressions of their JSON texts, where a quote has a backslash before it.

xgrammar 0.2.8 puts a schema's patterns into the grammar as they are: they would have to match the JSON text themselves.
"""

import re

# What stands in a JSON string by an escape alone, and surrogates, which are no characters.
_ESCAPED_IN_JSON = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
_NOT_ESCAPED = r"\u0000-\u001f\ud800-\udfff\u0022\u005c"
_JSON_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: r"\\"}
_LETTER_ESCAPES = {"0": 0x00, "t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_SPACES = r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # of ECMAScript, but control characters
_COMPLEMENTS = {
    ".": rf"[^{_NOT_ESCAPED}\u2028\u2029]",
    r"\S": rf"[^{_NOT_ESCAPED}{_SPACES}]",
    r"\W": rf"[^{_NOT_ESCAPED}a-zA-Z0-9_]",
    r"\D": rf"[^{_NOT_ESCAPED}0-9]",
}
_KINDS = frozenset((r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"))
_SYNTAX = "^$\\.*+?()[]{}|/-"
_BLANK = r"(?: |\\[tnfr])"
_CHARACTER = r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|."
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_PATTERN_PARTS = re.compile(rf"\[(?P<except>\^?)(?P<inside>(?:\\.|[^\]\\])+)\]|{_CHARACTER}", re.DOTALL)
# What zod writes for an email and a duration, and the same without looking ahead, which the compiler cannot.
_WITHOUT_LOOKING_AHEAD = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|"
        r"\d+([.,]\d+)?S))?|T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S))$"
    ),
}


def pattern_in_json(pattern: str) -> str:
    r"""A regular expression of a string's JSON text: `"` is \\" there. Where a class has other characters than those
    that need an escape, xgrammar may leave the escapes out."""
    pattern = _WITHOUT_LOOKING_AHEAD.get(pattern, pattern)
    if _has_open_class(pattern):
        return pattern  # the compiler says so
    return "".join(_part_in_json(part) for part in _PATTERN_PARTS.finditer(pattern))


def _has_open_class(pattern: str) -> bool:
    is_open, characters = False, iter(pattern)
    for character in characters:
        if character == "\\":
            next(characters, None)
        else:
            is_open = character != "]" if is_open else character == "["
    return is_open


def _part_in_json(part: re.Match[str]) -> str:
    if part["inside"] is None:
        return _character_in_json(part[0])
    members = _members(_CHARACTERS.findall(part["inside"]))
    if members is None:  # no class: the compiler says so
        return part[0]
    if part["except"]:
        return f"[^{_NOT_ESCAPED}{''.join(_written(one) for one in members)}]"
    return _class_in_json(members)


def _character_in_json(written: str) -> str:
    """One character of a regular expression that is not within a class."""
    if written in _COMPLEMENTS:
        return _COMPLEMENTS[written]
    if written == r"\s":
        return _BLANK
    code = _code(written)
    if code is None:
        return written
    if any(first <= code <= last for first, last in _ESCAPED_IN_JSON):
        return _escape_in_json(code)
    return written if len(written) == 1 or written[1] in _SYNTAX else _written((code, code))


def _members(inside: list[str]) -> list[str | tuple[int, int]] | None:
    r"""What a class has: `\d` and its like as they are, all else as ranges; None where it cannot be read."""
    members: list[str | tuple[int, int]] = []
    waiting = inside[::-1]
    while waiting:
        one = waiting.pop()
        if one in _KINDS:
            members.append(one)
            continue
        first = last = 0x08 if one == r"\b" else _code(one)
        if len(waiting) > 1 and waiting[-1] == "-" and waiting[-2] not in _KINDS:
            waiting.pop()
            last = _code(waiting.pop())
        if first is None or last is None or last < first:
            return None
        members.append((first, last))
    return members


def _class_in_json(members: list[str | tuple[int, int]]) -> str:
    """The alternatives that a class is: its characters that stand for themselves in JSON, and each of the others."""
    if any({kind, kind.upper()} <= {*members} for kind in (r"\d", r"\s", r"\w")):
        return f"[^{_NOT_ESCAPED}]"
    plain, others = "", []
    for member in members:
        if isinstance(member, str) and member in (r"\d", r"\w"):
            plain += member
        elif isinstance(member, str):
            others.append(_BLANK if member == r"\s" else _COMPLEMENTS[member])
        else:
            first, last = member
            for begin, end in _ESCAPED_IN_JSON:
                if end < 0x80:  # surrogates stand for nothing
                    others += [_escape_in_json(code) for code in range(max(first, begin), min(last, end) + 1)]
                if first <= last and first < begin:
                    plain += _written((first, min(last, begin - 1)))
                first = max(first, end + 1)
            if first <= last:
                plain += _written((first, last))
    alternatives = [f"[{plain}]"] * bool(plain) + others
    if not alternatives:
        raise ValueError("a pattern has a class of surrogates alone, which are no characters")
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _code(written: str) -> int | None:
    """The character that a part of a regular expression stands for; None where it stands for none."""
    if len(written) == 1:
        return None if written == "\\" else ord(written)  # an escape that ends with the expression
    letter, digits = written[1], written[2:].strip("{}")
    if digits:
        return ord(digits.upper()) - 64 if letter == "c" else int(digits, 16)
    if letter in _LETTER_ESCAPES:
        return _LETTER_ESCAPES[letter]
    return None if letter.isalnum() else ord(letter)


def _written(member: str | tuple[int, int]) -> str:
    """As it is written in a class."""
    if isinstance(member, str):
        return _SPACES if member == r"\s" else member
    one, *more = (rf"\u{code:04x}" if code < 0x10000 else rf"\u{{{code:x}}}" for code in sorted({*member}))
    return "-".join([one, *more])


def _escape_in_json(code: int) -> str:
    letter = _JSON_LETTERS.get(code)
    return rf"(?:\\{letter})" if letter else rf"(?:\\u{code:04x})"
