"""Words that never come: what a definition, transformers and drafting have to say of it."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.tidar_core.engines import prompts
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.grammar.grammar import choice_grammar
from tidar_core.request import FinishReason, RequestError, SamplingParams
from tidar_core.sampling.bad_words import BadWords

GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
few = st.lists(st.integers(0, 3), max_size=8)
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bad-words") / "model")


@pytest.fixture(scope="module", params=[0, 16], ids=["", "slot head"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    adapter = tiny_adapter(tmp_path_factory.mktemp("drafter") / "adapter", model, slot_head=request.param)
    return load_engine(EngineConfig(str(model), str(adapter), "float32", "cpu"))


@given(words, few, few, few)
def test_the_last_token_of_a_word_is_refused_where_the_others_came(bad, prompt, answer, ahead):
    """In the answer and the drafts behind it; what the prompt ends with counts for nothing."""
    refused = BadWords(bad, len(prompt)).refused(prompt + answer, ahead)
    said = (*answer, *ahead)
    expected = {
        word[-1] for word in bad if len(word) <= len(said) + 1 and word[:-1] == said[len(said) - len(word) + 1 :]
    }
    assert set(refused) == expected
    assert set(BadWords(bad, 0).always) == {word[0] for word in bad if len(word) == 1}


class Slices:
    """How it was done before there was a tree: a slice of the answer for each length that words have."""

    def __init__(self, words: list[tuple[int, ...]], prompt_length: int):
        self.always = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._prompt_length = prompt_length
        self._ends: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for *front, end in words:
            if front:
                self._ends[tuple(front)].add(end)
        self._lengths = sorted({len(front) for front in self._ends})

    def refused(self, tokens: list[int], ahead: list[int]) -> tuple[int, ...]:
        longest = max(self._lengths, default=0)
        answer = (*tokens[max(self._prompt_length, len(tokens) - longest) :], *ahead)
        ends = (self._ends.get(answer[-length:], ()) for length in self._lengths)
        return (*self.always, *(end for found in ends for end in sorted(found)))


@given(words, few, few, few)
def test_they_come_in_the_order_of_the_words_lengths(bad, prompt, answer, ahead):
    """Once each, where slices of an answer that is shorter than they told some again."""
    ours, others = (kind(bad, len(prompt)).refused(prompt + answer, ahead) for kind in (BadWords, Slices))
    assert [*dict.fromkeys(ours)] == [*dict.fromkeys(others)]
    assert len(ours) <= len(others)


class Noted(list[int]):
    """Tokens that count how often one is looked at; to slice them is an error."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        assert isinstance(at, int), "sliced"
        self.looked += 1
        return super().__getitem__(at)


def test_no_more_of_an_answer_is_read_than_words_have_in_common_with_its_end() -> None:
    """A step pays for them with every row."""
    bad = BadWords([*((7,) * length for length in range(2, 1000)), (1, 2, 3, 4)], 10)
    tokens = Noted([5] * 1000 + [1, 2, 3])
    assert bad.refused(tokens) == (4,)
    assert tokens.looked == 4


def said_in(answer: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(answer[place : place + len(word)]) == word for place in range(len(answer)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=20, repetition_penalty=1.1)])
def test_drafts_change_nothing_and_no_word_comes(engine: Engine, params: SamplingParams) -> None:
    """Words of one to three tokens, out of what is said without."""
    asked = prompts(3, seed=8)
    free = [answer.tokens for answer in answer_all(engine, asked, [params] * 3)]
    bad = [
        tuple(tuple(tokens[place : place + length]) for place, length in ((3, 1), (9, 2), (20, 3), (31, 2), (44, 1)))
        for tokens in free
    ]
    held = [replace(params, bad_words=own) for own in bad]
    told = {mode: answer_all(engine, asked, [replace(one, drafts=mode) for one in held]) for mode in ("off", "full")}
    for own, without, off, full in zip(bad, free, told["off"], told["full"], strict=True):
        assert full.tokens == off.tokens != without
        assert not any(said_in(off.tokens, word) for word in own)
    drafted = [token for answer in told["full"] for step in answer.steps for token in step.drafted]
    assert drafted
    assert sum(step.accepted for answer in told["full"] for step in answer.steps) > 0


def test_greedy_answers_are_transformers_own(engine: Engine, model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt in prompts(3, seed=9):
        (free,) = answer_all(engine, [prompt], [GREEDY])
        bad = tuple(tuple(free.tokens[place : place + length]) for place, length in ((0, 1), (5, 2), (12, 3)))
        assert not any(prompt[-len(word) + 1 :] == word[:-1] for word in bad if len(word) > 1), "counts only there"
        (ours,) = answer_all(engine, [prompt], [replace(GREEDY, bad_words=bad, drafts="full")])
        theirs = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            bad_words_ids=[list(word) for word in bad],
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours.tokens == theirs[0, len(prompt) :].tolist()


def test_a_word_that_is_one_token_is_never_drafted(engine: Engine) -> None:
    asked = prompts(2, seed=10)
    free = answer_all(engine, asked, [replace(GREEDY, drafts="full")] * 2)
    often = {token for answer in free for step in answer.steps for token in step.drafted}
    bad = tuple((token,) for token in sorted(often)[::2])
    told = answer_all(engine, asked, [replace(GREEDY, drafts="full", bad_words=bad)] * 2)
    drafted = {token for answer in told for step in answer.steps for token in step.drafted}
    assert drafted
    assert not drafted & {word[0] for word in bad}


def test_a_grammar_that_leaves_nothing_else_has_its_way(engine: Engine) -> None:
    def answered(*bad: str) -> str:
        ids = tuple(tuple(engine.tokenizer.encode(word, add_special_tokens=False)) for word in bad)
        params = replace(GREEDY, grammar=choice_grammar(["left", "right"]), bad_words=ids, ignore_eos=False)
        (answer,) = answer_all(engine, [(5, 6, 7)], [params])
        assert answer.finish.reason is FinishReason.STOP
        return str(engine.tokenizer.decode(answer.tokens, skip_special_tokens=True))

    assert (answered("l"), answered("r")) == ("right", "left")
    assert answered("l", "r", "left", "right", "lef", "le", "ri", "rig") in ("left", "right")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(RequestError, match="a token at least"):
        SamplingParams(4, bad_words=((5,), ()))
    with pytest.raises(RequestError, match="cannot be combined with bad_words"):
        SamplingParams(4, bad_words=((5,),), allowed_token_ids=(5, 6))
