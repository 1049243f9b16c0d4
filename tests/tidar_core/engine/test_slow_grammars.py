"""Grammars that take long to follow: who waits for them, and when an answer ends for it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tidar_core.engine.test_grammar import following, prompts
from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import sampled_params
from tidar_core.engine import Engine, constraint, grammars, timed_calls, turns
from tidar_core.engine.constraint import TOO_SLOW, GrammarState, only_token
from tidar_core.engine.grammars import may_take_long
from tidar_core.engine.scheduler import Scheduler
from tidar_core.engine.turns import Turns
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import FinishReason, Request

# Compiles at once, but every letter can be read in more ways than the one before.
AMBIGUOUS = "((a{1,100}){1,100}){1,100}"

TWO_RULES = Grammar("ebnf", "root ::= digit{200,}\ndigit ::= [0-9]")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"), max_running=64, threads=1)


def test_what_is_slow_ahead_ends_guessing_and_not_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = engine._compiling._grammars.compiled(Grammar("regex", "[0-9]{2}x")).result()
    state = GrammarState(compiled, [2, 0], engine.info.vocab_size)
    one, x = (engine.tokenizer.encode(text)[0] for text in "1x")
    assert state.guess(one)
    monkeypatch.setattr(constraint, "GUESSING_SECONDS", 0.0)
    assert state.mask() is not None
    state.forget(1)
    assert state.error is None
    assert not state.guess(one)
    behind = state.masks((one, one, x))[2]
    assert only_token(behind) == x
    assert state.advance([one, one, x]) == 3
    assert state.error is None


@pytest.mark.parametrize("slow", range(7))
def test_what_is_too_slow_ends_an_answer_at_the_same_token_with_drafts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """slow: which of the questions to the matcher takes far too long; in both ways they come in the same order."""
    compiled = engine._compiling._grammars.compiled(Grammar("regex", "[0-9]{2}x")).result()
    tokens = [engine.tokenizer.encode(text)[0] for text in "11x"]
    far = 2 * constraint.SLOWEST_SECONDS * constraint.SLOW_TOKENS
    questions = [mark for number in range(7) for mark in (0.0, far * (number == slow))]

    def answered(runs: list[list[int]]) -> tuple[int, str | None]:
        state, clock = GrammarState(compiled, [2, 0], engine.info.vocab_size), iter(questions)
        emitted = 0
        for run in runs:
            # Drafts are asked about first, and once they held what they were asked is not asked again.
            monkeypatch.setattr(constraint.time, "thread_time", lambda: next(clock, 0.0))
            state.masks(run[:-1] if len(runs) > 1 else run)
            if len(run) > 1:
                monkeypatch.setattr(constraint.time, "thread_time", lambda: 0.0)
            emitted += state.advance(run)
            if state.error is not None:
                break
        return emitted, state.error

    one_by_one = answered([[token] for token in tokens])
    assert answered([tokens]) == one_by_one
    assert slow == 6 or one_by_one[1] == constraint.TOO_SLOW, "the seventh is what would come behind the end"


def test_what_takes_long_once_ends_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = engine._compiling._grammars.compiled(Grammar("regex", "1*")).result()
    (one,) = engine.tokenizer.encode("1")
    state = GrammarState(compiled, [2, 0], engine.info.vocab_size)
    # A mask and a step a token.
    clock = iter([mark for question in range(400) for mark in (0.0, 1.0 if question == 41 else 0.001)])
    monkeypatch.setattr(constraint.time, "thread_time", lambda: next(clock))
    for token in range(200):
        state.masks(())
        assert state.advance([one]) == 1
        assert (state.error, state.seconds > 0.5) == (None, token == 20)


def test_a_grammar_with_too_many_readings_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(1, seed=13)
    (letter,) = engine.tokenizer.encode("a")
    plain = sampled_params(150, "full")
    bias = ((letter, 100.0),)
    expected = answer_all(engine, [prompt], [plain])[0]
    monkeypatch.setattr(constraint, "SLOWEST_SECONDS", 0.01)
    ambiguous = following(Grammar("regex", AMBIGUOUS), logit_bias=bias, max_tokens=800, drafts="off")
    slow, other = answer_all(engine, [prompt] * 2, [ambiguous, plain])
    assert (slow.finish.reason, slow.finish.param) == (FinishReason.ERROR, "grammar")
    assert "too many readings" in slow.finish.error
    assert (other.tokens, other.finish) == (expected.tokens, expected.finish)


def closing_at_once(alternatives: int) -> Grammar:
    """Every "7" opens a level, and one "8" closes all of them, in each way in which they opened: that takes (levels
    times alternatives) squared."""
    levels = " | ".join(f'"7" s t{i}' for i in range(alternatives))
    tails = "\n".join(f't{i} ::= "" | "{i % 7}" t{i}' for i in range(alternatives))
    return Grammar("ebnf", f'root ::= s\ns ::= {levels} | "8"\n{tails}')


def test_a_token_that_takes_seconds_fails_its_answer_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "LIMIT_SECONDS", 0.2)
    (prompt,) = prompts(1, seed=16)
    seven, eight = (engine.tokenizer.encode(text)[0] for text in "78")
    plain = sampled_params(60, "full")
    (expected,) = answer_all(engine, [prompt], [plain])
    closing = following(closing_at_once(1000), logit_bias=((eight, 100.0),), max_tokens=80)
    engine.submit(Request("slow", prompt, closing, emitted=(seven,) * 60))
    engine.submit(Request("plain", prompt, plain))
    said: dict[str, list[int]] = {"slow": [], "plain": []}
    finish = None
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
            if output.request_id == "slow" and output.finish is not None:
                finish = output.finish
                assert len(engine._compiling._timed_calls._still_late()) == 1, "it was waited for"
    assert finish is not None
    assert (finish.reason, finish.error, finish.param) == (FinishReason.ERROR, TOO_SLOW, "grammar")
    assert said == {"slow": [eight], "plain": list(expected.tokens)}
    until = time.monotonic() + 60
    # Else the call may end amid Python's own end.
    while engine._compiling._timed_calls._still_late() and time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.parametrize("grammar", [Grammar("regex", "[0-9]{200,}"), TWO_RULES], ids=["here", "aside"])
def test_what_was_emitted_elsewhere_is_read_between_the_others_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    """However long that takes: it ends nothing, and nobody waits for all of it."""
    assert may_take_long(grammar) is (grammar is TWO_RULES)
    (prompt,) = prompts(1, seed=14)
    counted = following(grammar, max_tokens=240)
    (whole,) = answer_all(engine, [prompt], [counted])
    monkeypatch.setattr(grammars, "REPLAY_SECONDS", 1e-3)
    read = GrammarState.replay

    def slow_replay(state: GrammarState, token: int) -> None:
        time.sleep(2e-3)
        read(state, token)

    monkeypatch.setattr(GrammarState, "replay", slow_replay)
    engine.submit(Request("moved", prompt, counted, emitted=whole.tokens[:100]))
    engine.submit(Request("plain", prompt, sampled_params(60, "full")))
    said: dict[str, list[int]] = {"moved": [], "plain": []}
    steps_before = 0
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
        steps_before += not said["moved"]
    assert steps_before > 90
    assert len(said["plain"]) == 60
    assert said["moved"] == whole.tokens[100:]


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_who_sits_out_says_what_it_would_have_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap_steps: bool
) -> None:
    """Few pages, so that some are preempted; one is aborted while it sits out, and another was handed over."""
    engine = tiny_engine(tmp_path, overlap_steps=overlap_steps, cache_tokens=20 * 16, max_model_len=160, threads=1)
    asked = dict(zip("abcd", prompts(4, seed=15), strict=True))
    params = {name: following(Grammar("regex", "[a-z ]{60,}"), max_tokens=60, seed=ord(name)) for name in asked}
    params["d"] = sampled_params(60, "full")
    expected = {name: answer_all(engine, [asked[name]], [params[name]])[0].tokens for name in asked}

    monkeypatch.setattr(turns, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(turns, "TOGETHER_SECONDS", 0.0)
    monkeypatch.setattr(Scheduler, "_plain_seconds", lambda scheduler, count: 0.0)
    sitting_out, idle = Turns.sitting_out, list[frozenset[Any]]()
    monkeypatch.setattr(Turns, "sitting_out", lambda *given: idle.append(sitting_out(*given)) or idle[-1])
    for name in asked:
        engine.submit(Request(name, asked[name], params[name], emitted=expected[name][:20] if name == "c" else ()))
    engine.submit(Request("gone", asked["a"], params["a"]))
    said: dict[str, list[int]] = {"a": [], "b": [], "c": list(expected["c"][:20]), "d": [], "gone": []}
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
        out = {sequence.request.request_id for sequence in idle[-1]}
        if "gone" in out and len(said["gone"]) > 5:
            engine.abort("gone")
    gone = said.pop("gone")
    assert 5 < len(gone) < 60
    assert gone == list(expected["a"][: len(gone)])
    assert said == {name: list(tokens) for name, tokens in expected.items()}
    assert sum(map(bool, idle)) > 30, "they hardly ever sat out"
    assert engine.stats() == replace(engine.stats(), running=0, waiting=0, pages_used=0)
