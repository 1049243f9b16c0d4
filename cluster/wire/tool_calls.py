"""Tool calls in a growing text: what of it the model says, and what calls a function.

Four ways to write a call are read. In three it is a JSON object with a function's name and its arguments: between tags,
as Hermes began it and Qwen writes it; bare, as Llama 3 does; and in a list, as Mistral's models do behind a token that
is no text. Bare and in a list, an answer is nothing but calls or no call at all. In the fourth, Qwen3-Coder's, the
function and each of its arguments have tags too (`tagged_arguments`). A call's arguments are passed on as they come.
What only looks like a call, or names a function that was not offered, is text.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.wire.tagged_arguments import TaggedArguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: the tag `begin`, an object that has the arguments under `key`, the tag `end`, and
    `separator` between two calls. Both tags are empty where the answer begins with the first object. key: None where
    the function and each argument stand in tags of their own, in place of the object. in_list: all calls are a JSON
    list. short_ids: the template takes no ids of calls but those of nine letters and digits."""

    begin: str
    end: str
    key: str | None
    separator: str
    in_list: bool = False
    short_ids: bool = False

    def head(self, name: str) -> str:
        """What stands before a call's arguments, spelled as the model's template spells it."""
        if self.key is None:
            return f"{self.begin}{_FUNCTION}{name}>\n"
        return f'{self.begin}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """What stands behind them."""
        return ("}" if self.key is not None else _FUNCTION_END) + self.end

    @property
    def before_calls(self) -> str:
        """Characters that may stand before the first object."""
        return _SPACE + ("[" if self.in_list else "")

    @property
    def between_calls(self) -> str:
        """Characters that may stand between two objects without tags, and behind the last."""
        return _SPACE + (",]" if self.in_list else ";")

    @property
    def opening(self) -> str:
        """What a call begins with, behind its tag."""
        return _FUNCTION if self.key is None else "{"


_SPACE = " \t\r\n"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments", "\n")
LLAMA = ToolFormat("", "", "parameters", "; ")
MISTRAL = ToolFormat("", "", "arguments", ", ", in_list=True, short_ids=True)
QWEN_CODER = ToolFormat("<tool_call>\n", "\n</tool_call>", None, "\n")

