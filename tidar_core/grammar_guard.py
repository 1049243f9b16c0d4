"""A process that compiles grammars before the engine does: what hangs, crashes or eats memory does so in here.

The compiler is native code that a few characters can keep busy for hours, and a thread cannot be stopped. So each
grammar is compiled here first, in a process that the kernel ends: at so many seconds of computing, and at so much
memory. What passes does no harm when the engine compiles it once more, in a thread; where it is quicker to read what
it compiled to, this process sends that. What the compiler says it leaves out of a grammar counts as an error.

Run as a script, on lines of JSON: the tokenizer first, then a grammar a line. Each is answered by a line: null where it
compiles, what is wrong with it, or true where it compiles and the next line is what it compiled to. That line may be
empty, and breaks off where the process was ended: nothing is wrong with the grammar then. The script ends with its
standard input, that is with the engine.
"""

import importlib
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

COMPILE_SECONDS = 4  # of computing, with few tokens
TOKENS_A_SECOND = 7_500  # that add to them: a bounded string of usual length takes 6 to 9 seconds with 150,000
MEMORY_BYTES = 2**30
QUICK_SECONDS = 0.3  # what is compiled within that is not worth sending
MOST_SENT = 100_000_000  # bytes; to write them takes ten times as much memory for a moment, and so does reading
SENT_A_SECOND = 3e7  # bytes that are written, and read
MOST_WHITESPACE = 32  # characters between two parts of a JSON text: a model could go on with them for ever
# What of that may be there: all usual layouts. Where empty lines may stand, a small model that writes one goes on with
# them, and has no tokens left for what it was asked.
_GAP = rf'tidar_gap ::= "" | " " | "\r"? "\n" [ \t]{{0, {MOST_WHITESPACE - 2}}}'
TRIALS = (
    ("regex", "a*"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}'),
)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
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
STRING_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
    "time", "uri", "uri-reference", "uri-template", "uuid",
)  # fmt: skip
# Which xgrammar 0.2.8 gives control characters and quotes.
_POINTERS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
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
_NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_NO_SCHEMAS = ("const", "default", "enum", "example", "examples")
_OTHER_NAMES = re.compile(r"^\S+_addl_key(?:_\d+)* ::= .*$", re.MULTILINE)
_ESCAPED_IN_NAME = re.compile(
    r' \| \("\\(?:"|[^"]+)" \S+_addl_key(?:_\d+)*\)| \| \("\\\\" basic_escape basic_string_sub\)'
)
_BYTE_IN_NAME = re.compile(r"\\u00[89a-f][0-9a-f]")
_SOURCE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: ")


def compile_seconds(vocab_size: int) -> int:
    """How long a grammar may be computed on. The compiler walks all tokens for each state of a grammar."""
    return COMPILE_SECONDS + vocab_size // TOKENS_A_SECOND


def wall_seconds(computing: int) -> int:
    """Where the machine is so busy that this comes first."""
    return 18 + 3 * computing


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
    if "pattern" in schema and schema.get("format") in STRING_FORMATS:
        del mended["format"]  # xgrammar would take it in place of the pattern; beside one it is a remark (2020-12)
    elif schema.get("format") in list(_POINTERS) and "minLength" not in schema and "maxLength" not in schema:
        mended["pattern"] = pattern_in_json(_POINTERS[mended.pop("format")])
    return mended


def _kind_of(name: str, value: Any) -> str | None:
    """The type of the values that a keyword says something about."""
    if name == "format":
        return "string" if value in STRING_FORMATS else None
    if name == "multipleOf":  # which is enforced for these alone
        return "integer" if isinstance(value, int) else "number"
    return _KINDS_OF.get(name)


def _keyword_in_json(name: str, value: Any) -> Any:
    if name in _NO_SCHEMAS:
        return value
    if name == "pattern" and isinstance(value, str):
        return pattern_in_json(value)
    if name in _NAMED_SCHEMAS and isinstance(value, dict):
        patterns = name == "patternProperties"
        return {pattern_in_json(key) if patterns else key: in_json(one) for key, one in value.items()}
    return in_json(value)


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


