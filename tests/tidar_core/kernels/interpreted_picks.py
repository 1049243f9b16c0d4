"""The token rule's kernels against the rule itself, interpreted. Run by `test_triton_interpreted.py`, in a process
where TRITON_INTERPRET=1 was set before triton was imported."""

from dataclasses import replace

import pytest
import torch

from tests.tidar_core.engine.test_graphs import NothingIsWaitedFor
from tidar_core.kernels import triton_sampling
from tidar_core.kernels.rules import pick_listed, rule_numbers
from tidar_core.request import SamplingParams
from tidar_core.sampling import picking
from tidar_core.sampling.token_rule import NO_TOKEN, Rules, TokenRule

pytest_plugins = "tests.tidar_core.kernels.interpreter"
pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")


RULES = [  # temperature, seed, choice, position
    (0.0, 1, 0, 5), (0.7, 2**63 + 12345, 3, 77), (1.0, 5, 0, 1_000_000), (0.0, 5, 0, 2), (1.0, 5, 0, 2),
    (1.0, 5, 0, 2), (1.0, 5, 0, 2), (1.3, 99, 1, 2**31 + 5), (1e-40, 99, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [511, 4100])
def test_picks_are_those_of_the_token_rule(vocab):
    """Argmax and sampled, ties, NaN, infinities, rows with nothing finite, pieces and a ragged end."""
    logits = 3 * torch.randn(len(RULES) + 2, vocab, generator=torch.Generator().manual_seed(6))
    logits[3] = logits[3].round()
    logits[4, 77], logits[5, -1], logits[6], logits[7, 10:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rules = [
        TokenRule(SamplingParams(max_tokens=9, temperature=heat, seed=seed, choice=choice), position)
        for heat, seed, choice, position in RULES
    ]
    rules.append(TokenRule(SamplingParams(max_tokens=9, temperature=1.0, seed=3, logit_bias=((3, 9.0),)), 4))
    rules.append(TokenRule(SamplingParams(max_tokens=9, temperature=0.0), 4, banned=(int(logits[-1].argmax()),)))
    picks = triton_sampling.pick_tokens(logits, rules)
    assert picks.tolist() == picking.pick_tokens(logits, rules).tolist()
    assert picks[4:7].tolist() == [NO_TOKEN] * 3
    assert triton_sampling.pick_tokens(logits[1:2].half(), rules[1:2]).tolist() == [
        picking.pick_tokens(logits[1:2].half(), rules[1:2]).item()
    ]
    shift = torch.arange(len(rules)) % 4
    moved = [
        replace(rule, position=rule.position + further) for rule, further in zip(rules, shift.tolist(), strict=True)
    ]
    assert triton_sampling.pick_tokens(logits, rules, shift).tolist() == picking.pick_tokens(logits, moved).tolist()
    once = Rules(rules)  # what is kept with them is not changed
    assert triton_sampling.pick_tokens(logits, once, shift).tolist() == picking.pick_tokens(logits, moved).tolist()
    assert triton_sampling.pick_tokens(logits, once).equal(picks)


KEPT = [
    {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}, {"temperature": 3.0, "top_p": 0.9}, {"min_p": 0.05}, {"top_k": 5},
    {"temperature": 1.1, "top_k": 200, "min_p": 0.001}, {"temperature": 1e-6, "top_p": 0.5}, {"top_p": 1e-20},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {},
]  # fmt: skip


def kept_rules(rows):
    """Rules of all kinds in turn, each with its own seed and position."""
    params = [SamplingParams(max_tokens=1, seed=1000 * row, choice=row % 2, **KEPT[row % 10]) for row in range(rows)]
    return [TokenRule(one, 10 * row) for row, one in enumerate(params)]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab", [9, 511, 4100, 9000])
def test_picks_among_what_is_kept_are_those_of_the_token_rule(vocab, rounded):
    """Top-k, top-p and min-p, ties, excluded tokens, broken rows, and several looks at the same row."""
    logits = 3 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = logits.round() if rounded else logits
    logits[::3, 5] = -torch.inf
    logits[4, 7], logits[15, -1], logits[26], logits[37, 3:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rules = Rules(kept_rules(len(logits)))
    picks = triton_sampling.pick_tokens(logits, rules)
    assert picks.tolist() == picking.pick_tokens(logits, rules).tolist()
    assert picks[[4, 15, 26]].tolist() == [NO_TOKEN] * 3
    ids = torch.stack([torch.randperm(9000)[: min(vocab, 32)] for _ in rules])
    with NothingIsWaitedFor():
        further = triton_sampling.pick_tokens(logits, rules, torch.arange(len(rules)))
    moved = [replace(rule, position=rule.position + row) for row, rule in enumerate(rules)]
    assert further.tolist() == picking.pick_tokens(logits, moved).tolist()
    numbers, few = rule_numbers(rules, 9000, CPU), logits[:, :32]
    assert torch.equal(triton_sampling.pick_listed(few, ids, numbers), pick_listed(few, ids, numbers))
