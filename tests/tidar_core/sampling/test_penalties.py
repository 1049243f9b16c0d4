"""Bias and penalties against their definitions, transformers' where it has one."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tidar_core.request import SamplingParams
from tidar_core.sampling.penalties import History, Ledger, penalised
from tidar_core.sampling.picking import pick_tokens
from tidar_core.sampling.token_rule import TokenRule

VOCAB = 12
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20)
scores = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB)


def said(prompt: list[int], answer: list[int]) -> History:
    ledger = Ledger(len(prompt))
    ledger.follow(prompt + answer)
    return ledger.history()


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=4, temperature=0.0, **fields)  # type: ignore[arg-type]


@given(scores, tokens, tokens, st.floats(0.1, 3.0))
def test_repetition_is_transformers_own(row, prompt, answer, penalty):
    ours = penalised(torch.tensor(row), params(repetition_penalty=penalty), said(prompt, answer))
    if not prompt + answer:
        assert ours.tolist() == torch.tensor(row).tolist()
        return
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), torch.tensor([row]))[0]
    torch.testing.assert_close(ours, theirs)


@given(scores, tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_alone(row, prompt, answer, presence, frequency):
    chosen = params(presence_penalty=presence, frequency_penalty=frequency)
    ours = penalised(torch.tensor(row), chosen, said(prompt, answer))
    expected = [x - frequency * answer.count(i) - presence * (i in answer) for i, x in enumerate(row)]
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(tokens, st.lists(tokens, max_size=4), tokens)
def test_a_history_that_grows_is_the_one_of_all_that_was_said(prompt, steps, ahead):
    """In steps of any length, the first perhaps with a part of the answer; drafts ahead count for that once alone."""
    ledger, known = Ledger(len(prompt)), list(prompt)
    for step in steps:
        known += step
        ledger.follow(known)
        ledger.follow(known)
        assert counts(ledger.history(ahead)) == counts(said(prompt, known[len(prompt) :] + ahead))
    ledger.follow(known)
    assert counts(ledger.history()) == counts(said(prompt, known[len(prompt) :]))


def counts(history: History) -> dict[int, float]:
    assert len(set(history.tokens.tolist())) == len(history.tokens)
    return dict(zip(history.tokens.tolist(), history.times.tolist(), strict=True))


def test_bias_moves_single_tokens_and_the_callers_logits_stay():
    logits = torch.zeros(2, VOCAB)
    rules = [TokenRule(params(logit_bias=((7, 5.0), (3, -100.0))), 0), TokenRule(params(), 0)]
    assert pick_tokens(logits, rules).tolist() == [7, 0]
    assert logits.eq(0).all()
    assert pick_tokens(torch.zeros(1, VOCAB).bfloat16(), rules[:1]).tolist() == [7]


@given(
    scores,
    tokens,
    st.sets(st.integers(0, VOCAB - 1), min_size=1).map(sorted).map(tuple),
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=3, unique_by=lambda pair: pair[0]),
)
def test_of_the_tokens_that_are_allowed_scores_are_as_if_all_were(row, answer, allowed, bias):
    chosen = params(logit_bias=tuple(bias), repetition_penalty=1.3, presence_penalty=0.5)
    among_all = penalised(torch.tensor(row), chosen, said([], answer))
    ours = penalised(torch.tensor(row), replace(chosen, allowed_token_ids=allowed), said([], answer))
    others = [token for token in range(VOCAB) if token not in allowed]
    assert ours[list(allowed)].tolist() == among_all[list(allowed)].tolist()
    assert ours[others].eq(-torch.inf).all()
