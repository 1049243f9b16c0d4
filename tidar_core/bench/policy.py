"""`tidar bench policy`: what the draft policy's choices are worth, from this machine's step costs and real answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidar_core.bench.drive import answer_all
from tidar_core.bench.real_steps import RealSteps, measure_real_steps
from tidar_core.bench.simulate import Simulated, Trace, compare_settings, mean_acceptance
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert.forward import frozen_base
from tidar_core.convert.held_out import HeldOut, judge_windows
from tidar_core.convert.shards import Kind
from tidar_core.engine import Engine
from tidar_core.model.adapter import default_adapter_for, identify_base, load_trained
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model, from_home
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.request import SamplingParams
from tidar_core.transfer import arithmetic_dtype


@dataclass(frozen=True, slots=True)
class PolicyFound:
    """steps: what real ones take at each batch size. simulated: the settings, by these."""

    steps: tuple[RealSteps, ...]
    simulated: tuple[Simulated, ...]


def run_policy_bench(
    engine: Engine,
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    *,
    batches: Sequence[int],
    max_tokens: int,
    tokens: int,
) -> PolicyFound:
    """Answers the prompts greedily, judges the drafter behind each of their tokens, measures real steps at each batch
    size, and walks the settings through `tokens` tokens. Raises ConfigError where the model has no drafter."""
    if not engine.info.block_length:
        raise ConfigError("the policy has nothing to choose without a drafter: name one with --adapter")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, drafts="off")
    answers = [answer.tokens for answer in answer_all(engine, prompts, [params] * len(prompts))]
    traces = record_traces(engine, config, prompts, answers)
    info = engine.info
    acceptance = mean_acceptance(traces, info.block_length)
    steps = tuple([measure_real_steps(engine, prompts, batch, acceptance) for batch in batches])
    simulated = [
        found
        for real in steps
        for found in compare_settings(
            real.learnt(info.cost), traces, info.block_length, real.batch, tokens, info.expected_acceptance
        )
    ]
    return PolicyFound(steps, tuple(simulated))


def record_traces(
    engine: Engine, config: EngineConfig, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]]
) -> list[Trace]:
    """How far drafts behind each token of the answers hold, all of them computed at once by the trainer's passes, in
    bf16 where the engine keeps weights in fewer bits."""
    source = find_model(config.model)
    model = load_config(source)
    device = torch.device(engine.info.device)
    dtype = arithmetic_dtype(config.dtype)
    weights = load_weights(source, model, dtype, device)
    identity = identify_base(source.name, model, weights, load_tokenizer(source))
    path = default_adapter_for(identity) if config.adapter == "default" else from_home(config.adapter)
    if path is None:
        raise ConfigError("this model drafts by itself, without an adapter: see tidar bench decode")
    adapter = load_trained(path, identity, dtype, device)
    longer = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > 1]
    documents = tuple(
        (np.array([*prompt, *answer]), np.repeat([False, True], [len(prompt), len(answer)]))
        for prompt, answer in longer
    )
    windows = tuple(np.arange(len(prompt), len(prompt) + len(answer)) for prompt, answer in longer)
    own: Kind = "prompt"
    base = frozen_base(model, weights)
    judged = judge_windows(
        base,
        adapter,
        HeldOut(documents, windows, (own,) * len(longer)),
        engine.info.block_length,
        engine.info.form.within_block,
    )
    return [
        Trace(tuple(np.logical_and.accumulate(held[:, 1:], axis=1).sum(1).tolist()), len(prompt))
        for held, (prompt, _) in zip(judged, longer, strict=True)
    ]
