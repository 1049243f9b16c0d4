"""Random traffic over one small engine: requests come, go, share prefixes, take each other's pages, and end. Once one
step at a time, once with the next step planned while one runs."""

import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.tidar_core.engines import pages_are_accounted_for, tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.engine import Engine
from tidar_core.request import DraftMode, FinishReason, Request, SamplingParams

STEPS = 10_000  # that the engine goes through in all, at least
PAGES = 14  # few enough that sequences take each other's
ROUNDS, MOVES = 35, 60  # of the machine

Asked = tuple[tuple[int, ...], SamplingParams]


@dataclass(slots=True)
class Traffic:
    """The engine under test and what every machine that drove it saw. Its pages live on from one to the next."""

    engine: Engine
    alone: Engine
    steps: int = 0
    preempted: int = 0
    reused: int = 0
    finished: int = 0
    overlapped: int = 0
    expected: dict[Asked, list[int]] = field(default_factory=dict)

    def answer(self, asked: Asked) -> list[int]:
        """The request's tokens by plain autoregression, on an engine of its own."""
        if asked not in self.expected:
            prompt, params = asked
            self.expected[asked] = answer_all(self.alone, [prompt], [params])[0].tokens
        return self.expected[asked]


@lru_cache(maxsize=2)
def traffic(overlap_steps: bool) -> Traffic:
    folder, limits = Path(mkdtemp()), {"max_model_len": 112, "max_running": 5, "step_rows": 24}
    busy = tiny_engine(folder / "busy", cache_tokens=PAGES * 16, overlap_steps=overlap_steps, **limits)
    return Traffic(busy, tiny_engine(folder / "alone", adapter="none"))


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[int, ...], ...]:
    """A few prompts, some of which begin alike for one, two or three pages."""
    draw = random.Random(0)
    beginning = tuple(draw.randrange(3, 512) for _ in range(48))
    return tuple(
        beginning[:shared] + tuple(draw.randrange(3, 512) for _ in range(length))
        for shared, length in ((0, 1), (0, 30), (16, 5), (16, 20), (32, 1), (32, 9), (48, 3), (48, 14))
    )


class Visitors(RuleBasedStateMachine):
    """Whatever happens, every request says what it would say alone, and every page is accounted for."""

    overlap_steps = False

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[str, Asked] = {}
        self.said: dict[str, list[int]] = {}
        self.number = 0

    @rule(
        question=st.integers(0, 7),
        mode=st.sampled_from(("off", "auto", "full")),
        temperature=st.sampled_from((0.0, 0.9)),
        most=st.sampled_from((1, 2, 17, 40)),
        seed=st.integers(0, 2),
        top_k=st.sampled_from((0, 0, 0, 5)),
        repetition=st.sampled_from((1.0, 1.0, 1.2)),
        salt=st.sampled_from(("", "tenant")),
        priority=st.sampled_from((0, 0, 0, -1, 2)),
    )
    def ask(
        self,
        question: int,
        mode: DraftMode,
        temperature: float,
        most: int,
        seed: int,
        top_k: int,
        repetition: float,
        salt: str,
        priority: int,
    ) -> None:
        params = SamplingParams(
            max_tokens=most, temperature=temperature, seed=seed, top_k=top_k, repetition_penalty=repetition,
            ignore_eos=True,
        )  # fmt: skip
        name = f"{id(self)}-{self.number}"
        self.number += 1
        self.here[name] = questions()[question], params
        self.said[name] = []
        asked = Request(name, questions()[question], replace(params, drafts=mode), cache_salt=salt, priority=priority)
        traffic(self.overlap_steps).engine.submit(asked)

    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        if not self.here:  # no precondition: how long a request stays depends on the policy, and that on the clock
            return
        name = sorted(self.here)[which % len(self.here)]
        traffic(self.overlap_steps).engine.abort(name)
        traffic(self.overlap_steps).engine.abort(name)
        (output,) = [output for output in self.step() if output.request_id == name]
        assert output.finish is not None
        assert output.finish.reason is FinishReason.ABORT

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> list:
        shared = traffic(self.overlap_steps)
        outputs = shared.engine.step()
        shared.steps += 1
        shared.overlapped += shared.engine._flight is not None
        shared.preempted += any(s.generated for s in shared.engine._scheduler.waiting)
        for output in outputs:
            said = self.said[output.request_id]
            said.extend(output.tokens)
            shared.reused += output.trace is not None and output.trace.cached > 0
            expected = shared.answer(self.here[output.request_id])
            assert said == expected[: len(said)]
            if output.finish is not None:
                aborted = output.finish.reason is FinishReason.ABORT
                assert aborted or said == expected
                shared.finished += not aborted
                del self.here[output.request_id], self.said[output.request_id]
        return outputs

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        engine = traffic(self.overlap_steps).engine
        assert engine._scheduler.pool.total == engine.info.pages == PAGES
        assert pages_are_accounted_for(engine)

    def teardown(self) -> None:
        while traffic(self.overlap_steps).engine.has_work:
            self.step()
            self.every_page_is_accounted_for()
        assert not self.here
        assert traffic(self.overlap_steps).engine._scheduler.pool.owned == 0


class VisitorsAhead(Visitors):
    """The same where the next step is under way before the host knows the last."""

    overlap_steps = True


@pytest.mark.parametrize("visitors", [Visitors, VisitorsAhead])
def test_whatever_happens_every_request_says_what_it_would_alone(visitors: type[Visitors]) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    rounds = settings(
        max_examples=ROUNDS, stateful_step_count=MOVES, deadline=None, suppress_health_check=checks, database=None
    )
    seen = traffic(visitors.overlap_steps)
    while seen.steps < STEPS:
        run_state_machine_as_test(visitors, settings=rounds)
    print(
        f"{seen.steps} steps, {seen.overlapped} with the next under way, {seen.finished} answers, "
        f"{seen.preempted} steps with a preempted one, {seen.reused} hits"
    )
    assert seen.finished > 100
    assert seen.preempted > 10
    assert seen.reused > 10
    assert seen.overlapped > 1000 if visitors.overlap_steps else seen.overlapped == 0
