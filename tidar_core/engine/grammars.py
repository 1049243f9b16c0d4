"""Grammars compiled for a model's tokens, off the engine's thread, and the requests that wait for them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from tidar_core.engine.constraint import CROWDED, TOO_SLOW, GrammarState
from tidar_core.engine.thought_watch import ThoughtWatch
from tidar_core.engine.timed_calls import TimedCalls
from tidar_core.grammar import guarding
from tidar_core.grammar.compiling import compile_grammar
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import Finish, FinishReason, RequestError, Sequence, StepOutput

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

# Grammars compiled at once: a few that take their tens of seconds must not hold up all others, nor take the processors
# that steps want.
AT_ONCE, MOST_AT_ONCE, PROCESSORS_FOR_ONE = 2, 8, 4
KEPT = 256  # grammars, refused ones included
KEPT_BYTES = 2**30  # with 150,000 tokens an object takes 7 MiB, strings of bounded length 16 to 31
PAUSE_SECONDS = 0.005
REPLAY_SECONDS = 0.02  # a step, for what was emitted elsewhere: all others wait meanwhile
# Of a schema or an expression that is no longer and repeats no group, a call took 0.25 s where it was made to be slow.
USUAL_BYTES = 16 * 1024
_REPEATED_GROUP = re.compile(r"[)?*+}]\s*\{")
_GRAMMAR_WITHIN = re.compile(r'"type":\s*"grammar"')


class PassingError(RequestError):
    """A grammar that could not be compiled for what may be over the next time."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """What compiles for a model's tokens here, those tokens, and the same as text for the guards."""

    native: "GrammarCompiler"
    tokens: "TokenizerInfo"
    tokens_text: str

    def compiled(self, grammar: Grammar) -> "CompiledGrammar":
        return compile_grammar(self.native, grammar.kind, grammar.text)

    def read(self, sent: str) -> "CompiledGrammar | None":
        """What a guard compiled; None where it cannot be read."""
        import xgrammar

        try:
            return xgrammar.CompiledGrammar.deserialize_json(sent, self.tokens)
        except Exception:  # the grammar is compiled here then
            return None


class Grammars:
    """Compiles grammars in threads and keeps the last used. `compiled` may be called from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: tuple[int, ...]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        at_once = min(MOST_AT_ONCE, max(AT_ONCE, (os.cpu_count() or 1) // PROCESSORS_FOR_ONE))
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one at a time: it takes ten times the memory of what was sent
        self._building = threading.Lock()  # takes a second: whoever asks for a grammar must not wait for it
        self._known: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[Grammar, int] = {}  # of those that are done: to ask one walks all of it
        self._guards = threading.local()
        self._compiler: Compiler | None = None

    def read_tokens(self) -> Future[Compiler]:
        """Begins to read what each token adds to the text, which the first grammar would wait for: at 150,000 tokens a
        second of Python. What goes wrong, that grammar tells."""
        return self._pool.submit(self._shared_compiler)

    def start_guard(self) -> "Future[Guard]":
        """Begins to make ready all else that the first grammar would wait for, in a process."""
        return self._pool.submit(lambda: self._guard(self._shared_compiler().tokens_text))

    def compiled(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """The grammar, once it is compiled; the future raises RequestError where it cannot be."""
        with self._lock:
            if grammar not in self._known or _passing(self._known[grammar]):
                self._known[grammar] = self._pool.submit(self._compile, grammar)
            self._known.move_to_end(grammar)
            self._forget()
            return self._known[grammar]

    def drop(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        """Does not compile a grammar that has not been begun. future: what `compiled` gave for it."""
        with self._lock:
            if future.cancel() and self._known.get(grammar) is future:
                del self._known[grammar]

    def _forget(self) -> None:
        """Drops what was not used for longest, beyond what may be kept."""
        for grammar, future in self._known.items():
            if grammar not in self._sizes and future.done() and not future.exception():
                self._sizes[grammar] = future.result().memory_size_bytes
        total = sum(self._sizes.values())
        for grammar in list(self._known)[:-1]:
            if len(self._known) <= KEPT and total <= KEPT_BYTES:
                break
            del self._known[grammar]
            total -= self._sizes.pop(grammar, 0)

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        try:
            compiler = self._shared_compiler()
        except ImportError as error:
            raise RequestError("constrained output needs the package xgrammar on the server", "grammar") from error
        guard = self._guard(compiler.tokens_text)
        trial = guard.try_out(grammar)
        if trial.problem is not None:
            for field, part in grammar.parts:
                of_part = guard.problem_with(part)
                if of_part is not None:
                    raise RequestError(f"the {_NAMES[part.kind]} cannot be used: {of_part}", field)
            raise RequestError(f"the {_NAMES[grammar.kind]} cannot be used: {trial.problem}", "grammar")
        with self._reading:
            read = compiler.read(trial.compiled) if trial.compiled else None
        if read is None:
            return compiler.compiled(grammar)
        with self._lock:
            if grammar in self._known:  # each rule has states of its own now, of which its size by itself knows nothing
                self._sizes[grammar] = len(trial.compiled)
        return read

    def _shared_compiler(self) -> Compiler:
        with self._building:
            if self._compiler is None:
                import xgrammar

                tokens = token_table(self._tokenizer, self._vocab_size, self._eos_ids)
                compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
                self._compiler = Compiler(compiler, tokens, tokens.serialize_json())
            return self._compiler

    def _guard(self, tokens: str) -> "Guard":
        """This thread's own."""
        if not hasattr(self._guards, "own"):
            self._guards.own = Guard(tokens, guarding.compile_seconds(self._vocab_size))
        guard: Guard = self._guards.own
        return guard


