"""Answers that follow a grammar: valid, exact under drafting, and harmless where the grammar is not."""

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.engines import tiny_engine
from tests.tidar_core.schemas import random_schema
from tests.tidar_core.ways import decode_ways
from tidar_core.bench.drive import EngineAnswer, answer_all
from tidar_core.bench.exact import compare_ways, sampled_params
from tidar_core.engine import Engine, grammars
from tidar_core.engine.constraint import GrammarState, allows_beside, only_token
from tidar_core.engine.grammars import Grammars
from tidar_core.grammar.grammar import Grammar, choice_grammar, schema_grammar
from tidar_core.request import FinishReason, Request, RequestError, SamplingParams

SCHEMAS = 200
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "longer tag"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
}
# Compiles for minutes: hundreds of optional strings, each with a bound of its own.
ENDLESS_SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{100 + i}}}[0-9]{{1,{50 + i}}}$"} for i in range(600)},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"), max_running=64, threads=1)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, 512) for _ in range(draw.randint(1, 30))) for _ in range(count)]


def following(grammar: Grammar, **fields: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "top_k": 50, "seed": 3, "drafts": "full"}
    return SamplingParams(grammar=grammar, **(chosen | fields))


def text_of(engine: Engine, answer: EngineAnswer) -> str:
    return str(engine.tokenizer.decode(answer.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def finish_of(engine: Engine, grammar: Grammar, **fields: Any) -> Any:
    (answer,) = answer_all(engine, prompts(1), [following(grammar, **fields)])
    assert answer.finish is not None
    return answer.finish


def test_random_schemas_are_followed_with_drafts(engine: Engine) -> None:
    draw = random.Random(2)
    schemas = [random_schema(draw) for _ in range(SCHEMAS)]
    params = [following(schema_grammar(schema), seed=index) for index, schema in enumerate(schemas)]
    answers = answer_all(engine, prompts(SCHEMAS), params)
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish is not None
        assert answer.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), answer.finish
        if answer.finish.reason is FinishReason.STOP:
            ended += 1
            jsonschema.validate(json.loads(text_of(engine, answer)), schema)
    assert ended > 0.9 * SCHEMAS
    accepted = sum(step.accepted for answer in answers for step in answer.steps)
    drafted = sum(len(step.drafted) for answer in answers for step in answer.steps)
    assert accepted > 0.2 * drafted > 0


GRAMMARS = {
    "schema": schema_grammar(PERSON),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", r"([a-z]{2,5} ){1,8}\\."),
    "ebnf": Grammar("ebnf", 'root ::= sum\nsum ::= term (" + " term)*\nterm ::= [0-9]+ | "(" sum ")"'),
    "choice": choice_grammar(["yes", "no", 'may "be"\n', "größe"]),
}
ADJUSTED = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": ((300, 3.0), (301, -100.0)),
    "min_tokens": 6,
}


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_p": 0.9}, ADJUSTED], ids=["greedy", "sampled", "adjusted"]
)
def test_drafts_and_batch_change_no_token_under_a_grammar(engine: Engine, kind: str, fields: dict[str, Any]) -> None:
    params = following(GRAMMARS[kind], max_tokens=40, **fields)
    ways = decode_ways(engine, prompts(3, seed=4), lambda mode: replace(params, drafts=mode), 3)
    assert all(comparison.different == 0 for comparison in compare_ways(ways))


def test_a_grammar_changes_nothing_for_its_neighbours(engine: Engine) -> None:
    chosen = prompts(6, seed=5)
    plain = [sampled_params(40, mode) for mode in ("off", "auto", "full") * 2]
    alone = [answer.tokens for answer in answer_all(engine, chosen, plain, "alone")]
    mixed = [replace(one, grammar=GRAMMARS["schema"]) if index % 2 else one for index, one in enumerate(plain)]
    beside = [answer.tokens for answer in answer_all(engine, chosen, mixed, "beside")]
    assert beside[::2] == alone[::2]
    assert beside[1::2] != alone[1::2]


