"""What is said of a grammar whose process ended without an answer: only what the grammar did is put down to it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint, tiny_tokenizer
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine, start
from tidar_core.engine.grammars import Grammars, Guard, PassingError, token_table
from tidar_core.grammar.grammar import Grammar
from tidar_core.grammar.guarding import COMPILE_SECONDS, compile_seconds, wall_seconds, why_lost
from tidar_core.request import RequestError


@pytest.mark.parametrize(
    ("returncode", "said"),
    [
        (-signal.SIGXCPU, "more than 9 seconds to compile"),
        (-signal.SIGALRM, "more than 9 seconds to compile"),
        (-signal.SIGKILL, "too much memory or time"),
        (-signal.SIGSEGV, "it breaks the grammar compiler"),
        (-signal.SIGABRT, "it breaks the grammar compiler"),
        (-signal.SIGTERM, "does not run (signal 15), which is no fault of the grammar"),
        (1, "does not run (exit status 1), which is no fault of the grammar"),
    ],
)
def test_why_a_process_was_lost(returncode, said):
    assert said in why_lost(returncode, 9)


def test_a_grammar_may_take_longer_where_there_are_more_tokens():
    """A schema of two bounded strings takes 0.04, 3.1 and 9.2 seconds with as many, and some machines half as fast."""
    limits = [compile_seconds(tokens) for tokens in (512, 49_152, 151_643)]
    assert limits == [COMPILE_SECONDS, 10, 24]
    assert [wall_seconds(computing) for computing in limits] == [30, 48, 90]


def test_a_process_that_cannot_start_is_not_the_grammars_fault():
    with pytest.raises(PassingError, match="no fault of the grammar"):
        Guard("no table of tokens").problem_with(Grammar("regex", "a"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_grammar_whose_process_was_killed_is_tried_again(monkeypatch, times):
    """As by a kernel that is short of memory, or by Ray while the engine's own process ends: nothing of the grammar's.
    At once where it was killed once, when it is asked for again else."""
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    ask, kills = Guard._ask, iter(range(times))

    def killed(guard, process, job):
        if next(kills, None) is not None:
            process.kill()
        return ask(guard, process, job)

    monkeypatch.setattr(Guard, "_ask", killed)
    grammar = Grammar("regex", "[a-z]{2}")
    if times > 1:
        with pytest.raises(PassingError, match="too much memory or time"):
            grammars.compiled(grammar).result()
    assert grammars.compiled(grammar).result() is grammars.compiled(grammar).result()


def test_where_there_are_many_processors_slow_grammars_leave_some_for_others(monkeypatch):
    go_on, ask = threading.Event(), Guard._ask

    def slowly(guard, process, job):
        if "slow" in job:
            go_on.wait()
        return ask(guard, process, job)

    monkeypatch.setattr(Guard, "_ask", slowly)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    slow = [grammars.compiled(Grammar("regex", f"slow{number}")) for number in range(3)]
    assert grammars.compiled(Grammar("regex", "quick")).result() is not None
    assert not any(future.done() for future in slow)
    go_on.set()
    assert all(future.result() for future in slow)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_was_lost_while_it_was_idle_is_no_grammars_fault(sent):
    """As by a kernel that is short of memory."""
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    prepared = grammars.start_guard().result()
    time.sleep(0.5)  # the thread has come to rest
    prepared._process.send_signal(sent)
    prepared._process.wait()
    assert grammars.compiled(Grammar("regex", "[a-z]{2}")).result() is not None


def test_what_the_compiler_says_of_a_grammar_is_remembered():
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    first = grammars.compiled(Grammar("regex", "(a"))
    with pytest.raises(RequestError, match="cannot be used"):
        first.result()
    assert grammars.compiled(Grammar("regex", "(a")) is first


def test_the_process_loads_neither_torch_nor_transformers():
    """Nor falls back on a start with them, which takes seven times as long."""
    guard = Guard(token_table(tiny_tokenizer(), 512, (2, 0)).serialize_json())
    assert guard.problem_with(Grammar("json_schema", '{"type": "object"}')) is None
    process = Path("/proc", str(guard._process.pid))
    assert b"whole" not in process.joinpath("cmdline").read_bytes().split(b"\0")
    assert "/torch/" not in process.joinpath("maps").read_text()


def test_the_process_takes_the_modules_beside_it_whichever_are_installed(tmp_path, monkeypatch):
    package = tmp_path / "tidar_core"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise ImportError('another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    guard = Guard(token_table(tiny_tokenizer(), 512, (2, 0)).serialize_json())
    assert guard.problem_with(Grammar("regex", "a")) is None


def test_where_the_compiler_does_not_load_alone_it_loads_with_all_of_its_package():
    breaks = "from tidar_core.grammar import guarding; guarding._leave_out_tensors = None; guarding.main(False)"
    lines = [
        json.dumps(token_table(tiny_tokenizer(), 512, (2, 0)).serialize_json()),
        json.dumps({"kind": "json_object", "text": ""}),
        json.dumps({"kind": "regex", "text": "(a"}),
    ]
    ran = subprocess.run([sys.executable, "-c", breaks], input="\n".join(lines), capture_output=True, text=True)
    fine, problem = (json.loads(line) for line in ran.stdout.splitlines())
    assert fine is None
    assert problem


def test_what_was_prepared_is_what_the_first_grammar_uses(monkeypatch):
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    prepared = grammars.start_guard().result()
    time.sleep(0.5)  # the thread has come to rest
    monkeypatch.setattr(Guard, "_start", None)
    monkeypatch.setattr("tidar_core.engine.grammars.token_table", None)
    assert grammars.compiled(Grammar("regex", "[a-z]{2}")).result() is not None
    assert prepared._process.poll() is None


@pytest.mark.parametrize("breaks", [None, ImportError("no xgrammar here")])
def test_the_tokens_are_read_before_steps_are_timed(monkeypatch, tmp_path, breaks):
    """Their reading holds the interpreter: it neither counts among what steps take nor delays those of answers."""
    began: list[str] = []

    def slow_table(*about):
        time.sleep(0.5)
        began.append("tokens read")
        if breaks:
            raise breaks
        return token_table(*about)

    def timed(*about):
        began.append("steps timed")
        return measure_cost(*about)

    measure_cost = start.measure_cost
    monkeypatch.setattr(start, "measure_cost", timed)
    monkeypatch.setattr(start, "known_cost", lambda path, measure, check: measure())
    monkeypatch.setattr("tidar_core.engine.grammars.token_table", slow_table)
    load_engine(EngineConfig(str(tiny_checkpoint(tmp_path)), "none", "float32", "cpu"), for_grammars=True)
    assert began[:2] == ["tokens read", "steps timed"]
