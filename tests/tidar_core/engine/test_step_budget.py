"""The rows of a step: who may have how many, while it is planned."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidar_core.engine.step_budget import RowsBehind, StepBudget, rows_behind
from tidar_core.engine.step_cost import StepCost
from tidar_core.request import Request, SamplingParams, Sequence


def sequences(count: int, tokens: int = 900) -> list[Sequence]:
    return [
        Sequence(Request(f"r{n}", tuple(range(tokens)), SamplingParams(max_tokens=1)), 0.0, [*range(tokens)])
        for n in range(count)
    ]


def behind(rows: int | None) -> RowsBehind | None:
    """So many rows of a prompt in a step, whatever is before them."""
    return None if rows is None else lambda context: rows


@given(
    most=st.integers(1, 40),
    decode=st.integers(0, 6),
    prompt_rows=st.none() | st.integers(1, 60),
    moves=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50), st.booleans())),
)
def test_no_step_has_more_rows_than_it_may_and_all_that_decode_keep_one(
    most: int, decode: int, prompt_rows: int | None, moves: list[tuple[int, int, bool]]
) -> None:
    every = sequences(10)
    budget = StepBudget(most, every[:decode], behind(prompt_rows))
    gone = set()
    for place, wanted, leaves in moves:
        one = every[place]
        if leaves or one in budget.counts:
            budget.drop(one)
            gone.add(one)
        elif count := min(1 if place < decode else wanted, budget.room(one)):
            budget.put(one, count)
        given = {each: count for each, count in budget.counts.items() if each not in every[:decode]}
        kept = [each for each in every[:decode] if each not in gone and each not in budget.counts]
        assert all(budget.room(each) for each in kept) or budget.rows == most
        assert budget.rows == sum(budget.counts.values()) <= most
        assert prompt_rows is None or sum(given.values()) <= prompt_rows


@given(prompt_rows=st.none() | st.just(16), last=st.integers(0, 2))
def test_who_goes_leaves_room_for_others_as_if_never_there(prompt_rows: int | None, last: int) -> None:
    decodes, reads, other = every = sequences(3)
    budget = StepBudget(20, [decodes], behind(prompt_rows))
    rooms = [budget.room(each) for each in every]
    assert rooms == ([20, 19, 19] if prompt_rows is None else [20, 16, 16])
    budget.put(reads, 15)
    assert budget.room(other) == (4 if prompt_rows is None else 1), "one row is kept for who decodes"
    budget.drop(reads)
    assert [budget.room(each) for each in every] == rooms
    assert not budget.counts
    budget.drop(decodes)
    assert budget.room(other) == (20 if prompt_rows is None else 16), "nor is a row kept for who is gone"
    budget.drop(every[last])
    assert budget.rows == 0, "one that is not here is ignored"


def test_a_kept_row_is_had_where_there_is_any() -> None:
    first, second, third = sequences(3)
    budget = StepBudget(2, [first, second, third], None)
    for one, room in ((first, 1), (second, 1), (third, 0)):
        assert budget.room(one) == room
        if room:
            budget.put(one, 1)


@pytest.mark.parametrize(("rows", "room"), [(None, 18), (16, 16)])
def test_who_decodes_takes_no_time_from_prompts(rows: int | None, room: int) -> None:
    first, second, reads = sequences(3)
    budget = StepBudget(20, [first, second], behind(rows))
    budget.put(first, 1)
    assert budget.room(reads) == room


@pytest.mark.parametrize(("rows", "slow"), [(None, False), (20, False), (19, True)])
def test_a_prompt_is_slow_where_time_gives_it_fewer_rows_than_there_are(rows: int | None, slow: bool) -> None:
    (one,) = sequences(1)
    assert StepBudget(20, [], behind(rows)).is_slow(one) is slow


def left(running: list[Any], coming: list[Any], count: int = 100) -> tuple[int, list[int]]:
    """What a prompt of 900 tokens takes, of which a step reads `count`, and the room of the others then."""
    (long,) = sequences(1)
    budget = StepBudget(512, [], behind(100))
    taken = budget.leave(long, count, [long, *running], coming)
    budget.put(long, taken)
    return taken, [budget.room(each) for each in (*running, *coming)]


def test_a_long_prompt_leaves_half_at_most() -> None:
    (short,), (shorter,), as_long = sequences(1, 449), sequences(1, 30), sequences(2)
    assert left([], []) == (100, [])
    assert left([short], []) == (50, [50])
    assert left([shorter], []) == (70, [30])
    assert left([], [shorter]) == (70, [30])
    assert left(as_long[:1], []) == (100, [0])
    assert left(sequences(1, 1), []) == (100, [0]), "who has one row left decodes"
    assert left(sequences(1, 2), []) == (98, [2])
    assert left([], as_long) == (98, [1, 1]), "who comes anew may begin"
    assert left(sequences(1, 450), []) == (100, [0]), "half of its rest is not less"


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_behind_a_long_context_a_row_is_left_even_for_the_shortest_prompt(tokens: int) -> None:
    """There a row takes as long as eight at the beginning: what the shortest want is less than half of one."""
    (long,), (short,) = sequences(1), sequences(1, tokens)
    long.computed = 100
    budget = StepBudget(1000, [], lambda context: 80 if context else 640)
    taken = budget.leave(long, 80, [long], [short])
    budget.put(long, taken)
    assert (taken, budget.room(short)) == (79, tokens)


def test_a_slow_last_point_makes_none_of_those_before_it_slower() -> None:
    """Where another program ran while it was measured. Only beyond it are rows priced by it."""
    cost = StepCost((1, 100, 200, 250), (0.01, 1.0, 2.0, 10.0), (0.0,) * 4, (0.0,) * 4)
    limited = rows_behind(cost, 2.0, 512)
    assert limited is not None
    assert limited(0) == 200
