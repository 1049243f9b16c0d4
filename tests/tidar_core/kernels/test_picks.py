"""The CPU library's picks, and those among a few candidates, against the token rule."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tidar_core.kernels.processors import PROCESSORS, ops_for
from tests.tidar_core.kernels.test_kernels import model_config
from tests.tidar_core.sampling.test_penalties import said
from tests.tidar_core.sampling.test_picking import KINDS, SAMPLED, gaussian, rules_for, undecided
from tidar_core.kernels.ops import Pick
from tidar_core.kernels.rules import pick_listed, rule_numbers
from tidar_core.request import SamplingParams
from tidar_core.sampling.picking import pick_tokens
from tidar_core.sampling.token_rule import NO_TOKEN, TokenRule

CPU = torch.device("cpu")
MIXED = [*KINDS, replace(SAMPLED, temperature=0.6, top_k=20, top_p=0.95), replace(SAMPLED, temperature=1e-40)]


@pytest.fixture(scope="module", params=PROCESSORS)
def pick(request: pytest.FixtureRequest) -> Pick:
    return ops_for(request.param, model_config(), torch.float32).pick


def among_a_few(logits: Tensor, rules: Sequence[TokenRule]) -> tuple[list[int], list[int]]:
    """What is picked among a row's scores when they are those of a few tokens of a large vocabulary, in any order; and
    what the rule picks of that vocabulary."""
    vocab = 5000
    shuffled = [torch.randperm(vocab, generator=torch.Generator().manual_seed(row)) for row in range(len(logits))]
    ids = torch.stack(shuffled)[:, : logits.shape[1]]
    everything = torch.full((len(logits), vocab), -torch.inf).scatter_(1, ids, logits)
    plain = [replace(rule, banned=()) for rule in rules]
    picks = pick_listed(logits, ids, rule_numbers(plain, vocab, CPU))
    return picks.tolist(), pick_tokens(everything, plain).tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.5, 2.5, 8.0])
@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 500, 12_345])
def test_picks_are_those_of_the_token_rule(pick: Pick, vocab: int, spread: float, ties: bool) -> None:
    logits = gaussian(4 * len(MIXED), vocab, spread, seed=vocab)
    logits = logits.mul(2).round().div(2) if ties else logits
    logits[::3, vocab // 2] = -torch.inf
    rules = rules_for(MIXED * 4)
    assert pick(logits, rules).tolist() == pick_tokens(logits, rules).tolist()
    found, expected = among_a_few(logits[:, :32], rules)
    assert found == expected


def test_rows_in_bf16_are_picked_from_by_the_same_noise_as_in_fp32(pick: Pick) -> None:
    """A row that is adjusted brings those beside it to fp32: they must have been picked from as if."""
    logits = gaussian(512, 500, 1.0, seed=4).bfloat16()
    rules = [TokenRule(SamplingParams(1, temperature=3.0, seed=row), position=9) for row in range(512)]
    assert not any(rule.adjusts for rule in rules)
    assert pick(logits, rules).tolist() == pick(logits.float(), rules).tolist()


@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200)
    | st.lists(st.sampled_from([-1.0, 0.0, -0.0, 0.5, 2.0, -torch.inf]), min_size=1, max_size=200),
    temperature=st.just(0.0) | st.floats(0.05, 5.0),
    top_k=st.integers(0, 205),
    top_p=st.just(1.0) | st.floats(0.01, 0.999) | st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9]),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=300, deadline=None)
def test_any_row_is_picked_from_as_the_rule_has_it(
    pick: Pick, values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = torch.tensor([values])
    # What rounding may decide either way is left out.
    assume(not temperature or logits.max() == -torch.inf or not undecided(logits[0] / temperature, params))
    rules = [TokenRule(params, position=3)]
    assert pick(logits, rules).tolist() == pick_tokens(logits, rules).tolist()
    found, expected = among_a_few(logits[:, :32], rules)
    assume(not temperature or logits.max() == -torch.inf or not undecided(logits[0, :32] / temperature, params))
    assert found == expected


def test_scores_that_the_temperature_makes_equal_are_equal(pick: Pick) -> None:
    """Neighbouring numbers over 1.8 round to the same: the lower id is the better one, wherever the larger one is."""
    step = np.nextafter(np.float32(15.0), np.float32(16.0)) - np.float32(15.0)
    values = np.float32(15.0) + step * np.array([0, 1, 2, 3, 1, 0, 2, 4], dtype=np.float32)
    logits = torch.from_numpy(np.concatenate((values, values[::-1]))).repeat(40, 1)
    assert len((logits[0] / 1.8).unique()) < len(logits[0].unique())
    for kept in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.01}, {"min_p": 1.0}):
        rules = [TokenRule(SamplingParams(1, temperature=1.8, seed=seed, **kept), 1) for seed in range(40)]
        assert pick(logits, rules).tolist() == pick_tokens(logits, rules).tolist()


@pytest.mark.parametrize("scale", [1e-36, 1e-38, 1e-40, 1e-43, 1e30])
def test_scores_of_any_size_are_picked_from(pick: Pick, scale: float) -> None:
    """Where numbers are subnormal, or nearly without end; nothing may look for a token for ever."""
    logits = (gaussian(48, 300) * scale).repeat(6, 1)
    kept = [(1, 0.1, 0.0), (5, 0.9, 0.05), (0, 0.5, 0.0), (0, 1.0, 0.99), (40, 1.0, 0.0), (1, 0.999, 0.99)]
    rules = [
        TokenRule(SamplingParams(1, heat, top_k, top_p, min_p, seed=seed), seed)
        for top_k, top_p, min_p in kept
        for seed, heat in enumerate((1.8, 3.0, 100.0, 0.7) * 12)
    ]
    assert pick(logits, rules).tolist() == pick_tokens(logits, rules).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None])
@pytest.mark.parametrize("vocab", [20, 5000])
def test_a_broken_row_is_named_and_disturbs_no_other(pick: Pick, vocab: int, bad: float | None) -> None:
    logits, rules = gaussian(2 * len(MIXED), vocab), rules_for([one for one in MIXED for _ in range(2)])
    whole = pick(logits, rules)
    if bad is None:
        logits[::2] = -torch.inf
    else:
        logits[::2, vocab // 2] = bad
    broken = pick(logits, rules)
    assert (whole >= 0).all()
    assert (broken[::2] == NO_TOKEN).all()
    assert torch.equal(broken[1::2], whole[1::2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", MIXED)
def test_a_candidate_that_is_no_number_is_not_drafted(params: SamplingParams, bad: float) -> None:
    scores, candidates = gaussian(3, 32), torch.arange(32).repeat(3, 1)
    scores[1, 17], scores[2] = bad, -torch.inf
    picks = pick_listed(scores, candidates, rule_numbers([TokenRule(params, 0)] * 3, 5000, CPU))
    assert picks[0] >= 0
    assert picks[1:].tolist() == [NO_TOKEN] * 2


def test_a_row_does_not_know_its_batch(pick: Pick) -> None:
    """Nor how many threads there are, nor how far apart the rows lie."""
    rules = rules_for(MIXED * 2)
    logits = gaussian(len(rules), 9000)
    apart = torch.full((len(rules), 9100), 99.0)
    apart[:, 50:9050] = logits
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            picks = pick(logits, rules)
            assert torch.equal(pick(apart[:, 50:9050], rules), picks)
            assert [pick(logits[row : row + 1], rules[row : row + 1]).item() for row in range(len(rules))] == (
                picks.tolist()
            )
    finally:
        torch.set_num_threads(before)


def test_what_changes_scores_comes_first(pick: Pick) -> None:
    """Banned ids, bias, penalties and grammars; the scores themselves are left as they are."""
    logits = gaussian(4 * len(MIXED), 700)
    best = logits.argmax(1).tolist()
    allowed = np.packbits(np.arange(700) % 5 == 2, bitorder="little")
    changes = [
        lambda rule, row: replace(rule, banned=(best[row], 699, -1, 10**9)),
        lambda rule, row: replace(rule, params=replace(rule.params, logit_bias=((best[row], -40.0), (3, 9.0)))),
        lambda rule, row: replace(
            rule, params=replace(rule.params, repetition_penalty=3.0), history=said([best[row]], [5, 6])
        ),
        lambda rule, row: replace(rule, allowed=allowed),
    ]
    rules = [changes[row % 4](rule, row) for row, rule in enumerate(rules_for([one for one in MIXED for _ in changes]))]
    before = logits.clone()
    picks = pick(logits, rules)
    assert torch.equal(logits, before)
    assert picks.tolist() == pick_tokens(logits, rules).tolist()
    assert (picks[3::4] % 5 == 2).all()


def test_positions_may_lack_what_a_step_under_way_commits(pick: Pick) -> None:
    logits, rules = gaussian(2 * len(MIXED), 300), rules_for(MIXED * 2)
    shift = torch.arange(len(rules)) % 7
    moved = [replace(rule, position=rule.position + int(more)) for rule, more in zip(rules, shift, strict=True)]
    assert pick(logits, rules, shift).tolist() == pick(logits, moved).tolist() == pick_tokens(logits, moved).tolist()
    assert pick(logits, rules, shift).tolist() != pick(logits, rules).tolist()


def test_scores_in_16_bits_are_picked_from_too(pick: Pick) -> None:
    logits, rules = gaussian(len(MIXED), 300).bfloat16(), rules_for(MIXED)
    assert pick(logits, rules).tolist() == pick_tokens(logits, rules).tolist()
