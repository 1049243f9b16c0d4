"""The token rule: exact for every row by itself, the same S as transformers, and samples of the right distribution."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.tidar_core.sampling.kept import kept_scores
from tidar_core.request import SamplingParams
from tidar_core.sampling import picking
from tidar_core.sampling.philox import NoiseKey, gumbel_all
from tidar_core.sampling.picking import pick_tokens, unpacked
from tidar_core.sampling.token_rule import NO_TOKEN, TokenRule

VOCAB = 49152
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1)
KINDS = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, temperature=0.8, top_k=50, top_p=0.95),
    replace(SAMPLED, temperature=0.8, top_p=0.95),
    replace(SAMPLED, temperature=3.0, top_p=0.9),  # flat: S is most of the vocabulary
    replace(SAMPLED, temperature=1.3, min_p=0.05),
    replace(SAMPLED, temperature=1.1, top_k=2000, min_p=0.001),
    replace(SAMPLED, temperature=0.7, top_k=5),
    replace(SAMPLED, temperature=1e-6, top_p=0.5),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def gaussian(rows: int, vocab: int, spread: float = 4.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def rules_for(params: Sequence[SamplingParams]) -> list[TokenRule]:
    """One rule a row, each with its own seed and position; every third row with banned ids."""
    return [
        TokenRule(replace(one, seed=1000 + row), position=10 * row, banned=(0, 7) if row % 3 == 0 else ())
        for row, one in enumerate(params)
    ]


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers' warpers make of the logits, in the order in which `generate` applies them."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits.float())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores


def undecided(scores: Tensor, params: SamplingParams) -> int:
    """How many tokens of one row of z lie within rounding of the border of top-p or min-p."""
    ordered = scores.double().sort().values
    if params.top_k:
        ordered = ordered[ordered >= ordered[-min(params.top_k, len(ordered))]]
    tail = ordered.softmax(0).cumsum(0)
    near = ((tail - (1 - params.top_p)).abs() < 2e-6).sum() if params.top_p < 1 else 0
    relative = (ordered - ordered[-1]).exp()
    return int(near) + int(((relative - params.min_p).abs() < 2e-6 * params.min_p).sum())


def assert_same_tokens_kept(logits: Tensor, found: Tensor, params: SamplingParams) -> None:
    """One row of `kept_scores` ([vocab]) against the warpers.

    The same scores as a multiset, since among equals at top-p's border transformers keeps any, and of those the
    lowest ids. Where exact arithmetic puts tokens on a border, rounding may decide about them either way.
    """
    expected = warped(logits[None], params)[0]
    scaled = logits.float() / params.temperature
    ours, theirs = (one[one > -torch.inf].sort(descending=True).values for one in (found, expected))
    assert abs(len(ours) - len(theirs)) <= undecided(scaled, params)
    common = min(len(ours), len(theirs))
    assert common > 0
    assert torch.equal(ours[:common], theirs[:common])
    kept = found > -torch.inf
    assert torch.equal(found[kept], scaled[kept])
    dropped = (~kept & (scaled == ours[-1])).nonzero()
    assert not len(dropped) or dropped.min() > (found == ours[-1]).nonzero().max()


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test of counts against probabilities; cells that expect under 5 are put together."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    rest, expected_rest = counts[small].sum(), expected[small].sum()
    counts, expected = counts[~small].double(), expected[~small]
    if expected_rest >= 5:
        counts, expected = torch.cat([counts, rest.double()[None]]), torch.cat([expected, expected_rest[None]])
    else:
        assert rest <= 25
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0, dtype=torch.double), statistic / 2).item()


# Bit for bit, whatever the batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_know_its_batch(dtype: torch.dtype) -> None:
    logits = gaussian(17, VOCAB).to(dtype)
    rules = rules_for([KINDS[row % len(KINDS)] for row in range(17)])
    before = logits.clone()
    torch.set_num_threads(1)
    picks, kept = pick_tokens(logits, rules), kept_scores(logits, rules)
    assert torch.equal(logits, before)
    assert picks.dtype == torch.int64
    shuffled = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in range(17):
            alone, rule = logits[row : row + 1], rules[row : row + 1]
            assert pick_tokens(alone, rule).tolist() == [picks[row]]
            assert torch.equal(kept_scores(alone, rule)[0], kept[row])
        mixed = [rules[row] for row in shuffled]
        assert torch.equal(pick_tokens(logits[shuffled], mixed), picks[shuffled])
        assert torch.equal(kept_scores(logits[shuffled], mixed), kept[shuffled])


@pytest.mark.parametrize("params", KINDS[1:])
def test_how_many_candidates_are_tried_changes_nothing(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widening lists of candidates find what sorting everything finds, with ties everywhere."""
    logits = torch.cat([gaussian(3, 9000, spread).mul(4).round().div(4) for spread in (0.5, 2.0, 6.0)])
    rules = rules_for([params] * len(logits))
    picks, kept = pick_tokens(logits, rules), kept_scores(logits, rules)
    monkeypatch.setattr(picking, "_WIDTHS", ())
    assert torch.equal(pick_tokens(logits, rules), picks)
    assert torch.equal(kept_scores(logits, rules), kept)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_batch_equals_its_rows(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 40))
    params = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    logits = gaussian(len(params), vocab, seed=data.draw(st.integers(0, 999))).round()
    rules = rules_for(params)
    alone = [pick_tokens(logits[row : row + 1], rules[row : row + 1]) for row in range(len(params))]
    assert torch.equal(pick_tokens(logits, rules), torch.cat(alone))


