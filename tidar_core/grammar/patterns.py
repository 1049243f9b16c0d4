"""Regular expressions of strings, as expressions of how these strings are written.

xgrammar 0.2.8 puts a schema's patterns into the grammar as they are: they would have to match the written text itself.
In JSON a quote has a backslash before it. Elsewhere characters stand for themselves, but a line ends with the string.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_LETTER_ESCAPES = {"0": 0x00, "t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_SPACES = r" \u0009-\u000d\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # of ECMAScript
_EXCEPT = {".": r"\u000a\u000d\u2028\u2029", r"\S": _SPACES, r"\W": "a-zA-Z0-9_", r"\D": "0-9"}
_KINDS = frozenset((r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"))
_SYNTAX = "^$\\.*+?()[]{}|/-"
_CHARACTER = r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|."
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_PATTERN_PARTS = re.compile(rf"\[(?P<except>\^?)(?P<inside>(?:\\.|[^\]\\])+)\]|{_CHARACTER}", re.DOTALL)
_JSON_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: r"\\"}
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


@dataclass(frozen=True, slots=True)
class _Writing:
    """How a string is written. others: the characters that do not stand for themselves there, as ranges and as the
    inside of a class; surrogates, which are no characters, come last. spelled: an expression of how one of them is
    written, None where none can be. space: an expression of `\\s`."""

    others: tuple[tuple[int, int], ...]
    others_inside: str
    spelled: Callable[[int], str] | None
    space: str

    def all_but(self, inside: str) -> str:
        """An expression of the characters that are not in a class, and stand for themselves."""
        return f"[^{self.others_inside}{inside}]"


def _escape_in_json(code: int) -> str:
    letter = _JSON_LETTERS.get(code)
    return rf"(?:\\{letter})" if letter else rf"(?:\\u{code:04x})"


_SURROGATES = (0xD800, 0xDFFF)
_IN_JSON = _Writing(
    ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES),
    r"\u0000-\u001f\ud800-\udfff\u0022\u005c",
    _escape_in_json,
    r"(?: |\\[tnfr])",
)
_ON_A_LINE = _Writing(((0x0A, 0x0A), _SURROGATES), r"\u000a\ud800-\udfff", None, r"[ \t\f\r]")


def pattern_in_json(pattern: str) -> str:
    r"""A regular expression of a string's JSON text: `"` is \\" there. Where a class has other characters than those
    that need an escape, xgrammar may leave the escapes out."""
    return _pattern_in(_IN_JSON, _WITHOUT_LOOKING_AHEAD.get(pattern, pattern))


def pattern_of_a_line(pattern: str) -> str:
    """A regular expression of a string of one line, to be put between others. Raises ValueError where the pattern asks
    for the end of a line, or is no expression."""
    if not _is_closed(pattern):
        raise ValueError("is no regular expression")
    whole = _WITHOUT_LOOKING_AHEAD.get(pattern, pattern).removeprefix("^")
    if whole.endswith("$") and (len(whole) - len(whole[:-1].rstrip("\\"))) % 2:
        whole = whole[:-1]
    written = _pattern_in(_ON_A_LINE, whole)
    return f"(?:{written})" if "|" in written else written


def _is_closed(pattern: str) -> bool:
    """Whether what stands behind a pattern would be none of it, nor what stands before."""
    depth = 0
    for part in _PATTERN_PARTS.finditer(pattern):
        depth += (part[0] == "(") - (part[0] == ")")
        if depth < 0 or part[0] == "\\":
            return False
    return depth == 0


def _pattern_in(writing: _Writing, pattern: str) -> str:
    if _has_open_class(pattern):
        return pattern  # the compiler says so
    return "".join(_part_in(writing, part) for part in _PATTERN_PARTS.finditer(pattern))


def _has_open_class(pattern: str) -> bool:
    is_open, characters = False, iter(pattern)
    for character in characters:
        if character == "\\":
            next(characters, None)
        else:
            is_open = character != "]" if is_open else character == "["
    return is_open


def _part_in(writing: _Writing, part: re.Match[str]) -> str:
    if part["inside"] is None:
        return _character_in(writing, part[0])
    members = _members(_CHARACTERS.findall(part["inside"]))
    if members is None:  # no class: the compiler says so
        return part[0]
    if part["except"]:
        return writing.all_but("".join(_written(one) for one in members))
    return _class_in(writing, members)


def _character_in(writing: _Writing, written: str) -> str:
    """One character of a regular expression that is not within a class."""
    if written in _EXCEPT:
        return writing.all_but(_EXCEPT[written])
    if written == r"\s":
        return writing.space
    code = _code(written)
    if code is None:
        return written
    if any(first <= code <= last for first, last in writing.others):
        if writing.spelled is None:
            raise ValueError(f"asks for {chr(code)!r}, which cannot be written there: leave it out")
        return writing.spelled(code)
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


def _class_in(writing: _Writing, members: list[str | tuple[int, int]]) -> str:
    """The alternatives that a class is: its characters that stand for themselves, and each of the others."""
    if any({kind, kind.upper()} <= {*members} for kind in (r"\d", r"\s", r"\w")):
        return writing.all_but("")
    plain, others = "", []
    for member in members:
        if isinstance(member, str) and member in (r"\d", r"\w"):
            plain += member
        elif isinstance(member, str):
            others.append(writing.space if member == r"\s" else writing.all_but(_EXCEPT[member]))
        else:
            first, last = member
            for begin, end in writing.others:
                if writing.spelled is not None and begin != _SURROGATES[0]:
                    others += [writing.spelled(code) for code in range(max(first, begin), min(last, end) + 1)]
                if first <= last and first < begin:
                    plain += _written((first, min(last, begin - 1)))
                first = max(first, end + 1)
            if first <= last:
                plain += _written((first, last))
    alternatives = [f"[{plain}]"] * bool(plain) + others
    if not alternatives:
        raise ValueError("has a class of characters alone that cannot be written there: leave it out")
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