# As far as it is known of whom a call is, and its arguments begin.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_REACH = 4096  # characters: a longer one is read with the whole object, not again at every token
_TAGGED_HEAD = re.compile(rf"{_FUNCTION}([a-zA-Z0-9_-]*)")
LONGEST_NAME = 128  # characters, which a request may give: as in the Responses API


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the call number `index`: text of its arguments. The first of a call tells its `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class _ObjectReader:
    """Reads a JSON object no further than it must to see where it ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int | None:
        """Read `text` from `start` to where the object ends; the place behind that, None if it is not there. All of the
        text counts as read then."""
        for place in range(start, len(text)):
            char = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None

    def read(self, text: str) -> tuple[str, str | None]:
        """What of the text is of the object, and what stands behind it, None where it is not over."""
        end = self.end(text)
        return (text, None) if end is None else (text[:end], text[end:])


class ToolParser:
    """Splits an answer into text and calls. What all `push` calls and `finish` bring together does not depend on how
    the answer was cut.

    functions: the schemas of those that were offered, by name. parallel: whether calls beyond the first are passed on.
    new_id: makes the id of a call. begun: the beginning of a call that stands before the answer (`begun_call`): it is
    told with the call, as text it is not, for it was said before. constrained: what the answer has to follow says how
    its calls are written. alone: it says too that the answer is nothing but calls, or has none.
    """

    def __init__(
        self,
        form: ToolFormat,
        functions: Mapping[str, Any],
        parallel: bool,
        new_id: Callable[[], str],
        begun: str = "",
        constrained: bool = False,
        alone: bool = False,
    ):
        self.calls = 0
        self.in_call = False  # what was pushed last is of a call to its end
        self._functions = functions
        self._parallel = parallel
        self._new_id = new_id
        self._constrained = constrained
        self._alone = alone
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._form = form
        self._held = begun  # of which it is not known yet what it is
        self._old = len(begun)  # characters of text to come that were said before
        self._lead = ""  # what stood before an object: text after all where that is no call
        self._since_begin = 0  # characters from the beginning of the last call on, as they were when it was found
        self._told: list[str | CallDelta] = []  # in the order of the answer
        self._reader = _ObjectReader()
        self._read = 0  # characters of `_held` that the reader has seen
        self._arguments: _ObjectReader | TaggedArguments = self._reader
        self._step = self._in_text if self._begin else self._before_object

    @property
    def complete(self) -> bool:
        """No call is left half said."""
        return not self.in_arguments and self._step != self._in_rest

    @property
    def in_arguments(self) -> bool:
        """The last call's arguments are not whole."""
        return self._step == self._in_arguments

    @property
    def open(self) -> int:
        """Characters that belong to a call which is not over, at the end of what a single push brought."""
        if self._step == self._in_text:
            return len(self._held)
        if self._step == self._before_object:
            return len(self._lead) + len(self._held)
        over = self._step == self._in_plain_text or (self._step == self._behind_object and not self._end)
        return 0 if over else self._since_begin

    def push(self, text: str) -> tuple[str | CallDelta, ...]:
        """Append text; return what of it can be shown, and what it adds to calls, in order."""
        begun = self._is_in_call
        self._held += text
        while self._held and self._step():
            pass
        self.in_call = self._is_in_call or (begun and not self._held)
        return self._out()

    @property
    def _is_in_call(self) -> bool:
        return self._step in (self._in_arguments, self._in_rest, self._behind_object)

    def finish(self) -> tuple[str | CallDelta, ...]:
        """End the answer. What was held back is text, but for whitespace and a cut tag behind a call, and for anything
        behind one where only calls may be."""
        behind_call = self._step == self._behind_object or (self._step == self._in_text and self.calls)
        calls_alone = self._constrained and self._alone and self.calls
        if not (self._step == self._behind_object or calls_alone or (behind_call and self._held.isspace())):
            self._say(self._lead + self._held)
        self._held = self._lead = ""
        return self._out()

    def _out(self) -> tuple[str | CallDelta, ...]:
        told, self._told = tuple(part for part in self._told if part), []
        return told

    # Each step takes from the front of `_held` what it understands; False where it needs more to tell.

    def _in_text(self) -> bool:
        place = self._held.find(self._begin)
        if self._alone and not self.calls and not self._begin.startswith(self._held.lstrip()[: len(self._begin)]):
            self._step = self._in_plain_text
            return True
        if place < 0:
            # What may turn out to be a tag's beginning, and the white space before it, is held back.
            begun = next(length for length in range(len(self._begin) - 1, -1, -1) if self._ends_with_tags(length))
            self._show(len(self._held[: len(self._held) - begun].rstrip()))
            return False
        self._show(len(self._held[:place].rstrip()))
        self._lead, self._held = self._cut(self._held.index(self._begin) + len(self._begin))
        self._step = self._before_object
        return True

    def _ends_with_tags(self, length: int) -> bool:
        return self._held.endswith(self._begin[:length])

    def _in_plain_text(self) -> bool:
        self._show(len(self._held))
        return False

    def _before_object(self) -> bool:
        space = len(self._held) - len(self._held.lstrip(self._form.before_calls))
        if self._form.opening.startswith(self._held[space:]) and self._held[space:] != self._form.opening:
            return False
        in_list = not self._form.in_list or self.calls or "[" in self._held[:space]
        if not in_list or not self._held.startswith(self._form.opening, space):
            return self._no_call(0)
        lead, self._held = self._cut(space)
        self._lead += lead
        self._since_begin = len(self._lead) + len(self._held)
        self._reader, self._read = _ObjectReader(), 0
        self._step = self._in_object if self._form.opening == "{" else self._in_tagged_head
        return True

    def _in_tagged_head(self) -> bool:
        head = _TAGGED_HEAD.match(self._held)
        assert head is not None
        name, end = head[1], head.end()
        if end == len(self._held) and len(name) <= LONGEST_NAME:
            return False
        if self._held[end : end + 1] != ">" or name not in self._functions:
            return self._no_call(end)
        self._call(name, "")
        self._held = self._held[end + 1 :]
        self._arguments = TaggedArguments(self._functions[name], self._constrained)
        self._step = self._in_arguments
        return True

    def _in_object(self) -> bool:
        head = _HEAD.match(self._held, 0, _HEAD_REACH)
        if head is not None:
            name = _string(head[1])
            if name is None or name not in self._functions:
                return self._no_call(head.end())
            self._call(name, "")
            self._held = self._held[head.end() :]
            self._arguments = _ObjectReader()
            self._step = self._in_arguments
            return True
        end = self._reader.end(self._held, self._read)
        self._read = len(self._held)
        if end is None:
            return False
        found = _call_of(self._held[:end])
        if found is None or found[0] not in self._functions:
            return self._no_call(end)
        self._call(*found)
        self._held = self._held[end:]
        self._step = self._behind_object
        return True

    def _in_arguments(self) -> bool:
        arguments, rest = self._arguments.read(self._held)
        self._held = rest or ""
        if arguments:
            self._add(CallDelta(self.calls - 1, arguments))
        if rest is None:
            return False
        if isinstance(self._arguments, TaggedArguments):
            self._step = self._behind_object
        else:
            self._reader = _ObjectReader()
            self._reader.end("{")  # the one that the arguments stand in
            self._step = self._in_rest
        return True

    def _in_rest(self) -> bool:
        end = self._reader.end(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._lead = ""
            self._step = self._behind_object
        return end is not None

    def _behind_object(self) -> bool:
        waiting = self._held.lstrip()
        if not self._end:
            waiting = self._held.lstrip(self._form.between_calls)
            if not waiting:
                return False
            self._lead, self._held = self._cut(len(self._held) - len(waiting))
            self._step = self._before_object
        elif waiting.startswith(self._end):
            self._held = waiting[len(self._end) :]
            self._step = self._in_text
        elif self._end.startswith(waiting):
            return False
        else:  # the model left the tag out
            self._step = self._in_text
        return True

    def _no_call(self, end: int) -> bool:
        self._say(self._lead)
        self._lead = ""
        self._show(end)
        self._step = self._in_text if self._begin else self._in_plain_text
        return True

    def _show(self, end: int) -> None:
        text, self._held = self._cut(end)
        self._say(text)

    def _say(self, text: str) -> None:
        self._told.append(text[self._old :])
        self._old = max(0, self._old - len(text))

    def _cut(self, place: int) -> tuple[str, str]:
        return self._held[:place], self._held[place:]

    def _call(self, name: str, arguments: str) -> None:
        self._lead = ""
        self._old = 0
        self.calls += 1
        self._add(CallDelta(self.calls - 1, arguments, self._new_id(), name))

    def _add(self, delta: CallDelta) -> None:
        if self._parallel or delta.index == 0:
            self._told.append(delta)


def begun_call(form: ToolFormat, functions: Mapping[str, Any], text: str) -> str:
    """The end of `text` with which a call begins that is not over there; empty where none does."""
    parser = ToolParser(form, functions, True, str)
    parser.push(text)
    begun = text[len(text) - parser.open :].lstrip(form.between_calls)
    return f"[{begun}" if form.in_list and begun and not begun.startswith("[") else begun


def _string(literal: str) -> str | None:
    try:
        return str(json.loads(literal))
    except ValueError:
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose parts stand in another order, or whose arguments are JSON within a string.
    Another string is nothing that a client could read, or send back."""
    try:
        found: Any = json.loads(text)
        arguments = found.get("arguments", found.get("parameters"))
        plain = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    if not isinstance(found.get("name"), str) or not isinstance(plain, dict):
        return None
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        told.encode()
    except UnicodeEncodeError:  # a lone surrogate is legal JSON and no text
        return None
    return found["name"], told