# Greedy


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    logits = gaussian(6, VOCAB).clamp(max=12.0).to(dtype)
    first = []
    for row, places in enumerate([(5, 6), (100, 40000), (0, 49151), (24575, 24576), (49150, 49151), (31, 32, 33)]):
        logits[row, list(places)] = 12.5
        first.append(places[0])
    assert pick_tokens(logits, [TokenRule(GREEDY, 0)] * 6).tolist() == first
    assert pick_tokens(logits[3:4], [TokenRule(GREEDY, 0)]).tolist() == first[3:4]


def test_banned_ids_are_never_picked() -> None:
    logits = gaussian(len(KINDS), 100)
    best = logits.argsort(descending=True)[:, :3]
    rules = [
        TokenRule(params, row, banned=(*best[row].tolist(), 100, -1))  # ids that are no tokens do no harm
        for row, params in enumerate(KINDS)
    ]
    for seed in range(20):
        seeded = [replace(rule, params=replace(rule.params, seed=seed)) for rule in rules]
        picks = pick_tokens(logits, seeded)
        assert not (picks[:, None] == best).any()
    assert kept_scores(logits, rules).gather(1, best).max() == -torch.inf
    assert pick_tokens(logits, rules)[0] == logits[0].argsort(descending=True)[3]


@pytest.mark.parametrize("params", KINDS)
def test_logits_are_left_as_they_are(params: SamplingParams) -> None:
    logits = gaussian(3, 100)
    before = logits.clone()
    rules = [TokenRule(params, row, banned=(1, 2, 3)) for row in range(3)]
    pick_tokens(logits, rules)
    kept_scores(logits, rules)
    assert torch.equal(logits, before)


# What S keeps


@pytest.mark.parametrize("params", KINDS[1:])
def test_keeps_what_transformers_keeps(params: SamplingParams) -> None:
    logits = torch.cat([gaussian(3, VOCAB, spread, seed) for seed, spread in enumerate((1.0, 2.5, 4.0))])
    found = kept_scores(logits, [TokenRule(params, 0)] * len(logits))
    assert all(undecided(row / params.temperature, params) < 10 for row in logits)
    for row in range(len(logits)):
        assert_same_tokens_kept(logits[row], found[row], params)


@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=60)
    | st.lists(st.sampled_from([-1.0, 0.0, -0.0, 0.5, 2.0, -torch.inf]), min_size=2, max_size=60),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 65),
    top_p=st.just(1.0) | st.floats(0.01, 0.999) | st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9]),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=500, deadline=None)
