"""The policy drafts where rows are cheap and drafts hold, and leaves it where they are not."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidar_core.engine.acceptance_rates import AcceptanceRates, outcome_probabilities
from tidar_core.engine.draft_policy import (
    FULL_ROWS,
    DraftChoice,
    DraftPolicy,
    Load,
    SequenceView,
    best_choice,
    best_shape,
    candidate_shapes,
    most_full,
)
from tidar_core.engine.step_cost import StepCost, StepSize
from tidar_core.layout import Shape

ROWS = (4, 16, 64)
FLAT = StepCost(ROWS, (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), (0.0, 0.0, 0.0))
STEEP = StepCost(ROWS, (1.0, 4.0, 16.0), (0.1, 0.4, 1.6), (0.1, 0.4, 1.6))
ACCEPTANCE = (0.8, 0.7, 0.6)

chances = st.lists(st.floats(0, 1), min_size=1, max_size=7)


@given(chances)
def test_outcomes_are_a_distribution(acceptance):
    probabilities = outcome_probabilities(acceptance, len(acceptance))
    assert len(probabilities) == len(acceptance) + 1
    assert min(probabilities) >= 0
    assert abs(sum(probabilities) - 1) < 1e-9


def test_a_cost_describes_itself_in_milliseconds():
    described = StepCost((4, 16), (0.001, 0.0025), (0.1, 0.2), (0.0, 0.0001236)).describe()
    assert described == {
        "rows": [4, 16],
        "trunk_ms": [1.0, 2.5],
        "head_ms": [100.0, 200.0],
        "adapter_ms": [0.0, 0.1236],
    }


def test_free_rows_buy_full_drafting_and_dear_rows_none():
    assert best_choice(FLAT, [ACCEPTANCE], 4, Load(1)) == DraftChoice(Shape(3, (1, 2, 3, 4), 4), 1)
    assert best_choice(STEEP, [(0.3, 0.2, 0.1)] * 16, 4, Load(16)) == DraftChoice()


def test_drafts_that_never_hold_are_not_verified():
    assert best_choice(STEEP, [(0.0, 0.0, 0.0)] * 4, 4, Load(4)) == DraftChoice()


def test_a_prompts_end_proposes_only_where_the_batch_to_come_drafts():
    """Rows are free up to 32 and dear beyond."""
    cost = StepCost((4, 32, 96), (1.0, 1.0, 3.0), (0.1, 0.1, 0.1), (0.0, 0.0, 0.0))
    policy = DraftPolicy(4, cost)
    view = SequenceView("auto", 0, 4)
    assert policy.choose([view], 0)[0].proposals == (1,)
    assert policy.choose([view], 20)[0].proposals == (1,), "rows are free here"
    assert policy.choose([view], 20, coming=31) == [Shape()], "and will not be when all of them decode"
    assert DraftPolicy(4, cost).choose([view] * 32, 0) == [Shape()] * 32


@given(st.integers(0, 400), st.integers(1, 8))
def test_beside_a_prompt_drafts_must_be_worth_what_they_add(prompt_rows, count):
    """Rows are free up to 64; each beyond costs as much as ten plain steps."""
    cost = StepCost((4, 64, 128), (1.0, 1.0, 641.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    policy = DraftPolicy(4, cost)
    shapes = policy.choose([SequenceView("auto", 3, 4)] * count, prompt_rows)
    rows = prompt_rows + sum(shape.verify_rows + shape.mask_rows for shape in shapes)
    assert rows <= 64 or shapes == [Shape()] * count


def simulated_rate(cost: StepCost, acceptance: tuple[float, ...], shape: Shape) -> float:
    """Tokens per second of one sequence that runs `shape`, by walking its two states until they settle."""
    if not shape.proposals:
        return 1.0 / cost.seconds(StepSize(0, 1))
    chance = outcome_probabilities(acceptance, shape.drafts)
    hit = sum(chance[a - 1] for a in shape.proposals)
    in_hand = 0.5
    for _ in range(500):
        in_hand = 0.5 * (in_hand + in_hand * hit + (1 - in_hand))
    tokens = in_hand * sum(a * p for a, p in enumerate(chance, 1)) + (1 - in_hand)
    picked = shape.block - 1
    with_drafts = StepSize(0, shape.verify_rows, shape.mask_rows, picked * len(shape.proposals), picked)
    seconds = in_hand * cost.seconds(with_drafts, hit) if hit else in_hand * cost.seconds(replace(with_drafts, slots=0))
    return tokens / (seconds + (1 - in_hand) * cost.seconds(StepSize(0, 1, shape.block, picked, picked)))


@given(st.tuples(*[st.floats(0.05, 0.95)] * 3), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_candidate_of_a_simulation(acceptance, steepness):
    trunk = tuple(1.0 + steepness * (rows - 4) / 4 for rows in ROWS)
    cost = StepCost(ROWS, trunk, (0.1, 0.1, 0.1), (0.05, 0.06, 0.1))
    shapes = [Shape(), *(shape for shape, _ in candidate_shapes(acceptance, 4))]
    best = max(simulated_rate(cost, acceptance, shape) for shape in shapes)
    assert simulated_rate(cost, acceptance, best_choice(cost, [acceptance], 4, Load(1)).shape) >= best * (1 - 1e-6)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=50))
def test_acceptance_stays_between_none_and_all(steps):
    acceptance = AcceptanceRates([0.55] * 3)
    for verified, held in steps:
        acceptance.observe(verified, min(verified, held))
    assert all(0 < chance < 1 for chance in acceptance.rates())


def test_acceptance_learns_and_forgets():
    acceptance = AcceptanceRates((0.55, 0.55))
    prior = acceptance.rates()
    for _ in range(500):
        acceptance.observe(2, 1)
    assert acceptance.rates()[0] > 0.9
    assert acceptance.rates()[1] < 0.1
    for _ in range(3000):
        acceptance.fade()
    assert all(abs(a - b) < 0.01 for a, b in zip(acceptance.rates(), prior, strict=True))


def test_a_drafters_own_account_is_where_the_policy_begins():
    """Here drafts of two in three are worth their rows, and those of one in two are not."""
    cost = StepCost((1, 8, 64), (1.0, 1.35, 4.15), (0.1, 0.1, 0.1), (0.02, 0.02, 0.02))
    view = SequenceView("auto", 0, 4)
    for expected, drafts in (((), False), ((0.85, 0.8, 0.75), True), ((0.85,), True), ((0.3, 0.2, 0.1), False)):
        policy = DraftPolicy(4, cost, expected)
        assert (policy.choose([view] * 4, 0) != [Shape()] * 4) == drafts, expected
    assert DraftPolicy(4, cost, (0.9, 0.5)).new_acceptance_rates().rates() == (0.9, 0.5, 0.5)
    assert DraftPolicy(3, cost, (0.9, 0.5, 0.4)).new_acceptance_rates().rates() == (0.9, 0.5)


def test_modes_and_limits_are_obeyed():
    policy = DraftPolicy(8, FLAT)
    for mode, in_hand, limit in product(("auto", "off", "full"), (0, 3), (1, 2, 4, 8, 20)):
        (shape,) = policy.choose([SequenceView(mode, in_hand, limit)], 0)
        if mode == "off" or limit == 1:
            assert shape == Shape()
        else:
            assert shape.block <= min(limit, 8)
            assert shape.drafts <= shape.block - 1
        if mode == "full" and limit > 1:
            assert shape.proposals == tuple(range(1, shape.drafts + 2))
            assert shape.block == min(limit, 8)
    assert DraftPolicy(0, FLAT).choose([SequenceView("full", 0, 0)], 0) == [Shape()]


def test_full_drafting_of_a_large_batch_takes_no_more_rows_than_there_is_room_for():
    policy = DraftPolicy(16, FLAT)
    views = [SequenceView("full", 15, 16)] * 128
    shapes = policy.choose(views, 0)
    everything = Shape(15, tuple(range(1, 17)), 16)
    rows = [shape.verify_rows + shape.mask_rows for shape in shapes if shape.block]
    assert set(shapes) == {everything, Shape()}
    assert FULL_ROWS - rows[0] < sum(rows) <= FULL_ROWS
    heard = [view._replace(trusts_drafts=index % 2 == 1) for index, view in enumerate(views)]
    assert policy.choose(heard, 0) == [everything if view.trusts_drafts else Shape() for view in heard]
    assert policy.choose([view._replace(trusts_drafts=True) for view in views], 0) == [everything] * 128
    assert most_full(16, FULL_ROWS) == sum(map(bool, rows))
    narrow = DraftPolicy(16, FLAT, full_rows=600).choose(views, 0)
    assert [bool(shape.block) for shape in narrow] == [True] * 2 + [False] * 126


# Rows are free up to 12 and dear from there on, as where arithmetic overtakes the memory.
STEP = StepCost((1, 12, 13, 64), (1.0, 1.0, 2.0, 10.0), (0.1, 0.1, 0.1, 0.5), (0.0, 0.0, 0.0, 0.0))


def test_where_rows_run_short_the_best_sequences_draft_and_the_others_decode():
    policy = DraftPolicy(4, STEP)
    rates = [policy.new_acceptance_rates() for _ in range(4)]
    for _ in range(100):
        rates[2].observe(3, 3)
        for poor in (rates[0], rates[1], rates[3]):
            poor.observe(3, 0)
    shapes = policy.choose([SequenceView("auto", 3, 4, 0, own) for own in rates], 0)
    assert shapes[2].drafts > 0
    assert [shapes[i] for i in (0, 1, 3)] == [Shape()] * 3


def test_of_equals_those_draft_that_have_drafts_in_hand():
    shapes = DraftPolicy(4, STEP, (0.9,)).choose([SequenceView("auto", 3 * (i == 2), 4) for i in range(4)], 0)
    assert [shape != Shape() for shape in shapes] == [False, False, True, False]


def tokens_per_second(cost: StepCost, load: Load, shape: Shape, chances: Sequence[float], drafting: int) -> float:
    """The rate of a batch of which `drafting` sequences draft: in `shape` while they have drafts in hand, with one
    step (0, {1}, b) after each miss. chances: P(a) for a = 1 … n+1."""
    hit = sum(chances[outcome - 1] for outcome in shape.proposals)
    in_hand = 1.0 / (2.0 - hit)  # of all steps
    tokens = in_hand * sum(outcome * chance for outcome, chance in enumerate(chances, 1)) + 1.0 - in_hand
    seconds = in_hand * step_seconds(cost, load, shape, drafting, 1.0 if load.overlap_steps else hit)
    seconds += (1.0 - in_hand) * step_seconds(cost, load, renewal(shape, load), drafting, 1.0)
    return (drafting * tokens + load.sequences - drafting) / seconds


def renewal(shape: Shape, load: Load) -> Shape:
    """The rows of a step that only brings new drafts."""
    return shape if load.overlap_steps else Shape(0, (1,), shape.block)


def step_seconds(cost: StepCost, load: Load, shape: Shape, drafting: int, hit: float) -> float:
    """A step in which `drafting` sequences run `shape`; each finds its outcome among the proposals with probability
    `hit`."""
    any_hit = 1.0 - (1.0 - hit) ** drafting
    slots = drafting * (shape.block - 1) if shape.proposals else 0
    size = StepSize(
        unscored=load.other_rows,
        verify=load.sequences + drafting * shape.drafts,
        mask=drafting * shape.mask_rows,
        slots=slots * len(shape.proposals),
        picked=slots * hit / any_hit if any_hit else 0.0,
        sequences=load.sequences,
        context=load.context,
    )
    return cost.seconds(size, any_hit)


@given(
    st.tuples(*[st.floats(0.0, 1.0)] * 7),
    st.sampled_from([FLAT, STEEP, replace(STEEP, reading=0.01, attending=0.02, drafting=1.2)]),
    st.sampled_from((2, 3, 4, 8)),
    st.integers(1, 9),
    st.integers(0, 100),
    st.booleans(),
)
def test_all_shapes_at_once_are_priced_as_one_by_one(acceptance, cost, block_limit, sequences, known, overlap_steps):
    load = Load(sequences, known, 200, overlap_steps)
    for drafting in {1, sequences}:
        shape, rate, renewing = best_shape(cost, acceptance, block_limit, load, drafting)
        rates = {
            candidate: tokens_per_second(cost, load, candidate, chances, drafting)
            for candidate, chances in candidate_shapes(acceptance, block_limit)
        }
        assert abs(rate - max(rates.values())) < 1e-9 * rate
        assert abs(rates[shape] - rate) < 1e-9 * rate
        assert abs(step_seconds(cost, load, renewal(shape, load), drafting, 1.0) - renewing) < 1e-9 * renewing


@given(st.tuples(*[st.floats(0.0, 1.0)] * 3), st.integers(1, 9))
def test_a_step_planned_ahead_is_priced_with_all_its_rows(acceptance, sequences):
    """Behind a miss too: drafts are worth less then wherever they may miss, and the same where they cannot."""
    every_row_costs = StepCost((1, 1000), (1.0, 100.0), (0.1, 10.0), (0.1, 10.0))
    for shape, chances in candidate_shapes(acceptance, 4):
        apart, overlapped = (
            tokens_per_second(every_row_costs, Load(sequences, 0, 0, overlap_steps), shape, chances, sequences)
            for overlap_steps in (False, True)
        )
        hit = sum(chances[outcome - 1] for outcome in shape.proposals)
        if hit < 0.99:
            assert overlapped < apart
        else:
            assert overlapped <= apart * (1 + 1e-9)


@given(st.integers(1, 12), st.lists(st.tuples(*[st.floats(0.01, 0.99)] * 3), min_size=12, max_size=12))
def test_the_choice_is_never_worse_than_plain_decoding(sequences, ranked):
    load = Load(sequences, 0, 256)
    choice = best_choice(STEP, ranked[:sequences], 4, load)
    assert choice.drafting <= sequences
    if choice.drafting:
        acceptance = [sum(column) / choice.drafting for column in zip(*ranked[: choice.drafting], strict=True)]
        chances = outcome_probabilities(acceptance, choice.shape.drafts)
        rate = tokens_per_second(STEP, load, choice.shape, chances, choice.drafting)
        assert rate > sequences / STEP.seconds(StepSize(0, sequences, sequences=sequences, context=256))


def test_a_sequence_learns_for_all_and_starts_from_what_all_have_shown():
    policy = DraftPolicy(4, FLAT)
    first = policy.new_acceptance_rates()
    for _ in range(300):
        first.observe(3, 3)
    assert policy.new_acceptance_rates().rates()[0] > 0.9


@pytest.mark.parametrize("new", [False, True])
def test_drafts_that_did_not_hold_get_another_chance(new):
    """new: with the next sequence, whose rates are those of all."""
    policy = DraftPolicy(4, StepCost((1, 8, 64), (1.0, 1.35, 4.15), (0.1, 0.1, 0.1), (0.02, 0.02, 0.02)), (0.85,))
    rates = policy.new_acceptance_rates()

    def drafts(rates):
        return policy.choose([SequenceView("auto", 3, 4, acceptance_rates=rates)], 0) != [Shape()]

    def steps_until(wanted):
        return next(step for step in range(5000) if drafts(policy.new_acceptance_rates() if new else rates) == wanted)

    assert drafts(rates)
    for _ in range(400):
        rates.observe(3, 0)
    assert 0 < steps_until(False) < 50, "a choice stands for some steps"
    assert steps_until(True) > 100


def test_a_long_context_may_be_too_dear_for_drafts():
    cost = replace(FLAT, attending=1e-3)
    for context, drafts in ((100, True), (20_000, False)):
        views = [SequenceView("auto", 3, 4, context)] * 2
        assert (DraftPolicy(4, cost).choose(views, 0) != [Shape()] * 2) == drafts, context


def test_drafting_that_takes_longer_than_the_curves_say_is_left_until_it_had_time_to_change():
    policy = DraftPolicy(4, FLAT)
    view = SequenceView("auto", 3, 4)
    assert policy.choose([view], 0)[0].drafts
    for _ in range(200):
        policy.took(StepSize(0, 1), 1.1)
        policy.took(StepSize(0, 4, 16, 12, 3), 3.6)
    for _ in range(40):
        shapes = policy.choose([view], 0)
    assert shapes == [Shape()]
    for _ in range(2000):
        policy.took(StepSize(0, 1), 1.1)
        shapes = policy.choose([view], 0)
    assert shapes[0].drafts


def walk(policy, steps, seconds_of, acceptance, sequences, random):
    """So many steps of a batch that the policy decides, real ones as long as told: the share of them that drafted, and
    tokens per second."""
    rates, in_hand = [policy.new_acceptance_rates() for _ in range(sequences)], [0] * sequences
    drafted = tokens = seconds = 0
    for _ in range(steps):
        views = [SequenceView("auto", held, 8, 200, own) for held, own in zip(in_hand, rates, strict=True)]
        shapes = policy.choose(views, 0)
        slots = sum(len(shape.proposals) * (shape.block - 1) for shape in shapes if shape.block)
        verify, mask = (sum(getattr(shape, rows) for shape in shapes) for rows in ("verify_rows", "mask_rows"))
        size = StepSize(0, verify, mask, slots, slots, sequences, 200)
        took = seconds_of(size)
        policy.took(size, took)
        drafted += bool(mask)
        seconds += took
        for index, shape in enumerate(shapes):
            outcome = 1
            while outcome <= shape.drafts and random.random() < acceptance:
                outcome += 1
            if shape.drafts:
                rates[index].observe(shape.drafts, outcome - 1)
            in_hand[index] = shape.block - 1 if outcome in shape.proposals else 0
            tokens += outcome
    return drafted / steps, tokens / seconds


GROWING = StepCost((1, 8, 16, 32, 64, 128), (1.0, 1.1, 1.4, 2.2, 4.0, 8.0), (0.1,) * 6, (0.1, 0.1, 0.2, 0.3, 0.6, 1.2))


def off(sequences, times):
    return sequences / (times * GROWING.seconds(StepSize(0, sequences, sequences=sequences, context=200)))


@pytest.mark.parametrize("times", [2.0, 4.0, 8.0])
def test_drafting_is_left_however_much_dearer_than_the_curves_it_is(times):
    """What is learnt of it had a limit, three times the curves: where real steps took five times, it drafted on."""
    policy = DraftPolicy(8, GROWING)

    def real(size):
        return GROWING.seconds(size) * (2.0 * times if size.mask else 2.0)

    assert walk(policy, 1, real, 0.75, 4, Random(1))[0] == 1, "the curves say that drafting pays"
    share, rate = walk(policy, 3000, real, 0.75, 4, Random(2))
    assert share < 0.15
    assert rate > 0.9 * off(4, 2.0)


@pytest.mark.parametrize("times", [1.3, 1.5, 2.0])
def test_that_drafting_is_dear_is_not_forgotten_while_nothing_else_is_seen(times):
    """What plain steps take was taken to be what those with drafts do, after some hundreds of these alone."""
    policy = DraftPolicy(8, GROWING)

    def real(size):
        return GROWING.seconds(size) * (times if size.mask else 1.0)

    walk(policy, 800, real, 0.75, 1, Random(1))
    share, rate = walk(policy, 1500, real, 0.75, 4, Random(2))
    assert share < 0.2
    assert rate > 0.95 * off(4, 1.0)
    alone = walk(DraftPolicy(8, GROWING), 3000, real, 0.75, 1, Random(3))
    assert alone[1] > 0.93 * off(1, 1.0)


@pytest.mark.parametrize(("plain", "drafting"), [(1.0, 1.0), (2.0, 2.0), (2.2, 2.5), (3.0, 3.0)])
def test_drafting_that_pays_goes_on_though_plain_steps_are_tried(plain, drafting):
    policy = DraftPolicy(8, GROWING)

    def real(size):
        return GROWING.seconds(size) * (drafting if size.mask else plain)

    share, rate = walk(policy, 3000, real, 0.75, 1, Random(1))
    assert share > 0.95
    assert rate > 1.4 * off(1, plain)


def test_what_plain_steps_took_on_a_busy_machine_is_not_believed_for_ever():
    """Drafting steps alone, as of one request that is left, never told that plain ones take as long as before."""
    policy, random = DraftPolicy(8, GROWING), Random(1)
    assert walk(policy, 300, lambda size: 3 * GROWING.seconds(size), 0.6, 32, random)[0] < 0.1
    assert policy.cost.plain > 2.5
    assert walk(policy, 2000, GROWING.seconds, 0.6, 1, random)[0] > 0.9
    assert policy.cost.plain / policy.cost.drafting < 1.05
    share, rate = walk(policy, 1000, GROWING.seconds, 0.6, 32, random)
    assert share < 0.1
    assert rate > 0.98 * off(32, 1.0)


def test_a_step_that_others_held_up_counts_little():
    policy = DraftPolicy(8, GROWING)
    policy.took(StepSize(0, 4, 16, 12, 3), 1000.0)
    assert policy.cost.drafting < 1.2
    policy.took(StepSize(0, 4), 1000.0)
    assert policy.cost.plain < 1.2


@given(st.floats(1.0, 300.0), st.floats(0.0, 5e-3))
def test_context_makes_rows_dearer(context, price):
    cost = replace(FLAT, reading=price, attending=price)
    near, far = StepSize(0, 4, sequences=1), StepSize(0, 4, sequences=1, context=context)
    assert abs(cost.seconds(far) - cost.seconds(near) - 5 * price * context) < 1e-6


def test_who_may_draft_less_does_not_hold_others_back():
    for first, second in ((2, 8), (8, 2)):
        policy = DraftPolicy(8, FLAT, (0.95,))
        for limit in (first, second):
            (shape,) = policy.choose([SequenceView("auto", limit - 1, limit)], 0)
            assert shape.block == limit, (first, second)
    shapes = DraftPolicy(8, FLAT, (0.95,)).choose([SequenceView("auto", 7, limit) for limit in (2, 8)], 0)
    assert [(shape.block, shape.drafts) for shape in shapes] == [(2, 1), (8, 7)]
