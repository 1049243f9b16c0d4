"""Calls that take for ever: who waits for them, for how long, and what becomes of the answers that asked."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import xgrammar

from tests.tidar_core.engine.test_grammar import GRAMMARS, following, prompts
from tests.tidar_core.engine.test_slow_grammars import closing_at_once
from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.engine import Engine, constraint, timed_calls
from tidar_core.engine.constraint import CROWDED, TOO_SLOW, GrammarState
from tidar_core.engine.grammars import USUAL_BYTES, may_take_long
from tidar_core.engine.timed_calls import Crowded, Late, TimedCalls
from tidar_core.grammar.grammar import Grammar, choice_grammar


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"), max_running=64, threads=1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Opens what hangs; nothing waits long for that."""
    monkeypatch.setattr(timed_calls, "LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(timed_calls, "WAITS", 200)  # others may take the processor
    opened = threading.Event()
    yield opened
    opened.set()


def spin(gate: threading.Event) -> None:
    while not gate.is_set():
        pass


def hang_at(monkeypatch: pytest.MonkeyPatch, gate: threading.Event, hangs: Callable[[str, Any], bool]) -> list[Any]:
    """Lets the calls hang that `hangs` is true of, by name and argument; returns those arguments as they come."""
    begun: list[Any] = []
    for name in ("accept_token", "fill_next_token_bitmask"):
        native = getattr(xgrammar.GrammarMatcher, name)

        def call(matcher: Any, argument: Any, name: str = name, native: Any = native) -> Any:
            if hangs(name, argument):
                begun.append(argument)
                spin(gate)
            return native(matcher, argument)

        monkeypatch.setattr(xgrammar.GrammarMatcher, name, call)
    return begun


def test_nobody_waits_for_what_is_late(gate: threading.Event) -> None:
    calls = TimedCalls()
    assert calls.call(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0)
    for late in range(timed_calls.MOST_LATE):
        assert calls.crowded == (late >= timed_calls.CROWDED_FROM)
        with pytest.raises(Late):
            calls.call(lambda: spin(gate))
    with pytest.raises(Crowded):
        calls.call(lambda: 1)
    gate.set()
    until = time.monotonic() + 10
    while calls.crowded and time.monotonic() < until:
        time.sleep(0.01)
    assert calls.call(lambda: 2) == 2
    assert not calls.crowded


def test_of_one_thing_one_call_is_late(gate: threading.Event) -> None:
    """As of many choices of one request, which all come to the same token in one step."""
    calls, grammar, other, begun = TimedCalls(), object(), object(), []

    def hang(what: str) -> None:
        begun.append(what)
        spin(gate)

    for what, needed in (("a guess", False), ("what is needed", True)):
        for _ in range(20):
            with pytest.raises(Late):
                calls.call(partial(hang, what), grammar, speculative=not needed)
            assert calls.call(lambda: 1, other) == 1
        if not needed:
            assert calls.call(lambda: 1, grammar) == 1, "no guess holds it up"
    assert begun == ["a guess", "what is needed"]


def test_guesses_take_no_place_of_what_is_needed(gate: threading.Event) -> None:
    """Else drafts of some answers would end others."""
    calls = TimedCalls()
    for late in range(timed_calls.MOST_LATE):
        with pytest.raises(Late) as caught:
            calls.call(lambda: spin(gate), object(), speculative=True)
        assert isinstance(caught.value, Crowded) == (late >= timed_calls.CROWDED_FROM)
    assert not calls.crowded
    assert calls.call(lambda: 1, object()) == 1


def test_a_look_at_drafts_that_turns_slow_ends_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was kept that could take the matcher's place."""
    state, (one, _, x) = states(engine, TimedCalls())
    state._apart = False
    accept = xgrammar.GrammarMatcher.accept_token
    asked: list[int] = []

    def noted(matcher: Any, token: int) -> bool:
        asked.append(token)
        monkeypatch.setattr(constraint, "QUICK_SECONDS", -1.0 if asked == [one] else 60.0)
        return bool(accept(matcher, token))

    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", noted)
    monkeypatch.setattr(constraint, "QUICK_SECONDS", 60.0)
    masks = state.masks([one, one, x])
    assert asked == [one]
    assert [mask is not None and bool(mask.any()) for mask in masks] == [True, False, False, False]
    assert not state.guesses
    assert (state.advance([one]), state.error) == (1, None)


def test_what_was_late_since_others_computed_may_be_asked_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    state, (one, _, x) = states(engine, TimedCalls(), "[0-9]{1,2}x")
    hangs, native = [True], xgrammar.GrammarMatcher.accept_token

    def once(matcher: Any, token: int) -> bool:
        if token == x and hangs:
            hangs.clear()
            monkeypatch.setattr(timed_calls, "WAITS", 4)
            gate.wait()
        return bool(native(matcher, token))

    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", once)
    assert state.advance([one]) == 1
    masks = state.masks([x])
    monkeypatch.setattr(timed_calls, "WAITS", 200)
    assert masks[1] is not None
    assert not masks[1].any()
    assert (state.advance([x]), state.error) == (1, None)


def test_a_thread_ends_with_whom_it_works_for() -> None:
    calls = TimedCalls()
    thread = calls.call(threading.current_thread)
    assert thread is calls.call(threading.current_thread)
    del calls
    thread.join(10)
    assert not thread.is_alive()


def states(engine: Engine, calls: TimedCalls, expression: str = "[0-9]{2}x") -> tuple[GrammarState, list[int]]:
    compiled = engine._compiling._grammars.compiled(Grammar("regex", expression)).result()
    tokens = [engine.tokenizer.encode(text)[0] for text in "11x"]
    return GrammarState(compiled, [2, 0], engine.info.vocab_size, calls, apart=True), tokens


@pytest.mark.parametrize("kind", ["accept_token", "fill_next_token_bitmask"])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_what_is_late_ends_an_answer_at_the_same_token_with_drafts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, kind: str, behind: int
) -> None:
    """kind: which call hangs, behind so many tokens."""
    state, tokens = states(engine, TimedCalls())
    asked_of = [state]
    begun = hang_at(
        monkeypatch,
        gate,
        lambda name, _: name == kind and len(asked_of[0]._emitted) + len(asked_of[0]._guessed) == behind,
    )

    def answered(state: GrammarState, drafts: bool) -> tuple[int, str | None]:
        asked_of[0] = state
        emitted = 0
        while state.error is None and emitted < len(tokens):
            ahead = tokens[emitted:-1] if drafts else []
            masks = state.masks(ahead)
            asked = next((row for row, mask in enumerate(masks) if mask is not None and not mask.any()), len(masks))
            emitted += state.advance(tokens[emitted : emitted + asked])
        return emitted, state.error

    one_by_one = answered(state, drafts=False)
    assert one_by_one == (behind + (kind == "accept_token"), TOO_SLOW)
    assert answered(states(engine, TimedCalls())[0], drafts=True) == one_by_one
    assert len(begun) == 2, "what was late behind drafts is not tried again"