def may_take_long(grammar: Grammar) -> bool:
    """Whether one call about a grammar may take very long although all calls before it were quick.

    This happens where readings of many tokens wait for one token that completes all of them: with rules that lead to
    themselves and may be followed by nothing, and with repeated groups that may be empty. Also true of some harmless
    grammars."""
    text = grammar.text
    if len(text) > 2 * USUAL_BYTES:
        return True
    if grammar.kind in ("json_schema", "structural_tag"):
        text = json.dumps(json.loads(text), ensure_ascii=False)  # else escapes could hide what is looked for
    if grammar.kind == "ebnf" and (text.count("::=") > 1 or text.count("root") > 1):
        return True
    if grammar.kind == "structural_tag" and _GRAMMAR_WITHIN.search(text):
        return True
    return len(text) > USUAL_BYTES or _REPEATED_GROUP.search(text) is not None


def _passing(future: "Future[CompiledGrammar]") -> bool:
    """Whether it failed, of what says nothing of the grammar."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error is not None and (isinstance(error, PassingError) or not isinstance(error, RequestError))


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "ebnf": "grammar",
    "structural_tag": "schema among the tools",
}


def token_table(tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: tuple[int, ...]) -> "TokenizerInfo":
    """What each token adds to the text, for the grammar compiler. Special tokens add nothing, and are never allowed
    but where one of `eos_ids` ends the answer."""
    import xgrammar

    ends = [token for token in eos_ids if token < vocab_size] or None
    read = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends)
    texts = read.decoded_vocab
    for token, entry in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
        if entry.special and token < vocab_size:
            texts[token] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=ends,
        add_prefix_space=read.add_prefix_space,
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """What a guard says of a grammar: what is wrong with it, in one line, or what it compiled to, as text; neither
    where it is as quick to compile it here."""

    problem: str | None
    compiled: str = ""


class Guard:
    """The other end of `tidar_core.grammar.guarding`; a process that a grammar ended is started anew. For one thread.
    computing: the seconds that the process takes at most, as it finds itself."""

    def __init__(self, tokens: str, computing: int = guarding.COMPILE_SECONDS):
        self._tokens = tokens
        self._computing = computing
        self._process = self._start()

    def problem_with(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar, in one line; None where it may be compiled here. Raises PassingError."""
        return self.try_out(grammar).problem

    def try_out(self, grammar: Grammar) -> Trial:
        """Raises PassingError."""
        if self._process.poll() is not None:  # while it was idle, which no grammar is to blame for
            self._process.communicate()
            self._process = self._start()
        job = json.dumps({"kind": grammar.kind, "text": grammar.text})
        answer, returncode = self._answer(job)
        if returncode == -signal.SIGKILL:
            # By Ray perhaps, which kills what a process has begun when that ends: a request that failed of this in its
            # last moments would be over, where another replica goes on with what is lost.
            answer, returncode = self._answer(job)
        if answer:
            said = json.loads(answer)
            return Trial(None, self._sent()) if said is True else Trial(said)
        why = guarding.why_lost(returncode, self._computing)
        if not guarding.of_the_grammar(returncode):
            raise PassingError(f"the {_NAMES[grammar.kind]} cannot be used: {why}", "grammar")
        return Trial(why)

    def _answer(self, job: str) -> tuple[str, int]:
        """What the process says; nothing, and how it ended, where it ended over it."""
        answer = self._ask(self._process, job)
        return answer, 0 if answer else self._replace()

    def _sent(self) -> str:
        """What a grammar compiled to; nothing where the process ended over it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            return line[:-1]
        self._replace()
        return ""

    def _replace(self) -> int:
        """Starts the process anew, and tells how the last one ended."""
        process, self._process = self._process, self._start()
        process.communicate()  # it has ended: nothing else closes its output
        return process.returncode

    def _start(self) -> "subprocess.Popen[str]":
        # -P: this package's modules must not stand in for others of the same name
        process = subprocess.Popen(
            [sys.executable, "-P", guarding.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        with suppress(BrokenPipeError):  # one that could not start is told apart when it is asked
            self._send(process, json.dumps(self._tokens))
        return process

    def _ask(self, process: "subprocess.Popen[str]", job: str) -> str:
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            self._send(process, job)
        return process.stdout.readline()

    def _send(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


@dataclass(slots=True)
class _Waiting:
    """A sequence, the grammar that it waits for, and how far what it emitted elsewhere was read by that."""

    sequence: Sequence
    compiled: "Future[CompiledGrammar]"
    state: GrammarState | None = None
    read: int = 0


class GrammarQueue:
    """Sequences that wait for their grammar; all others go past them. For the engine's thread."""

    def __init__(self, grammars: Grammars, eos_ids: tuple[int, ...], vocab_size: int):
        self._grammars = grammars
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._waiting: dict[str, _Waiting] = {}
        self._timed_calls = TimedCalls()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        self._waiting[sequence.request.request_id] = _Waiting(sequence, self._grammars.compiled(grammar))

    def remove(self, request_id: str) -> bool:
        """Takes a sequence out; a grammar that nobody else waits for need not be compiled."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return False
        grammar = found.sequence.request.params.grammar
        if grammar is not None and not any(other.compiled is found.compiled for other in self._waiting.values()):
            self._grammars.drop(grammar, found.compiled)
        return True

    def admit(self, add: Callable[[Sequence], None]) -> list[StepOutput]:
        """Hands on every sequence whose grammar is ready, in the order in which they came; those whose grammar cannot
        be used, or refuses what they emitted already, end here. Where much was emitted, the next call goes on."""
        failed, until = [], time.monotonic() + REPLAY_SECONDS  # some of it is computed on another thread
        for request_id, waiting in list(self._waiting.items()):
            if not waiting.compiled.done():
                continue
            try:
                state = self._read(waiting, until)
                if state is None:
                    continue
                del self._waiting[request_id]
                sequence = waiting.sequence
                if isinstance(sequence.constraint, ThoughtWatch):
                    sequence.constraint.grammar = state
                else:
                    sequence.constraint = state
                add(sequence)
            except RequestError as error:
                field = None if isinstance(error, PassingError) else error.param  # which would tell that it is at fault
                finish = Finish(FinishReason.ERROR, error=str(error), param=field)
                failed.append(StepOutput(request_id, (), finish=finish))
            except Exception as error:  # native code, or no process could be started
                finish = Finish(FinishReason.ERROR, error=f"the grammar could not be compiled: {type(error).__name__}")
                failed.append(StepOutput(request_id, (), finish=finish))
        for output in failed:
            self._waiting.pop(output.request_id, None)
        return failed

    def pause(self) -> None:
        """Waits a little for the next grammar, where there is nothing else to do."""
        if self._waiting:
            wait([waiting.compiled for waiting in self._waiting.values()], PAUSE_SECONDS, FIRST_COMPLETED)

    def _read(self, waiting: _Waiting, until: float) -> GrammarState | None:
        """The state behind all that was emitted; None where that takes longer. Raises RequestError."""
        params, emitted = waiting.sequence.request.params, waiting.sequence.request.emitted
        if waiting.state is None:
            ends = {token for token in (*self._eos_ids, *params.stop_token_ids) if 0 <= token < self._vocab_size}
            grammar = params.grammar
            apart = grammar is None or may_take_long(grammar)
            if apart and self._timed_calls.crowded and not emitted:  # what has begun elsewhere goes on
                raise PassingError(CROWDED, "grammar")
            compiled = waiting.compiled.result()
            waiting.state = GrammarState(compiled, sorted(ends), self._vocab_size, self._timed_calls, apart)
        while waiting.state.error is None and waiting.read < len(emitted):
            if time.monotonic() > until:
                return None
            waiting.state.replay(emitted[waiting.read])
            waiting.read += 1
        if waiting.state.error == CROWDED:
            raise PassingError(CROWDED, "grammar")
        if waiting.state.error == TOO_SLOW:
            raise RequestError(TOO_SLOW, "grammar")
        if waiting.state.error is not None:
            raise RequestError("what was emitted already does not follow the grammar", "emitted")
        return waiting.state
