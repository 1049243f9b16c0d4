"""Answers of every way of decoding, for tests that compare them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from tidar_core.bench.exact import MODES, NEAR_TIE, Comparison, each_way
from tidar_core.engine import Engine
from tidar_core.request import DraftMode, SamplingParams


def decode_ways(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: Callable[[DraftMode], SamplingParams],
    batch: int,
    modes: Sequence[DraftMode] = MODES,
) -> dict[str, list[list[int]]]:
    """The tokens of every prompt in each way (`each_way`)."""
    ways = each_way(engine, prompts, params, batch, modes)
    return {way: [answer.tokens for answer in answers] for way, answers in ways}


@torch.inference_mode()
def rescore(
    model: torch.nn.Module, prompts: Sequence[tuple[int, ...]], ways: dict[str, list[list[int]]]
) -> list[Comparison]:
    """Every way judged by the reference's own scores of its answers, in one pass an answer: equal where each token has
    the best score behind those before it, a near tie where some has all but the best."""

    @cache
    def judged(prompt: tuple[int, ...], answer: tuple[int, ...]) -> str:
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        logits: Tensor = model(ids).logits[0, len(prompt) - 1 :].float()
        behind = logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        return "equal" if not behind.any() else "near tie" if bool((behind <= NEAR_TIE).all()) else "different"

    comparisons = []
    for way, answers in ways.items():
        found = Counter(judged(prompt, tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True))
        comparisons.append(Comparison(way, found["equal"], found["near tie"], found["different"]))
    return comparisons
