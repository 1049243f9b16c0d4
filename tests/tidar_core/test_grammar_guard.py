"""What is said of a grammar whose process ended without an answer: only what the grammar did is put down to it."""

import signal

import pytest

from tidar_core.engine.grammars import Guard, PassingError
from tidar_core.grammar import Grammar
from tidar_core.grammar_guard import TOO_SLOW, why_lost


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
