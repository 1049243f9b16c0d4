"""Tokens per second of one engine, in one process: drafts off, auto and full in turn, at several batch sizes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from tidar_core.bench.drive import EngineAnswer, answer_all, tokens_per_step
from tidar_core.engine import Engine
from tidar_core.request import DraftMode, SamplingParams

TRIES = 4  # a size of step is captured when it comes for the third time: after three rounds alike none is left


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


@dataclass(slots=True)
class _Turns:
    """What a mode did in a round: answers, seconds, and how many graphs were captured."""

    answers: list[EngineAnswer] = field(default_factory=list)
    seconds: float = 0.0
    captured: int = 0

    @property
    def speed(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


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
    """The modes take turns on the same prompts, `batch` after `batch`; each round takes the next prompts. The results
    of a batch size come once all its rounds are over.

    A round answers at least `at_least` prompts, `batch` at a time, by `params`, to the end of sequence or `max_tokens`.
    Time runs from the first request to the last token, prompts included; no prefix is reused across answers. A round in
    which steps were captured as graphs is done again, a few times at most: an engine that has served for a while
    captures none.
    """
    for batch in batches:
        count = -(-at_least // batch) * batch
        found: list[dict[DraftMode, _Turns]] = []
        # On a GPU kernels are compiled in a round before those that count, and steps of very long texts captured.
        for number in range(-1 if engine.info.device == "cuda" else 0, rounds):
            chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
            for attempt in range(TRIES if number >= 0 else 1):
                ordered = modes[:: -1 if number % 2 else 1]
                turns = _take_turns(engine, chosen, batch, ordered, params, f"{batch} {number} {attempt}")
                if not any(one.captured for one in turns.values()):
                    break
            if number >= 0:
                found.append(turns)
        for mode in modes:
            own = [turns[mode] for turns in found]
            yield DecodeResult(
                batch,
                mode,
                median(one.speed for one in own),
                median(turns[mode].speed / turns[modes[0]].speed for turns in found),
                median(tokens_per_step(one.answers) for one in own),
                tuple(round(one.speed, 1) for one in own),
                tuple(one.captured for one in own),
            )


def _take_turns(
    engine: Engine,
    chosen: Sequence[tuple[int, ...]],
    batch: int,
    modes: Sequence[DraftMode],
    params: SamplingParams,
    name: str,
) -> dict[DraftMode, _Turns]:
    turns = {mode: _Turns() for mode in modes}
    for place, first in enumerate(range(0, len(chosen), batch)):
        some = chosen[first : first + batch]
        # A machine's speed drifts: none of the modes always runs behind the others.
        for mode in modes[:: -1 if place % 2 else 1]:
            own = turns[mode]
            asked = [replace(params, drafts=mode, seed=first + index) for index in range(len(some))]
            began, before = time.perf_counter(), engine.captured
            own.answers += answer_all(engine, some, asked, f"{name} {mode} {first}")
            own.seconds += time.perf_counter() - began
            own.captured += engine.captured - before
    return turns