def test_keeps_what_transformers_keeps_for_any_logits(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = torch.tensor([values])
    if logits.max() == -torch.inf:
        return
    rule = TokenRule(params, position=3)
    found = kept_scores(logits, [rule])[0]
    assert_same_tokens_kept(logits[0], found, params)
    noisy = found + gumbel_all(NoiseKey.build([seed], [3], [0], torch.device("cpu")), len(values))[0]
    assert pick_tokens(logits, [rule]).item() == int(np.argmax(noisy.numpy()))


def test_ties_at_the_border_of_top_k_all_stay() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, 1500] = 5.0
    kept = kept_scores(logits, [TokenRule(replace(SAMPLED, top_k=2), 0)])
    assert (kept > -torch.inf).all()
    logits[0, 3] = 2.0
    kept = kept_scores(logits, [TokenRule(replace(SAMPLED, top_k=2), 0)])
    assert (kept[0] > -torch.inf).nonzero().flatten().tolist() == [3, 1500]


@pytest.mark.parametrize(("top_p", "count"), [(0.75, 3), (0.5, 2), (0.25, 1), (0.26, 2)])
def test_top_p_on_its_border_keeps_no_more_than_it_needs(top_p: float, count: int) -> None:
    params = replace(SAMPLED, top_p=top_p)
    logits = torch.tensor([[1.0, -9999.0, 1.0, 1.0, 1.0]])
    kept = (kept_scores(logits, [TokenRule(params, 0)]) > -torch.inf)[0].nonzero().flatten().tolist()
    assert kept == [0, 2, 3, 4][:count]
    assert (warped(logits, params) > -torch.inf).sum() == count


@pytest.mark.parametrize("params", [replace(SAMPLED, temperature=1e-38), replace(SAMPLED, top_p=1e-20)])
def test_extreme_parameters_still_pick_the_best(params: SamplingParams) -> None:
    logits = gaussian(4, 500)
    assert torch.equal(pick_tokens(logits, rules_for([params] * 4)), pick_tokens(logits, rules_for([GREEDY] * 4)))


