"""Tokens per second of one engine, in one process: drafts off, auto and full in turn, at several batch sizes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from tidar_core.bench.drive import Answer, answer_all, tokens_per_step
from tidar_core.engine import Engine
from tidar_core.request import DraftMode, SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Medians over the rounds. ratio: tokens per second against drafts off in the same round. captured: how many sizes
    of steps were captured as CUDA graphs in each round, which takes its time."""

    batch: int
    drafts: DraftMode
    tokens_per_second: float
    ratio: float
    tokens_per_step: float
    rounds: tuple[float, ...]
    captured: tuple[int, ...]

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def measure_decode(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    batches: Sequence[int],
    modes: Sequence[DraftMode],
    rounds: int,
    params: SamplingParams,
    at_least: int,
) -> Iterator[DecodeResult]:
    """The modes take turns on the same prompts, `batch` after `batch`; each round takes the next prompts. A batch size
    is told once all its rounds are over.

    A round answers at least `at_least` prompts, `batch` at a time, by `params`, to the end of sequence or `max_tokens`.
    Time runs from the first request to the last token, prompts included; no prefix is reused across answers.
    """
    for batch in batches:
        speeds: dict[DraftMode, list[float]] = {mode: [] for mode in modes}
        steps: dict[DraftMode, list[float]] = {mode: [] for mode in modes}
        captured: dict[DraftMode, list[int]] = {mode: [] for mode in modes}
        count = -(-at_least // batch) * batch
        # On a GPU most sizes are captured in a round before those that count.
        for number in range(-1 if engine.info.device == "cuda" else 0, rounds):
            chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
            answers: dict[DraftMode, list[Answer]] = {mode: [] for mode in modes}
            seconds, new = dict.fromkeys(modes, 0.0), dict.fromkeys(modes, 0)
            for first in range(0, count, batch):
                some = chosen[first : first + batch]
                # A machine's speed drifts: none of the modes always runs behind the others.
                for mode in modes[:: -1 if (number + first // batch) % 2 else 1]:
                    asked = [replace(params, drafts=mode, seed=first + index) for index in range(len(some))]
                    began, before = time.perf_counter(), engine.captured
                    answers[mode] += answer_all(engine, some, asked, f"{batch} {number} {mode} {first}")
                    seconds[mode] += time.perf_counter() - began
                    new[mode] += engine.captured - before
            if number < 0:
                continue
            for mode in modes:
                speeds[mode].append(sum(len(answer.tokens) for answer in answers[mode]) / seconds[mode])
                steps[mode].append(tokens_per_step(answers[mode]))
                captured[mode].append(new[mode])
        plain = speeds[modes[0]]
        for mode in modes:
            yield DecodeResult(
                batch,
                mode,
                median(speeds[mode]),
                median(speed / base for speed, base in zip(speeds[mode], plain, strict=True)),
                median(steps[mode]),
                tuple(round(speed, 1) for speed in speeds[mode]),
                tuple(captured[mode]),
            )
