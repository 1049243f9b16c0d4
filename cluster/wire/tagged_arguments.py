"""The arguments of a call that is written in tags, as Qwen3-Coder writes it, read as they come and told as JSON.

    <parameter=KEY>
    VALUE
    </parameter>

A text stands there as it is, all else as JSON: which of the two a value is goes by the function's schema.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from cluster.wire.schema_types import TYPES, Values, parameters_of, values_of

SPACE = " \t\r\n"  # of JSON
LONGEST_KEY = 1024  # characters
_PARAMETER, _FUNCTION_END = "<parameter=", "</function>"
_MARKS = (_PARAMETER, _FUNCTION_END, "</tool_call>", "<tool_call>")  # what may come between two parameters
# What ends a value: its tag on a line of its own or before another tag or, where the model left it out, what comes
# behind. A text that has one of these lines of its own ends there: that is what reading calls without their tags costs.
VALUE_END = "\n</parameter>"
_VALUE_ENDS = (
    VALUE_END,
    "</parameter><parameter=",
    "</parameter></function>",
    "</parameter></tool_call>",
    "</parameter>\n<parameter=",
    "</parameter>\n</function>",
    "</parameter>\n</tool_call>",
    "\n<parameter=",
    "\n</function>\n</tool_call>",
    "\n</tool_call>",
)
_MARK = re.compile("|".join(_MARKS))
_ANY_VALUE_END = re.compile(
    rf"{VALUE_END}|</parameter>(?=\n?(?:<parameter=|</function>|</tool_call>))"
    r"|\n(?=<parameter=|</function>\n</tool_call>|</tool_call>)"
)
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


class TaggedArguments:
    """Reads a call's arguments up to `</function>`. schema: that of the function's parameters. constrained: the
    answer has to follow `tagged_schemas`, where a value ends with its tag on a line of its own and with nothing else.

    A parameter that is text alone is told as it comes, any other when it is whole. A second one of the same name counts
    as little as what stands between two. Where the model left out the last tags, the arguments end at the call's."""

    def __init__(self, schema: Any, constrained: bool = False) -> None:
        self._schema = schema
        self._parameters = parameters_of(schema)
        self._ends: Collection[str] = (VALUE_END,) if constrained else _VALUE_ENDS
        self._end = re.compile(VALUE_END) if constrained else _ANY_VALUE_END
        self._held = ""  # of which it is not known yet what it is
        self._told = ""
        self._over = False
        self._keys = set[str]()
        self._values = values_of(False, None)  # which the one that is being read is of
        self._value: list[str] | None = None  # one that is told when it is whole
        self._repeated = False
        self._step = self._between

    def read(self, text: str) -> tuple[str, str | None]:
        """Take more of the answer in; return what it adds to the arguments as JSON, and what stands behind them, None
        where they are not over."""
        self._held += text
        while self._held and not self._over and self._step():
            pass
        told, self._told = self._told, ""
        return told, self._held if self._over else None

    # Each step takes from the front of `_held` what it understands; False where it needs more to tell.

    def _between(self) -> bool:
        found = _MARK.search(self._held)
        if found is None:
            self._held = self._held[len(self._held) - _begun(self._held, _MARKS) :]
            return False
        self._held = self._held[found.start() if found[0] != _FUNCTION_END else found.end() :]
        if found[0] == _PARAMETER:
            self._step = self._in_key
        else:
            self._told += "}" if self._keys else "{}"
            self._over = True
        return True

    def _in_key(self) -> bool:
        rest = self._held[len(_PARAMETER) : len(_PARAMETER) + LONGEST_KEY + 1]
        end = re.search("[>\n]", rest)
        if end is None and len(rest) <= LONGEST_KEY:
            return False
        if end is None or end[0] == "\n":  # no tag
            self._held = self._held[len(_PARAMETER) :]
            self._step = self._between
            return True
        self._held = self._held[len(_PARAMETER) + end.end() :]
        self._begin(rest[: end.start()])
        self._step = self._before_value
        return True

    def _begin(self, key: str) -> None:
        other = True if self._parameters.other is None else self._parameters.other
        self._values = values_of(self._parameters.named.get(key, other), self._schema)
        self._value = None if self._values.types == {"string"} else []
        self._repeated = key in self._keys
        self._tell(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._tell('"' if self._value is None else "")
        self._keys.add(key)

    def _before_value(self) -> bool:
        self._held = self._held.removeprefix("\n")
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        found = self._end.search(self._held)
        end = len(self._held) - _begun(self._held, self._ends) if found is None else found.start()
        part = self._held[:end]
        if self._value is None:
            self._tell(_as_json(part)[1:-1])
        else:
            self._value.append(part)
        self._held = self._held[end if found is None else found.end() :]
        if found is None:
            return False
        self._tell('"' if self._value is None else json_of("".join(self._value), self._values))
        self._step = self._between
        return True

    def _tell(self, text: str) -> None:
        if not self._repeated:
            self._told += text


def json_of(text: str, values: Values) -> str:
    """A value of those that may be, as JSON. Where it may be text it is, but for what is certainly meant as null, or as
    a list or an object; where the texts are listed, one of these is. Of any type, as where the schema does not name the
    parameter: JSON, where it is the JSON of something else than text. Python's True, False and None are JSON's, since
    templates write those. What is no JSON is text too."""
    types = values.types
    meant = text.strip(SPACE)
    meant = _PYTHONS.get(meant, meant)
    if values.texts is not None and text in values.texts:
        return _as_json(text)
    if meant == "null" and "null" in types:
        return meant
    may_be_text = "string" in types and values.texts is None and types != TYPES
    if may_be_text and not (_opens(meant, "[", "array", types) or _opens(meant, "{", "object", types)):
        return _as_json(text)
    return meant if not meant.startswith('"') and _is_json(meant) else _as_json(text)


def _opens(text: str, bracket: str, kind: str, types: Collection[str]) -> bool:
    return text.startswith(bracket) and kind in types


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _begun(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    begins = (length for length in range(longest, 0, -1) if any(mark.startswith(text[-length:]) for mark in marks))
    return next(begins, 0)
