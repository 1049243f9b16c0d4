"""Minutes of mixed traffic on one engine: does it lose a request, does it grow?"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import psutil

from tidar_core.engine import Engine
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import FinishReason, Request, RequestError, SamplingParams

SETTLING = 60.0  # seconds in which caches fill
SAMPLE_SECONDS = 1.0
AT_ONCE = 12  # requests that are kept under way
LEAVING = 0.003  # chance of a step that somebody leaves


@dataclass(frozen=True, slots=True)
class SoakResult:
    """lost: requests that never ended. wrong: ended in an error. megabytes_a_minute: how the process grew after the
    first minute, by least squares; megabytes: its size at the end."""

    minutes: float
    asked: int
    finished: int
    left: int
    refused: int
    wrong: int
    lost: int
    tokens: int
    pages_owned_at_the_end: int
    megabytes: float
    megabytes_a_minute: float

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def run_soak(
    engine: Engine, prompts: Sequence[tuple[int, ...]], seconds: float, say: Callable[[str], None] = lambda line: None
) -> SoakResult:
    """Sends random requests for so many seconds, some of which leave again or are refused; then finishes what is
    left."""
    draw = random.Random(0)
    process = psutil.Process()
    began = sampled = reported = time.monotonic()
    sizes: list[tuple[float, float]] = []
    under_way: set[str] = set()
    asked = finished = left = refused = wrong = tokens = 0
    while (now := time.monotonic()) - began < seconds or engine.has_work:
        while now - began < seconds and len(under_way) < AT_ONCE:
            asked += 1
            request = _request(f"soak-{asked}", draw, prompts, engine.info.max_model_len)
            try:
                engine.submit(request)
                under_way.add(request.request_id)
            except RequestError:
                refused += 1
        if under_way and draw.random() < LEAVING:
            engine.abort(draw.choice(sorted(under_way)))
        for output in engine.step():
            tokens += len(output.tokens)
            if output.finish is not None:
                under_way.remove(output.request_id)
                left += output.finish.reason is FinishReason.ABORT
                wrong += output.finish.reason is FinishReason.ERROR
                finished += output.finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if now - sampled >= SAMPLE_SECONDS:
            sizes.append((now - began, process.memory_info().rss / 1e6))
            sampled = now
        if now - reported >= SETTLING:
            say(f"{(now - began) / 60:.0f} min: {finished} answers, {tokens} tokens, {sizes[-1][1]:.0f} MB")
            reported = now
    late = np.array([(at / 60, size) for at, size in sizes if at >= min(SETTLING, seconds / 2)])
    growth = float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 2 else 0.0
    return SoakResult(
        minutes=(time.monotonic() - began) / 60,
        asked=asked,
        finished=finished,
        left=left,
        refused=refused,
        wrong=wrong,
        lost=len(under_way),
        tokens=tokens,
        pages_owned_at_the_end=engine.stats().pages_used,
        megabytes=process.memory_info().rss / 1e6,
        megabytes_a_minute=growth,
    )


def _request(name: str, draw: random.Random, prompts: Sequence[tuple[int, ...]], longest: int) -> Request:
    """One visitor of the mix: short and long, greedy and sampled, plain and with everything on; one of many asks for
    what it cannot get."""
    prompt = draw.choice(prompts)
    if draw.random() < 0.1:
        prompt = (prompt * 40)[: draw.randint(300, 1200)]
    most = longest + 1 if draw.random() < 0.01 else draw.choice((1, 8, 32, 96))
    params = SamplingParams(
        max_tokens=most,
        temperature=draw.choice((0.0, 0.0, 0.8)),
        top_p=draw.choice((1.0, 0.95)),
        seed=draw.randrange(1 << 30),
        drafts=draw.choice(("off", "auto", "auto", "full")),
        presence_penalty=draw.choice((0.0, 0.0, 0.0, 0.5)),
        logprobs=draw.choice((None, None, None, 3)),
        stop=draw.choice(((), (), ("\n\n",))),
        grammar=Grammar("json_object", "") if draw.random() < 0.05 else None,
    )
    return Request(name, prompt, params, cache_salt=draw.choice(("", "", str(draw.random()))))