def test_preemption_changes_no_token_under_a_grammar(tmp_path: Path, engine: Engine) -> None:
    small = tiny_engine(tmp_path, cache_tokens=6 * 16, max_model_len=96, threads=1)
    chosen = prompts(6, seed=6)
    params = [
        following(GRAMMARS["object"], max_tokens=60, drafts=mode, seed=index)
        for index, mode in enumerate(("off", "auto", "full") * 2)
    ]
    expected = [answer_all(engine, [prompt], [one])[0].tokens for prompt, one in zip(chosen, params, strict=True)]
    for index, (prompt, one) in enumerate(zip(chosen, params, strict=True)):
        small.submit(Request(str(index), prompt, one))
    got: dict[str, list[int]] = {}
    preempted = False
    while small.has_work:
        for output in small.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
        preempted |= any(sequence.generated > 0 for sequence in small._scheduler.waiting)
    assert preempted
    assert [got[str(index)] for index in range(6)] == expected
    assert small.stats().pages_used == 0


def test_a_resumed_answer_goes_on_in_its_grammar(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=7)
    params = following(GRAMMARS["schema"], max_tokens=200)
    (whole,) = answer_all(engine, [prompt], [params])
    assert whole.finish.reason is FinishReason.STOP
    for already in (1, 9, len(whole.tokens) - 1):
        assert run_one(engine, Request("r", prompt, params, tuple(whole.tokens[:already]))) == (
            whole.tokens[already:],
            whole.finish,
        )
    _, finish = run_one(engine, Request("r", prompt, params, (whole.tokens[0], whole.tokens[0])))
    assert (finish.reason, finish.param) == (FinishReason.ERROR, "emitted")


def run_one(engine: Engine, request: Request) -> tuple[list[int], Any]:
    engine.submit(request)
    tokens, finish = [], None
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            finish = output.finish
    return tokens, finish


def test_logprobs_under_a_grammar_are_the_models_own(engine: Engine) -> None:
    (prompt,) = prompts(1, seed=8)
    forced = choice_grammar(["Zwölf Boxkämpfer"])
    for mode in ("off", "full"):
        engine.submit(Request("r", prompt, following(forced, logprobs=2, drafts=mode)))
        entries = []
        while engine.has_work:
            entries += [entry for output in engine.step() for entry in output.logprobs]
        assert len(entries) > 3
        assert all(entry.logprob < -0.01 for entry in entries), "forced, yet not what the model would have said"
        assert any(entry.token != entry.top[0][0] for entry in entries)


@pytest.mark.parametrize("drafts", ["off", "full"])
def test_the_end_comes_where_the_grammar_allows_it(engine: Engine, drafts: Any) -> None:
    (prompt,) = prompts(1, seed=9)

    def answered(grammar: Grammar, **fields: Any) -> tuple[str, Any]:
        (answer,) = answer_all(engine, [prompt], [following(grammar, drafts=drafts, **fields)])
        return text_of(engine, answer), answer.finish

    digits = Grammar("regex", "[0-9]{1,30}")
    short = len(answered(digits, max_tokens=60)[0])
    longer, finish = answered(digits, max_tokens=60, min_tokens=25)
    assert short < 25 <= len(longer) <= 30
    assert finish.reason is FinishReason.STOP
    assert answered(Grammar("regex", "[0-9]{3}"), min_tokens=20) == answered(Grammar("regex", "[0-9]{3}"))
    longer, _ = answered(digits, max_tokens=60, min_tokens=25, ignore_eos=True)
    assert 25 <= len(longer) <= 30
    text, finish = answered(Grammar("regex", "[0-9]{3}"), ignore_eos=True)
    assert (len(text), finish.reason) == (3, FinishReason.STOP)
    (newline,) = engine.tokenizer.encode("\n")
    text, finish = answered(schema_grammar(PERSON), stop_token_ids=frozenset({newline}), ignore_eos=True)
    assert (finish.reason, finish.stop in (0, 2, newline)) == (FinishReason.STOP, True)
    jsonschema.validate(json.loads(text), PERSON)


def test_a_model_without_an_end_of_its_own_stops_with_the_grammar(engine: Engine) -> None:
    compiled = engine._compiling._grammars.compiled(Grammar("regex", "[0-9]{2}")).result()
    state = GrammarState(compiled, [], engine.info.vocab_size)
    one, two = (engine.tokenizer.encode(digit)[0] for digit in "12")
    assert not state.ended
    assert state.advance([one, two, one]) == 2  # nothing belongs to the answer behind its end
    assert (state.ended, state.error) == (True, None)
    assert state.masks(()) == [None]


