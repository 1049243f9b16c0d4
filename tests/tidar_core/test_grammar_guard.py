"""What is said of a grammar whose process ended without an answer: only what the grammar did is put down to it."""

import signal

import pytest

from tests.tiny import tiny_tokenizer
from tidar_core.engine.grammars import Grammars, Guard, PassingError
from tidar_core.grammar import Grammar
from tidar_core.grammar_guard import TOO_SLOW, why_lost
from tidar_core.request import RequestError


@pytest.mark.parametrize(
    ("returncode", "said"),
    [
        (-signal.SIGXCPU, TOO_SLOW),
        (-signal.SIGALRM, TOO_SLOW),
        (-signal.SIGKILL, "too much memory or time"),
        (-signal.SIGSEGV, "it breaks the grammar compiler"),
        (-signal.SIGABRT, "it breaks the grammar compiler"),
        (-signal.SIGTERM, "does not run (signal 15), which is no fault of the grammar"),
        (1, "does not run (exit status 1), which is no fault of the grammar"),
    ],
)
def test_why_a_process_was_lost(returncode, said):
    assert said in why_lost(returncode)


def test_a_process_that_cannot_start_is_not_the_grammars_fault():
    with pytest.raises(PassingError, match="no fault of the grammar"):
        Guard("no table of tokens").problem_with(Grammar("regex", "a"))


def test_a_grammar_whose_process_was_killed_is_tried_again(monkeypatch):
    """As by a kernel that is short of memory: nothing of the grammar's."""
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    ask = Guard._ask

    def killed_once(guard, process, job):
        monkeypatch.undo()
        process.kill()
        return ask(guard, process, job)

    monkeypatch.setattr(Guard, "_ask", killed_once)
    grammar = Grammar("regex", "[a-z]{2}")
    with pytest.raises(PassingError, match="too much memory or time"):
        grammars.compiled(grammar).result()
    assert grammars.compiled(grammar).result() is grammars.compiled(grammar).result()


def test_what_the_compiler_says_of_a_grammar_is_remembered():
    grammars = Grammars(tiny_tokenizer(), 512, (2, 0))
    first = grammars.compiled(Grammar("regex", "(a"))
    with pytest.raises(RequestError, match="cannot be used"):
        first.result()
    assert grammars.compiled(Grammar("regex", "(a")) is first
