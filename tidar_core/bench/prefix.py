"""What a known prefix saves: time to first token of a prompt that was seen before but for its end."""

import time
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from statistics import median

from tidar_core.bench.prompts import human_eval_prompts
from tidar_core.config import ConfigError
from tidar_core.engine import Engine
from tidar_core.request import Request, SamplingParams

END_TOKENS = 8  # of a prompt that differ from request to request


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """Medians over prefixes. ratio: second over first. cached: tokens that the second request found."""

    prefix_tokens: int
    rounds: int
    first_seconds: float
    second_seconds: float
    ratio: float
    cached: int

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def measure_prefix(engine: Engine, tokens: int, rounds: int) -> PrefixResult:
    """Seconds to the first token of two requests that share a prefix of `tokens` tokens, `rounds` times anew.

    Raises ConfigError where such a prompt does not fit the engine.
    """
    if tokens + END_TOKENS >= min(engine.info.max_model_len, engine.info.pages * engine.info.page_size):
        raise ConfigError(f"a prefix of {tokens} tokens does not fit {engine.info.max_model_len} positions: take fewer")
    words = chain.from_iterable(engine.tokenizer.encode(text) for text in human_eval_prompts())
    known = tuple(islice(cycle(words), tokens))
    seconds: list[tuple[float, float]] = []
    cached = 0
    for number in range(rounds):
        pair = []
        for turn in range(2):
            end = tuple(engine.tokenizer.encode(f" {number} {turn}"))[:END_TOKENS]
            began = time.perf_counter()
            # Rounds find nothing of one another: a salt keeps their pages apart.
            engine.submit(
                Request(str(turn), known + end, SamplingParams(max_tokens=1, temperature=0.0), cache_salt=str(number))
            )
            while engine.has_work:
                for output in engine.step():
                    pair.append(time.perf_counter() - began)
                    cached = output.trace.cached if output.trace is not None else cached
        seconds.append((pair[0], pair[1]))
    first, second = (median(column) for column in zip(*seconds, strict=True))
    ratio = median(second / first for first, second in seconds)
    return PrefixResult(tokens, rounds, first, second, ratio, cached)
