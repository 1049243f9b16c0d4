"""Whose turn it is among sequences with slow grammars."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidar_core.engine.turns import SLOW_SECONDS, TOGETHER_SECONDS, Turns


@dataclass(eq=False)
class Running:
    """What `Turns` reads of a sequence."""

    seconds: float
    steps: int = 0
    tokens: tuple[int, ...] = (1, 2)
    computed: int = 1

    @property
    def constraint(self) -> Any:
        return SimpleNamespace(seconds=self.seconds)


def went(turns: Turns, running: list[Any], step: float, now: float) -> tuple[list[Any], float]:
    """Who has rows in a step, and when it is over."""
    out = turns.sitting_out(running, lambda count: step, now)
    goes = [one for one in running if one not in out]
    for one in goes:
        one.steps += 1
    return goes, now + step + sum(one.seconds for one in goes)


SECONDS = st.floats(0.0, 0.3)


@given(seconds=st.lists(SECONDS, min_size=1, max_size=9), step=st.floats(0.005, 0.2))
def test_each_comes_to_its_turn_and_none_holds_the_others_up_for_long(seconds: list[float], step: float) -> None:
    turns, now = Turns(), 0.0
    running = [Running(each) for each in seconds]
    slow = [one for one in running if one.seconds > SLOW_SECONDS]
    while not all(one.steps for one in running):
        goes, now = went(turns, running, step, now)
        assert now < (1 + len(slow)) * (2 * step + 2 * max(TOGETHER_SECONDS, step, *seconds)), "each within one round"
        assert goes
        together = [one for one in goes if one in slow]
        assert len(together) <= 1 or sum(one.seconds for one in together) <= max(TOGETHER_SECONDS, step) + 1e-9
        assert all(one in goes for one in running if one not in slow)


def test_all_that_is_quick_goes_in_every_step() -> None:
    turns, quick = Turns(), [Running(SLOW_SECONDS) for _ in range(20)]
    assert turns.sitting_out(quick, lambda count: 0.001, 0.0) == frozenset()


def test_beside_others_a_slow_one_has_half_of_the_time_at_most() -> None:
    turns, plain, now, spent = Turns(), Running(0.0), 0.0, 0.0
    slow = [Running(0.1) for _ in range(5)]
    while now < 60.0:
        goes, now = went(turns, [plain, *slow], 0.01, now)
        spent += sum(one.seconds for one in goes)
    assert 0.4 < spent / now <= 0.5
    assert max(one.steps for one in slow) - min(one.steps for one in slow) <= 1
    assert plain.steps > 5 * sum(one.steps for one in slow)


def test_alone_slow_ones_do_not_wait_for_nobody() -> None:
    turns, slow, now = Turns(), [Running(0.1) for _ in range(3)], 0.0
    for _ in range(30):
        goes, now = went(turns, slow, 0.01, now)
        assert len(goes) == 1
    assert [one.steps for one in slow] == [10, 10, 10]


def test_what_took_long_once_is_waited_for_once() -> None:
    turns, plain, now = Turns(), Running(0.0), 0.0
    spike, other = Running(5.0), Running(0.02)
    goes, now = went(turns, [plain, spike, other], 0.01, now)
    assert goes == [plain, spike]
    spike.seconds = 0.001  # it took that, and not what was feared
    assert went(turns, [plain, spike, other], 0.01, now)[0] == [plain, spike]
    assert went(turns, [plain, spike, other], 0.01, now + 0.002)[0] == [plain, spike, other]


def test_what_it_said_before_is_computed_in_every_step() -> None:
    turns, plain, now = Turns(), Running(0.0), 0.0
    again = Running(0.3, computed=0)
    for _ in range(9):
        goes, now = went(turns, [plain, again], 0.01, now)
        assert goes == [plain, again]


def test_nobody_is_kept_who_is_gone() -> None:
    turns, gone = Turns(), [Running(0.1) for _ in range(3)]
    for running in (gone, [], []):
        turns.sitting_out(running, lambda count: 0.01, 0.0)
    assert (turns._line, turns._went) == ([], [])