def one_line(message: str) -> str:
    """The last line that the compiler wrote, without time and place in its source."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return _SOURCE.sub("", lines[-1])[:300].removeprefix("Warning: ") if lines else ""


def why_lost(returncode: int, computing: int) -> str:
    """What ended the process instead of an answer. An exit status is never the grammar's doing: what the compiler
    raises is answered, and the process ends by itself with its standard input alone. computing: the seconds that it
    had."""
    if -returncode in (signal.SIGXCPU, signal.SIGALRM):
        return f"it takes more than {computing} seconds to compile: make it simpler"
    if -returncode == signal.SIGKILL:  # by the kernel: no memory left, or the hard limit of seconds
        return "it takes too much memory or time to compile: make it simpler"
    if -returncode in _CRASHES:
        return "it breaks the grammar compiler"
    how = f"exit status {returncode}" if returncode >= 0 else f"signal {-returncode}"
    return f"the server's grammar compiler does not run ({how}), which is no fault of the grammar"


def of_the_grammar(returncode: int) -> bool:
    """Whether the same grammar would end the process again: not where the machine was busy, or short of memory."""
    return -returncode == signal.SIGXCPU or -returncode in _CRASHES


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a grammar: what is wrong with it, or what it compiled to where that is worth sending."""

    problem: str | None = None
    worth_sending: "CompiledGrammar | None" = None


def try_out(compiler: "GrammarCompiler", job: dict[str, Any], warnings: BinaryIO, computing: int) -> Trial:
    """Compiles a grammar within `computing` seconds. `warnings`: the file behind this process' standard error."""
    warnings.seek(0)
    warnings.truncate()
    _limit_time(computing)
    began = time.process_time()
    try:
        compiled = compile_grammar(compiler, job["kind"], job["text"])
        worth_sending = is_worth_sending(compiled, time.process_time() - began)
    except Exception as error:
        message = str(error)
        if isinstance(error, MemoryError) or "bad_alloc" in message:
            return Trial("it takes too much memory to compile: make it simpler")
        return Trial(one_line(message) or type(error).__name__)
    finally:
        signal.alarm(0)
    warnings.seek(0)
    problem = one_line(warnings.read().decode("utf-8", "replace")) or None
    return Trial(problem, compiled if worth_sending and problem is None else None)


def is_worth_sending(compiled: "CompiledGrammar", seconds: float) -> bool:
    """Whether to compile it again, which takes as many seconds, takes longer than to write and to read it."""
    if seconds < QUICK_SECONDS:
        return False
    rules = str(compiled.grammar)
    # xgrammar 0.2.8 writes the states of all rules once for each rule, and a mask in up to twice the bytes that it has.
    size = 5 * len(rules) * rules.count("::=") + 2 * compiled.memory_size_bytes
    return size <= min(MOST_SENT, seconds * SENT_A_SECOND)


def _as_line(compiled: "CompiledGrammar", computing: int) -> bytes:
    """What a grammar compiled to; nothing where there is too little memory to write it."""
    _limit_time(computing)
    try:
        return compiled.serialize_json().encode()
    except Exception:
        return b""
    finally:
        signal.alarm(0)


def _limit_time(computing: int) -> None:
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + computing)
    signal.alarm(wall_seconds(computing))


def _limit(kind: int, most: int) -> None:
    """Sets a limit that can be raised again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _limit_memory() -> None:
    with suppress(OSError), open("/proc/self/statm") as pages:  # on Linux alone
        mapped = int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _limit(resource.RLIMIT_AS, mapped + MEMORY_BYTES)


def _leave_out_tensors() -> None:
    """Has xgrammar load its compiler without torch and transformers, which take six sevenths of its start and most of
    its memory: they are for masks over logits and for reading tokenizers, and the compiler needs neither."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python lets an import fail
    names_alone = ModuleType("transformers")
    names_alone.__dict__.update(PreTrainedTokenizerBase=object, PreTrainedTokenizerFast=object)
    sys.modules["transformers"] = names_alone
    package = importlib.util.find_spec("xgrammar")
    assert package is not None
    sys.modules["xgrammar"] = importlib.util.module_from_spec(package)  # its own lines would load all of its modules
    importlib.import_module("xgrammar.load_binding")


def main(whole: bool) -> None:
    """whole: with all that xgrammar loads by itself."""
    try:
        if not whole:
            _leave_out_tensors()
        from xgrammar.compiler import GrammarCompiler
        from xgrammar.tokenizer_info import TokenizerInfo

        of_one_token = GrammarCompiler(TokenizerInfo([b"a"]), max_threads=1, cache_enabled=False)
        for kind, text in TRIALS:
            compile_grammar(of_one_token, kind, text)
    except Exception:
        if whole:
            raise
        os.execv(sys.executable, [sys.executable, "-P", __file__, "whole"])  # a version that is built otherwise
    tokenizer = TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    compiler = GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    _limit(resource.RLIMIT_CORE, 0)
    _limit_memory()
    computing = compile_seconds(tokenizer.vocab_size)
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), 2)
        for line in sys.stdin:
            trial = try_out(compiler, json.loads(line), warnings, computing)
            compiled = trial.worth_sending
            print(json.dumps(trial.problem if compiled is None else True), flush=True)
            if compiled is not None:
                sys.stdout.buffer.write(_as_line(compiled, computing) + b"\n")
                sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main("whole" in sys.argv[1:])
