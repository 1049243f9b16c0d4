"""Whatever a request asks for, and in whatever company, it is told what it would be told alone and without drafts."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tidar_core.engines import pages_are_accounted_for, prompts, tiny_engine
from tidar_core.engine import Engine, engine, flight
from tidar_core.grammar.grammar import Grammar, choice_grammar
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.request import Finish, FinishReason, Request, SamplingParams, TokenLogprobs

QUESTIONS = prompts(4, seed=31)
LONGEST = 24
GRAMMARS = (Grammar("regex", "([a-z]{1,4} ){1,6}[.]"), choice_grammar(["yes", "no", "yes and no"]))
ENDS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"logit_bias": ((2, 7.0), (300, 3.0))},  # so that the end of sequence comes now and then
    {"stop": (" the", "on"), "ignore_eos": True},
    {"allowed_token_ids": (1, 2, *range(255, 340)), "special_text": True, "stop": ("|im_",)},
    {"stop_token_ids": frozenset(range(259, 300))},
    {"bad_words": (*((token,) for token in range(255, 400)), *((a, b) for a in range(32, 128) for b in range(60, 90)))},
    *({"grammar": grammar} for grammar in GRAMMARS),
)
WISHES = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, LONGEST),
        "temperature": st.sampled_from((0.0, 0.9)),
        "repetition_penalty": st.sampled_from((1.0, 1.3)),
        "min_tokens": st.sampled_from((0, 4, LONGEST)),
        "logprobs": st.sampled_from((None, 3)),
        "seed": st.integers(0, 3),
    },
    optional={
        "choice": st.just(1),
        "top_k": st.sampled_from((5, 40)),
        "top_p": st.just(0.9),
        "min_p": st.just(0.02),
        "frequency_penalty": st.sampled_from((-0.5, 0.6)),
        "prompt_logprobs": st.just(1),
    },
)


@dataclass(slots=True)
class Told:
    """What an engine said to a request from some token on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    of_prompt: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """When a request comes, where a replica that is gone had left its answer (as a share of it), and when it goes."""

    question: int
    wishes: dict[str, Any]
    drafts: dict[str, Any]
    comes: int
    said: float
    goes: int | None


VISITS = st.builds(
    Visit,
    question=st.integers(0, len(QUESTIONS) - 1),
    wishes=st.builds(operator.or_, WISHES, st.sampled_from(ENDS)),
    drafts=st.fixed_dictionaries(
        {"drafts": st.sampled_from(("off", "auto", "full")), "block": st.sampled_from((None, 3))}
    ),
    comes=st.integers(0, 8),
    said=st.sampled_from((0.0, 0.0, 0.3, 0.9)),
    goes=st.none() | st.integers(0, 12),
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """One that has drafts, steps ahead and too few pages, and one that has none of it."""
    folder = tmp_path_factory.mktemp("engines")
    busy = tiny_engine(
        folder / "busy", overlap_steps=True, max_model_len=96, cache_tokens=160, max_running=3, step_rows=24
    )
    alone = tiny_engine(folder / "alone", adapter="none")
    alone._compiling = busy._compiling  # grammars are compiled once
    return busy, alone


def run(server: Engine, visits: dict[str, tuple[Request, int, int | None]]) -> dict[str, Told]:
    told, step = {name: Told() for name in visits}, 0
    while server.has_work or any(comes >= step for _, comes, _ in visits.values()):
        for name, (request, comes, goes) in visits.items():
            if comes == step:
                server.submit(request)
            if goes is not None and comes + goes == step:
                server.abort(name)
        for output in server.step():
            mine = told[output.request_id]
            assert mine.finish is None
            mine.tokens += output.tokens
            mine.logprobs += output.logprobs
            mine.of_prompt += output.prompt_logprobs
            mine.finish = output.finish
        assert pages_are_accounted_for(server)
        step += 1
    assert server.stats().pages_used == 0
    return told


def guesses(answers: Iterable[list[int]]) -> Callable[..., Tensor]:
    """Drafts that often hold: what followed a token the last time it was said. Of another answer, they do not."""
    follows = {token: said[place + 1 :] for said in answers for place, token in enumerate(said)}

    def drafts(runner: Any, slots: GuessedSlots, **_: Any) -> Tensor:
        each = zip(slots.anchors.tolist(), slots.counts, strict=True)
        return torch.tensor([token for anchor, n in each for token in [*follows.get(anchor, []), 3, 3, 3][:n]])

    return drafts


def params_of(wishes: dict[str, Any]) -> SamplingParams:
    fewest = min(wishes.get("min_tokens", 0), wishes["max_tokens"])
    return SamplingParams(**(wishes | {"min_tokens": fewest, "drafts": "off"}))


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(visits=st.lists(VISITS, min_size=2, max_size=5))
def test_no_request_sees_its_company(engines: tuple[Engine, Engine], visits: list[Visit]) -> None:
    busy, alone = engines
    whole, asked = {}, {}
    for number, visit in enumerate(visits):
        name, prompt, params = str(number), QUESTIONS[visit.question], params_of(visit.wishes)
        (whole[name],) = run(alone, {name: (Request(name, prompt, params), 0, None)}).values()
        emitted = tuple(whole[name].tokens[: int(visit.said * len(whole[name].tokens))])
        request = Request(name, prompt, replace(params, **visit.drafts), emitted)
        asked[name] = (request, visit.comes, visit.goes)
    drafts = guesses(answer.tokens for answer in whole.values())
    with patch.object(engine, "pick_drafts", drafts), patch.object(flight, "pick_drafts", drafts):
        told = run(busy, asked)
    for name, mine in told.items():
        before, expected = len(asked[name][0].emitted), whole[name]
        assert mine.finish is not None
        gone = mine.finish.reason is FinishReason.ABORT
        assert mine.tokens == expected.tokens[before:][: len(mine.tokens) if gone else None]
        assert mine.logprobs == expected.logprobs[before:][: len(mine.logprobs) if gone else None]
        if not gone:
            assert mine.finish == expected.finish
        if not before and not gone:
            assert mine.of_prompt == expected.of_prompt
