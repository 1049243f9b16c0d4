"""The policy drafts where rows are cheap and drafts hold, and leaves it where they are not."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tidar_core.engine.draft_policy import (
    Acceptance,
    DraftPolicy,
    SequenceView,
    StepCost,
    best_shape,
    candidate_shapes,
    outcome_probabilities,
)
from tidar_core.layout import Shape

ROWS = (4, 16, 64)
FLAT = StepCost(ROWS, (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), (0.0, 0.0, 0.0))
STEEP = StepCost(ROWS, (1.0, 4.0, 16.0), (0.1, 0.4, 1.6), (0.1, 0.4, 1.6))
HOLDS = (0.8, 0.7, 0.6)

chances = st.lists(st.floats(0, 1), min_size=1, max_size=7)


@given(chances)
def test_outcomes_are_a_distribution(holds):
    probabilities = outcome_probabilities(holds, len(holds))
    assert len(probabilities) == len(holds) + 1
    assert min(probabilities) >= 0
    assert abs(sum(probabilities) - 1) < 1e-9


def test_free_rows_buy_full_drafting_and_dear_rows_none():
    assert best_shape(FLAT, HOLDS, 4, 1, 0) == Shape(3, (1, 2, 3, 4), 4)
    assert best_shape(STEEP, (0.3, 0.2, 0.1), 4, 16, 0) == Shape()


def test_drafts_that_never_hold_are_not_verified():
    assert best_shape(STEEP, (0.0, 0.0, 0.0), 4, 4, 0) == Shape()


def simulated_rate(cost: StepCost, holds: tuple[float, ...], shape: Shape) -> float:
    """Tokens per second of one sequence that runs `shape`, by walking its two states until they settle."""
    if not shape.proposals:
        return 1.0 / cost.seconds(1, 0, 0)
    chance = outcome_probabilities(holds, shape.drafts)
    hit = sum(chance[a - 1] for a in shape.proposals)
    in_hand = 0.5
    for _ in range(500):
        in_hand = 0.5 * (in_hand + in_hand * hit + (1 - in_hand))
    tokens = in_hand * sum(a * p for a, p in enumerate(chance, 1)) + (1 - in_hand)
    picked = shape.block - 1
    seconds = in_hand * cost.seconds(shape.verify_rows, shape.mask_rows, picked)
    return tokens / (seconds + (1 - in_hand) * cost.seconds(1, shape.block, picked))


@given(st.tuples(*[st.floats(0.05, 0.95)] * 3), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_candidate_of_a_simulation(holds, steepness):
    trunk = tuple(1.0 + steepness * (rows - 4) / 4 for rows in ROWS)
    cost = StepCost(ROWS, trunk, (0.1, 0.1, 0.1), (0.05, 0.06, 0.1))
    shapes = [Shape(), *(shape for shape, _ in candidate_shapes(holds, 4))]
    best = max(simulated_rate(cost, holds, shape) for shape in shapes)
    assert simulated_rate(cost, holds, best_shape(cost, holds, 4, 1, 0)) >= best * (1 - 1e-6)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=50))
def test_acceptance_stays_between_none_and_all(steps):
    acceptance = Acceptance(3)
    for verified, held in steps:
        acceptance.observe(verified, min(verified, held))
    assert all(0 < chance < 1 for chance in acceptance.holds())


def test_acceptance_learns_and_forgets():
    acceptance = Acceptance(2)
    prior = acceptance.holds()
    for _ in range(500):
        acceptance.observe(2, 1)
    assert acceptance.holds()[0] > 0.9
    assert acceptance.holds()[1] < 0.1
    for _ in range(3000):
        acceptance.fade()
    assert all(abs(a - b) < 0.01 for a, b in zip(acceptance.holds(), prior, strict=True))


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