def test_a_late_draft_costs_its_guesses_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    calls = TimedCalls()
    state, (one, _, x) = states(engine, calls, "[0-9]{1,2}x")
    expected = states(engine, calls, "[0-9]{1,2}x")[0]
    hang_at(monkeypatch, gate, lambda name, token: name == "accept_token" and token == x)
    assert state.advance([one]) == expected.advance([one]) == 1
    assert state.guess(one)
    assert not state.guess(x)
    assert not state.guess(one), "nothing is guessed any more"
    state.forget(1)
    (mask,), (same,) = state.masks(()), expected.masks(())
    assert mask is not None
    assert (mask == same).all()
    assert (state.advance([one]), state.error) == (1, None)


def test_what_takes_long_once_is_not_waited_for_without_a_limit_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    state, (one, _, _) = states(engine, TimedCalls())
    state._apart = False
    monkeypatch.setattr(constraint, "QUICK_SECONDS", 0.0)
    state.masks(())
    hang_at(monkeypatch, gate, lambda name, _: name == "accept_token")
    assert (state.advance([one]), state.error) == (1, TOO_SLOW)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_drafts_that_are_given_up_change_no_token(engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    chosen = prompts(3, seed=17)
    plain = following(GRAMMARS[kind], max_tokens=40, drafts="off")
    expected = [(answer.tokens, answer.finish) for answer in answer_all(engine, chosen, [plain] * 3)]
    monkeypatch.setattr(constraint, "AHEAD_SECONDS", 0.0)
    drafted = following(GRAMMARS[kind], max_tokens=40)
    assert [(answer.tokens, answer.finish) for answer in answer_all(engine, chosen, [drafted] * 3)] == expected


def test_while_calls_are_late_nothing_begins_that_may_be(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [following(closing_at_once(3), max_tokens=20), following(GRAMMARS["schema"], max_tokens=20)]
    expected = answer_all(engine, prompts(2), chosen)
    monkeypatch.setattr(timed_calls, "CROWDED_FROM", 0)
    refused, other = answer_all(engine, prompts(2), chosen)
    assert refused.finish is not None
    assert (refused.tokens, refused.finish.error) == ([], CROWDED)
    assert refused.finish.param is None, "the client is not at fault, and may try again"
    assert (other.tokens, other.finish) == (expected[1].tokens, expected[1].finish)
    monkeypatch.undo()
    assert answer_all(engine, prompts(2), chosen)[0].tokens == expected[0].tokens


@pytest.mark.parametrize(
    ("grammar", "slow"),
    [
        (closing_at_once(3), True),
        (Grammar("ebnf", 'root ::= "7" root "0"? | "8"'), True),
        (Grammar("regex", "(7(0?){0,900}){2}"), True),
        (Grammar("regex", r"[0-9]{4}-[0-9]{2}(\.[a-z]+)*"), False),
        (Grammar("regex", "a" * (USUAL_BYTES + 1)), True),
        (Grammar("json_schema", r'{"type": "string", "pattern": "^(0?)\u007b0,900}$"}'), True),
        (Grammar("structural_tag", '{"format": {"type": "gramm\\u0061r", "grammar": "root ::= \\"a\\""}}'), True),
        (GRAMMARS["schema"], False),
        (GRAMMARS["object"], False),
        (choice_grammar(["yes", "no"]), False),
    ],
    ids=range(10),
)
def test_which_grammars_may_take_long(grammar: Grammar, slow: bool) -> None:
    assert may_take_long(grammar) == slow
