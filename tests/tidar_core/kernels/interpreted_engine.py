"""The whole engine on the Triton operations, interpreted: the reference's tokens. Run by
`test_triton_interpreted.py`, in a process where TRITON_INTERPRET=1 was set before triton was imported."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.tidar_core.engines import tiny_engine
from tests.tidar_core.model.second_views import second_view_checkpoint
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine, start
from tidar_core.engine.step_cost import StepCost
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.kernels.triton_ops import triton_ops
from tidar_core.model.float8 import rounded
from tidar_core.request import SamplingParams

pytest_plugins = "tests.tidar_core.kernels.interpreter"


def run_on(monkeypatch, make_ops) -> None:
    """Engines on other operations, their warm-up (hundreds of probes) left out."""
    monkeypatch.setattr(start, "ops_for", lambda config, model, dtype, device, report: make_ops(model, dtype, device))
    monkeypatch.setattr(start, "rows_are_exact", lambda *given: True)
    monkeypatch.setattr(start, "known_cost", lambda *given: StepCost((1, 64), (1.0, 1.0), (0.1, 0.1), (0.0, 0.0)))


def engine_on(monkeypatch, directory, architecture: str, make_ops, overlap_steps: bool, kv_dtype: str):
    """A tiny engine on other operations, in float32: the interpreter's products of bfloat16 are wrong."""
    run_on(monkeypatch, make_ops)
    return tiny_engine(directory, architecture, rank=4, overlap_steps=overlap_steps, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("architecture", "overlap_steps", "float8"),
    [
        ("qwen2", False, False),
        ("qwen3", True, False),
        ("llama", False, True),
        ("gemma3_text", True, False),
    ],
)
def test_the_engines_tokens_are_the_references(architecture, overlap_steps, float8, tmp_path, monkeypatch):
    """Prefill, verification, drafts that hold and drafts that fall, with and without a drafter, greedy and sampled;
    with weights and K/V in 8 bits, against numbers rounded to what those say."""
    torch.set_num_threads(1)
    monkeypatch.setattr(start, "fly_once", lambda *given: None)  # the second view's engine flies
    draw = random.Random(1)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, drafts="full", block=3)
    sampled = SamplingParams(max_tokens=4, temperature=1.0, seed=7, ignore_eos=True, drafts="off")
    kept = replace(greedy, max_tokens=6, temperature=0.9, seed=3, top_k=40, top_p=0.9, repetition_penalty=1.1)
    ops = replace(REFERENCE_OPS, pack=rounded) if float8 else REFERENCE_OPS
    settings = overlap_steps, "float8" if float8 else "model"
    reference = engine_on(monkeypatch, tmp_path / "torch", architecture, lambda *given: ops, *settings)
    candidates = [tuple(draw.randrange(3, 512) for _ in range(19)) for _ in range(32)]
    liveliest = max(
        zip(candidates, answer_all(reference, candidates, [greedy] * 32), strict=True),
        key=lambda answered: sum(step.accepted for step in answered[1].steps),
    )[0]
    prompts, params = [liveliest, candidates[0][:3], candidates[1][:5]], [greedy, sampled, kept]
    expected = answer_all(reference, prompts, params)
    engine = engine_on(monkeypatch, tmp_path / "triton", architecture, partial(triton_ops, float8=float8), *settings)
    assert engine._runner.cache.keys.element_size() == (1 if float8 else 4)
    answers = answer_all(engine, prompts, params)
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert [(step.drafted, step.accepted) for step in ours.steps] == [
            (step.drafted, step.accepted) for step in theirs.steps
        ]
    assert sum(step.accepted for step in answers[0].steps) > 0
    assert any(step.accepted < len(step.drafted) for step in answers[0].steps)


def test_a_second_view_drafts_as_on_the_reference(tmp_path, monkeypatch):
    """Mask rows by projections of their own, behind a token that only the device knows."""
    torch.set_num_threads(1)
    path = second_view_checkpoint(tmp_path / "model")
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", overlap_steps=True)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, drafts="full", block=3)
    prompts, said = [(7,), tuple(range(40, 59))], []
    for make_ops in (lambda *given: REFERENCE_OPS, triton_ops):
        run_on(monkeypatch, make_ops)
        answers = answer_all(load_engine(config), prompts, [params] * 2)
        said.append([(answer.tokens, [step.drafted for step in answer.steps]) for answer in answers])
    assert said[0] == said[1]
    assert any(drafted for _, steps in said[0] for drafted in steps)


@pytest.mark.parametrize(("architecture", "float8"), [("qwen3_moe", False), ("qwen2_moe", True)])
def test_a_mixture_of_experts_says_what_it_does_on_the_reference(architecture, float8, tmp_path, monkeypatch):
    """With drafts and without; the second has an MLP for all rows as well, and weights in 8 bits."""
    torch.set_num_threads(1)
    model = tiny_checkpoint(tmp_path / "model", architecture, layers=1)
    adapter = tiny_adapter(tmp_path / "adapter", model, rank=4)
    config = EngineConfig(model=str(model), adapter=str(adapter), dtype="float32", device="cpu")
    drafting = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, drafts="full", block=3)
    params = [drafting, replace(drafting, max_tokens=2, drafts="off")]
    prompts, said = [(7, 40, 11), tuple(range(40, 45))], []
    reference = replace(REFERENCE_OPS, pack=rounded) if float8 else REFERENCE_OPS
    for make_ops in (lambda *given: reference, partial(triton_ops, float8=float8)):
        run_on(monkeypatch, make_ops)
        answers = answer_all(load_engine(config), prompts, params)
        said.append([(answer.tokens, [(step.drafted, step.accepted) for step in answer.steps]) for answer in answers])
    assert said[0] == said[1]
    assert any(drafted for drafted, _ in said[0][0][1])