# Bad numbers


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None])
def test_a_broken_row_is_named_and_disturbs_no_other(vocab: int, dtype: torch.dtype, bad: float | None) -> None:
    params = [one for one in KINDS for _ in range(2)]
    logits = gaussian(len(params), vocab).to(dtype)
    rules = rules_for(params)
    picks, kept = pick_tokens(logits, rules), kept_scores(logits, rules)
    assert (picks >= 0).all()
    if bad is None:
        logits[::2] = -torch.inf
    else:
        logits[::2, vocab // 2] = bad
    after, kept_after = pick_tokens(logits, rules), kept_scores(logits, rules)
    assert (after[::2] == NO_TOKEN).all()
    assert torch.equal(after[1::2], picks[1::2])
    assert (kept_after[::2] == -torch.inf).all()
    assert torch.equal(kept_after[1::2], kept[1::2])


def test_minus_infinity_only_excludes() -> None:
    logits = torch.full((len(KINDS), 3000), -torch.inf)
    logits[:, 1234] = -3.0
    assert pick_tokens(logits, rules_for(KINDS)).tolist() == [1234] * len(KINDS)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 2 rules"):
        pick_tokens(torch.zeros(1, 5), [TokenRule(GREEDY, 0)] * 2)
    with pytest.raises(ValueError, match="vocabulary of 0 tokens"):
        pick_tokens(torch.zeros(1, 0), [TokenRule(GREEDY, 0)])
    assert pick_tokens(torch.zeros(0, 5), []).shape == (0,)


# Distribution

SEEDS = 12000


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        replace(SAMPLED, temperature=0.8, top_k=50, top_p=0.95),
        replace(SAMPLED, temperature=1.5, top_p=0.9),
        replace(SAMPLED, temperature=2.0, min_p=0.02),
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position", "choice"])
def test_picks_follow_the_distribution(params: SamplingParams, varied: str) -> None:
    logits = gaussian(1, 300, 2.0)
    expected = kept_scores(logits, [TokenRule(params, 0)]).softmax(-1)[0]
    numbers = range(SEEDS)
    if varied == "position":
        rules = [TokenRule(params, number) for number in numbers]
    else:
        rules = [TokenRule(replace(params, **{varied: number}), 17) for number in numbers]
    counts = pick_tokens(logits.expand(SEEDS, -1), rules).bincount(minlength=300)
    assert counts[expected == 0].sum() == 0
    assert p_value(counts, expected) > 1e-3


@pytest.mark.parametrize("other", [{"seed": 1}, {"choice": 1}, {"position": 1}])
def test_picks_are_independent_across_seeds_choices_and_positions(other: dict[str, int]) -> None:
    """The pair of two picks from the same logits follows the product of their distributions."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, 0.2, 0.9]])
    step = dict(other)
    moved = step.pop("position", 0)
    rules = [TokenRule(replace(SAMPLED, seed=2 * number), 4) for number in range(SEEDS)]
    shifted = [
        TokenRule(
            replace(rule.params, seed=rule.params.seed + step.get("seed", 0), choice=step.get("choice", 0)), 4 + moved
        )
        for rule in rules
    ]
    first, second = (pick_tokens(logits.expand(SEEDS, -1), one) for one in (rules, shifted))
    probabilities = logits.softmax(-1)[0]
    pairs = (first * 6 + second).bincount(minlength=36)
    assert p_value(pairs, (probabilities[:, None] * probabilities).flatten()) > 1e-3


@pytest.mark.parametrize("distance", [0.1, 0.4, 1.0])
def test_the_same_noise_couples_close_distributions(distance: float) -> None:
    """Daliri, Musco, Suresh (arXiv 2408.07978): equal with probability at least (1 - TV) / (1 + TV)."""
    target = gaussian(1, 200, 2.0)
    guess = target + gaussian(1, 200, distance, seed=1)
    variation = (target.softmax(-1) - guess.softmax(-1)).abs().sum().item() / 2
    rules = [TokenRule(replace(SAMPLED, seed=number), 9) for number in range(SEEDS)]
    held = (pick_tokens(target.expand(SEEDS, -1), rules) == pick_tokens(guess.expand(SEEDS, -1), rules)).double().mean()
    bound = (1 - variation) / (1 + variation)
    error = (bound * (1 - bound) / SEEDS) ** 0.5
    assert bound - 4 * error < held < 1 - variation + 4 * error
    by_chance = (target.softmax(-1) * guess.softmax(-1)).sum()
    assert held > by_chance + 0.2


def test_a_draft_under_greedy_holds_where_the_best_token_agrees() -> None:
    logits = gaussian(5, 100)
    kept = kept_scores(logits, [TokenRule(GREEDY, 0)] * 5)
    assert torch.equal((kept > -torch.inf).nonzero()[:, 1], logits.argmax(-1))
    assert torch.equal(kept[kept > -torch.inf], logits.amax(-1))


def test_ids_outside_the_vocabulary_ban_nothing() -> None:
    logits = torch.arange(8.0).repeat(2, 1)
    outside = TokenRule(SamplingParams(max_tokens=1, temperature=0.0), 0, banned=(-1, 8, 10**9))
    assert pick_tokens(logits, [outside, replace(outside, banned=(7,))]).tolist() == [7, 6]


@given(st.integers(1, 5), st.integers(1, 90), st.integers(0, 2**32 - 1))
def test_masks_are_unpacked_on_a_device_as_on_the_host(rows: int, count: int, seed: int) -> None:
    packed = np.random.default_rng(seed).integers(0, 256, (rows, -(-count // 8)), dtype=np.uint8)
    expected = np.unpackbits(packed, axis=1, count=count, bitorder="little")
    assert np.array_equal(unpacked(torch.from_numpy(packed), count).numpy(), expected)