def test_a_grammar_that_was_forgotten_and_asked_for_again_is_not_dropped(engine: Engine) -> None:
    grammars = Grammars(engine.tokenizer, engine.info.vocab_size, engine.info.eos_ids)
    grammar = Grammar("regex", "[0-9]{7}")
    first = grammars.compiled(grammar)
    first.result()
    del grammars._known[grammar]
    grammars.compiled(grammar)
    grammars.drop(grammar, first)
    assert grammars.compiled(grammar).result() is not None


def test_masks_look_ahead_and_go_back(engine: Engine) -> None:
    compiled = engine._compiling._grammars.compiled(Grammar("regex", "[0-9]{2}x")).result()
    state = GrammarState(compiled, [2, 0], engine.info.vocab_size)
    one, x = (engine.tokenizer.encode(text)[0] for text in "1x")
    before, after, behind, end, idle = state.masks((one, one, x, 2))
    assert [only_token(mask) for mask in (behind, before, after)] == [x, None, None]
    assert not allows_beside(end, (2, 0))
    assert idle is None
    assert allows_beside(end, (2,))
    assert not allows_beside(end, (2, 0, 10**6))
    again = state.masks((one, x, one))
    assert np.array_equal(again[0], before)
    assert np.array_equal(again[1], after)
    assert again[2:] == [None, None]


BAD_GRAMMARS = {
    "regex": (Grammar("regex", "(abc"), "parenthesis"),
    "lookahead": (Grammar("regex", "a(?=b)c"), "Lookahead"),
    "ebnf": (Grammar("ebnf", "root ::= other"), "other"),
    "deep": (Grammar("ebnf", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "Nest"),
    "nothing": (Grammar("ebnf", "root ::= root"), "no token can go on"),
    "type": (schema_grammar({"type": "tuple"}), "tuple"),
    "reference": (schema_grammar({"$ref": "#/$defs/gone"}), "gone"),
    "ambiguous schema": (schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
}


@pytest.mark.parametrize("name", BAD_GRAMMARS)
def test_a_grammar_that_cannot_be_used_fails_alone(engine: Engine, name: str) -> None:
    grammar, said = BAD_GRAMMARS[name]
    finish = finish_of(engine, grammar)
    assert finish.reason is FinishReason.ERROR
    assert finish.param == "grammar"
    assert said in finish.error
    assert "\n" not in finish.error


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine) -> None:
    """The engine's steps never wait for the compiler, and the endless one ends."""
    endless = schema_grammar(ENDLESS_SCHEMA)
    (prompt,) = prompts(1, seed=12)
    plain = sampled_params(150, "off")
    expected = answer_all(engine, [prompt], [plain], "before")[0].tokens
    engine.submit(Request("endless", prompt, following(endless)))
    engine.submit(Request("ends", prompt, following(Grammar("regex", "[a-z]{3}"))))
    engine.submit(Request("aborted", prompt, following(Grammar("regex", "[a-z]{4}"))))
    engine.abort("aborted")
    with pytest.raises(RequestError, match="endless is under way"):
        engine.submit(Request("endless", prompt, plain))
    engine.submit(Request("plain", prompt, plain, cache_salt="during"))
    assert engine.stats().waiting == 3
    tokens: dict[str, list[int]] = {}
    finishes: dict[str, Any] = {}
    steps_alone, slowest = 0, 0.0
    while engine.has_work:
        steps_alone += len(finishes) == 3
        began = time.thread_time()
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish is not None:
                finishes[output.request_id] = output.finish
        slowest = max(slowest, time.thread_time() - began)
    assert tokens["plain"] == expected
    assert list(finishes) == ["aborted", *sorted({"ends", "plain"}, key=list(finishes).index), "endless"]
    assert (finishes["endless"].reason, finishes["endless"].param) == (FinishReason.ERROR, "grammar")
    assert "seconds to compile" in finishes["endless"].error
    assert steps_alone > 50, "each waits a few milliseconds, while the compiler computes for seconds"
    assert slowest < 1.0, "none computes what the compiler should"
    assert engine.stats() == replace(engine.stats(), running=0, waiting=0, pages_used=0)


def test_without_the_package_a_request_is_told_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    fresh = Grammars(engine.tokenizer, engine.info.vocab_size, engine.info.eos_ids)
    with pytest.raises(RequestError, match="xgrammar"):
        fresh.compiled(Grammar("regex", "a")).result()


def test_what_is_kept_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "KEPT", 3)
    kept = engine._compiling._grammars
    for count in range(6):
        kept.compiled(Grammar("regex", f"[a-z]{{{count + 1}}}")).result()
    assert len(kept._known) == 3
    assert Grammar("regex", "[a-z]{6}") in kept._known


