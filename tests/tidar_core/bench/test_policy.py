"""The simulator of the draft policy: it walks as decoding walks, and nothing beats its oracle."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.engines import prompts, tiny_engine
from tidar_core.bench.drive import answer_all
from tidar_core.bench.policy import record_traces, run_policy_bench
from tidar_core.bench.real_steps import measure_real_steps
from tidar_core.bench.simulate import Trace, compare_settings
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import drafting, load_engine
from tidar_core.engine.step_cost import StepCost
from tidar_core.request import SamplingParams

ROWS = (1, 4, 16, 64)
FREE = StepCost(ROWS, (1.0, 1.0, 1.0, 1.0), (0.1, 0.1, 0.1, 0.1), (0.0,) * 4)
DEAR = StepCost(ROWS, (1.0, 4.0, 16.0, 64.0), (0.1, 0.4, 1.6, 6.4), (0.0,) * 4)
BLOCK = 4

traces = st.lists(
    st.builds(Trace, st.lists(st.integers(0, BLOCK - 1), min_size=3, max_size=60).map(tuple), st.integers(0, 500)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(traces, st.sampled_from([FREE, DEAR]))
def test_nobody_beats_who_knows_what_holds(chosen, cost):
    tokens = sum(len(trace.accepted) - 1 for trace in chosen)
    found = {result.setting: result for result in compare_settings(cost, chosen, BLOCK, 1, tokens)}
    best = found.pop("oracle").tokens_per_second
    assert all(result.tokens_per_second <= best * (1 + 1e-9) for result in found.values())
    assert abs(found["off"].tokens_per_second * cost.trunk[0] * 1.1 - 1) < 1e-9
    assert found["best fixed"].tokens_per_second >= found["off"].tokens_per_second * (1 - 1e-9)


def test_the_policy_finds_what_pays():
    steady = [Trace((3, 1, 2, 3, 0, 2, 3, 1) * 40, 100)]
    hopeless = [Trace((0,) * 320, 100)]
    for batch in (1, 8):
        for cost, chosen in ((FREE, steady), (DEAR, steady), (DEAR, hopeless), (FREE, hopeless)):
            found = {result.setting: result for result in compare_settings(cost, chosen, BLOCK, batch, 2000)}
            assert found["auto"].tokens_per_second > 0.93 * found["best fixed"].tokens_per_second
            assert found["auto"].tokens_per_second > 0.97 * found["off"].tokens_per_second


def test_traces_say_what_decoding_does(tmp_path):
    engine = tiny_engine(tmp_path)
    config = tiny(tmp_path)
    asked = prompts(4, longest=20)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, drafts="full")
    answers = answer_all(engine, asked, [params] * 4)
    recorded = record_traces(engine, config, asked, [answer.tokens for answer in answers])
    held = 0
    for answer, trace in zip(answers, recorded, strict=True):
        place = 0
        for step in answer.steps[1:]:
            if step.drafted:
                assert step.accepted == min(trace.accepted[place], len(step.drafted))
                held += step.accepted
            place += step.accepted + 1
    assert held > 0


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_weights_in_fewer_bits_are_judged_in_bf16(tmp_path, dtype):
    tiny_engine(tmp_path)
    config = EngineConfig(model=str(tmp_path / "model"), adapter=str(tmp_path / "adapter"), dtype=dtype, device="cpu")
    engine = load_engine(config)
    assert record_traces(engine, config, prompts(2, longest=9), [[5, 6, 7], [8, 9, 10]])


def test_the_bench_compares_all_settings_on_a_real_engine(tmp_path):
    engine = tiny_engine(tmp_path)
    found = run_policy_bench(engine, tiny(tmp_path), prompts(2, longest=20), batches=(1, 2), max_tokens=30, tokens=100)
    settings_ = [(result.batch, result.setting) for result in found.simulated]
    names = ["off", "full", "best fixed", "auto"]
    assert settings_ == [*((1, name) for name in [*names, "oracle"]), *((2, name) for name in names)]
    assert all(result.tokens_per_second > 0 for result in found.simulated)
    assert not engine.has_work


def test_what_only_real_steps_cost_is_in_the_prediction(tmp_path, monkeypatch):
    """Drafts that are picked slowly: no curve of warm-up has that."""
    engine, pick = tiny_engine(tmp_path), drafting.pick_drafts
    own = engine._scheduler.policy

    def slow(*given, **named):
        time.sleep(0.05)
        return pick(*given, **named)

    for module in ("engine", "warmup", "flight"):
        monkeypatch.setattr(f"tidar_core.engine.{module}.pick_drafts", slow)
    found = run_policy_bench(engine, tiny(tmp_path), prompts(2, longest=20), batches=(2,), max_tokens=30, tokens=100)
    (real,) = found.steps
    assert real.drafting_seconds > real.picking_seconds > 0.05
    assert real.drafting > 3 * real.plain
    assert real.plain_seconds < 0.05
    full = next(result for result in found.simulated if result.setting == "full")
    assert full.tokens_per_second < 2 * full.tokens_per_step / 0.05
    assert engine._scheduler.policy is own


def test_more_answers_than_the_engine_decodes_at_once_are_one_line(tmp_path):
    engine = tiny_engine(tmp_path, max_running=2)
    with pytest.raises(ConfigError, match="never decodes 3 of these prompts at once"):
        measure_real_steps(engine, prompts(2, longest=20), 3, (0.5, 0.5, 0.5))


def tiny(directory):
    """The config of `tiny_engine`."""
    return EngineConfig(
        model=str(directory / "model"), adapter=str(directory / "adapter"), dtype="float32", device="cpu"
    )
