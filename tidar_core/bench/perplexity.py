"""What a way of computing does to the model itself: perplexity of given texts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tidar_core.config import ConfigError
from tidar_core.engine import Engine
from tidar_core.request import Request, SamplingParams

LONGEST = 512  # tokens of a text that are looked at


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of all tokens but each text's first. nats: mean negative log-probability."""

    dtype: str
    kv_dtype: str
    texts: int
    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)

    def as_record(self) -> dict[str, object]:
        return {**asdict(self), "perplexity": self.perplexity}


def measure_perplexity(engine: Engine, texts: Sequence[str]) -> Perplexity:
    """Perplexity of texts (their first 512 tokens; shorter ones than two tokens are left out), without a template.
    Raises ConfigError where none is left."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    count, total, asked = 0, 0.0, 0
    for number, text in enumerate(texts):
        tokens = tuple(engine.tokenizer.encode(text)[:LONGEST])
        if len(tokens) > 1:
            engine.submit(Request(str(number), tokens, params))
            asked += 1
    if not asked:
        raise ConfigError("no text has two tokens or more: there is nothing to measure")
    while engine.has_work:
        for output in engine.step():
            count += len(output.prompt_logprobs)
            total -= sum(entry.logprob for entry in output.prompt_logprobs)
    return Perplexity(engine.info.dtype, engine.info.kv_dtype, asked, count, total / max(1, count))