def test_a_grammar_is_asked_for_its_size_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It walks all of itself for the answer, while the engine's thread waits."""

    class Sized:
        asked = 0

        @property
        def memory_size_bytes(self) -> int:
            self.asked += 1
            return 1

    fresh, made = Grammars(engine.tokenizer, engine.info.vocab_size, engine.info.eos_ids), []
    monkeypatch.setattr(fresh, "_compile", lambda grammar: made.append(Sized()) or made[-1])
    for _ in range(3):
        for text in "abc":
            fresh.compiled(Grammar("regex", text)).result()
    assert [one.asked for one in made] == [1, 1, 1]


def test_a_stop_token_without_which_a_grammar_cannot_go_on_is_named(engine: Engine) -> None:
    (stop,) = engine.tokenizer("b", add_special_tokens=False)["input_ids"]
    finish = finish_of(engine, Grammar("ebnf", 'root ::= "b"'), stop_token_ids=frozenset({stop}))
    assert finish.reason is FinishReason.ERROR
    assert finish.param == "stop_token_ids"
    assert "but those of stop_token_ids" in finish.error


@pytest.mark.parametrize("completed", [False, True])
def test_no_end_is_allowed_before_the_grammar_is_complete_whatever_its_matcher_says(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, completed: bool
) -> None:
    class Lenient:
        def fill_next_token_bitmask(self, words: torch.Tensor) -> bool:
            words.fill_(-1)
            return False

        def is_completed(self) -> bool:
            return completed

        def is_terminated(self) -> bool:
            return False

    compiled = engine._compiling._grammars.compiled(Grammar("regex", "[a-z]{3}")).result()
    state = GrammarState(compiled, [2, 77], engine.info.vocab_size)
    monkeypatch.setattr(state, "_matcher", Lenient())
    mask = state.mask()
    if completed:
        assert mask is None
        return
    assert mask is not None
    allowed = np.unpackbits(mask, bitorder="little")[: engine.info.vocab_size]
    assert np.flatnonzero(allowed == 0).tolist() == [2, 77]


@given(text=st.text(min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_texts_of_any_kind_are_said_word_for_word(engine: Engine, text: str) -> None:
    """As a choice, as the name of a property and as a constant, whatever characters are in it."""
    (answer,) = answer_all(engine, [(5,)], [following(choice_grammar([text]))])
    assert text_of(engine, answer) == text
    schema = {
        "type": "object",
        "properties": {text: {"const": text}, "bounded": {"type": "string", "minLength": 3, "maxLength": 3}},
        "required": [text, "bounded"],
    }
    (answer,) = answer_all(engine, [(5,)], [following(schema_grammar(schema), max_tokens=500)])
    if answer.finish.reason is FinishReason.STOP:
        jsonschema.validate(json.loads(text_of(engine, answer)), schema)


def test_strings_of_bounded_length_have_no_control_characters_or_surrogates(engine: Engine) -> None:
    """xgrammar would let them in: the random schemas seldom find out."""
    bounded = schema_grammar({"type": "string", "minLength": 1, "maxLength": 9})
    compiled = engine._compiling._grammars.compiled(bounded).result()
    for code in (*range(0x20), ord('"'), ord("\\")):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert not matcher.accept_string(f'"{chr(code)}'.encode() + b"x")
    for code in (0xD800, 0xDBFF, 0xDC00, 0xDFFF):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert not matcher.accept_string(f'"{chr(code)}'.encode("utf-8", "surrogatepass"))
    assert xgrammar.GrammarMatcher(compiled).accept_string('"größe\x7f🙂\ud7ff\ue000"')
