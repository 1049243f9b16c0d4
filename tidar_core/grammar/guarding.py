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

if __name__ == "__main__":  # as a script: with the modules beside it, whichever version is installed
    beside = ModuleType("tidar_core")
    beside.__path__ = [os.path.dirname(os.path.dirname(__file__))]
    sys.modules["tidar_core"] = beside
from tidar_core.grammar.compiling import compile_grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

COMPILE_SECONDS = 4  # of computing, with few tokens
TOKENS_A_SECOND = 7_500  # that add to them: with 150,000 xgrammar 0.2.8 takes 6 to 9 seconds for a bounded string
MEMORY_BYTES = 2**30
QUICK_SECONDS = 0.3  # what is compiled within that is not worth sending
MOST_SENT = 100_000_000  # bytes; to write them takes ten times as much memory for a moment, and so does reading
SENT_A_SECOND = 3e7  # bytes that are written, and read
TRIALS = (
    ("regex", "a*"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}'),
)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
_SOURCE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: ")


def compile_seconds(vocab_size: int) -> int:
    """How long a grammar may be computed on. The compiler walks all tokens for each state of a grammar."""
    return COMPILE_SECONDS + vocab_size // TOKENS_A_SECOND


def wall_seconds(computing: int) -> int:
    """Where the machine is so busy that this comes first."""
    return 18 + 3 * computing


def last_said(message: str) -> str:
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
class Outcome:
    """What came of a grammar: what is wrong with it, or what it compiled to where that is worth sending."""

    problem: str | None = None
    worth_sending: "CompiledGrammar | None" = None


def try_out(compiler: "GrammarCompiler", job: dict[str, Any], warnings: BinaryIO, computing: int) -> Outcome:
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
            return Outcome("it takes too much memory to compile: make it simpler")
        return Outcome(last_said(message) or type(error).__name__)
    finally:
        signal.alarm(0)
    warnings.seek(0)
    problem = last_said(warnings.read().decode("utf-8", "replace")) or None
    return Outcome(problem, compiled if worth_sending and problem is None else None)


def is_worth_sending(compiled: "CompiledGrammar", seconds: float) -> bool:
    """Whether to compile it again, which takes as many seconds, takes longer than to write and to read it."""
    if seconds < QUICK_SECONDS:
        return False
    rules = str(compiled.grammar)
    # xgrammar writes the states of all rules once for each rule, and a mask in up to twice the bytes that it has.
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
            outcome = try_out(compiler, json.loads(line), warnings, computing)
            compiled = outcome.worth_sending
            print(json.dumps(outcome.problem if compiled is None else True), flush=True)
            if compiled is not None:
                sys.stdout.buffer.write(_as_line(compiled, computing) + b"\n")
                sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main("whole" in sys.argv[1:])
