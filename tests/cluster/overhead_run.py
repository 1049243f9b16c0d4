"""What HTTP and Ray Serve cost beside the bare engine: time to first token, tokens per second, processor time.

The same prompts of HumanEval in the chat template go to an engine in this process and to a server of its own, in turn;
while one works the other is idle. Nothing is read from prefix caches.

For example: python -m tests.cluster.overhead_run --rounds 3
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from tests.servers import Server, running, start
from tidar_core.bench.drive import answer_all
from tidar_core.bench.prompts import chat_prompt, human_eval_prompts
from tidar_core.config import EngineConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.request import Request, SamplingParams

STREAMS, TOKENS, ALONE = 32, 96, 15


@dataclass(frozen=True)
class Figures:
    """first: seconds to the first token of one request alone, each. rate: tokens per second of all streams together.
    processor: seconds that these took of all processors."""

    first: list[float]
    rate: float
    processor: float


def bare(engine: Engine, texts: list[str], salts: Iterator[int]) -> Figures:
    """The engine alone."""
    prompts = [chat_prompt(engine.tokenizer, text) for text in texts]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    first = []
    for prompt in prompts[:ALONE]:
        began = time.perf_counter()
        engine.submit(Request("alone", prompt, params, cache_salt=str(next(salts))))
        while not any(output.tokens for output in engine.step()):
            pass
        first.append(time.perf_counter() - began)
        engine.abort("alone")
        engine.step()
    used, began = processor_of_this(), time.perf_counter()
    answers = answer_all(engine, prompts, [params] * len(prompts), cache_salt=str(next(salts)))
    seconds = time.perf_counter() - began
    return Figures(first, sum(len(answer.tokens) for answer in answers) / seconds, processor_of_this() - used)


def processor_of_this() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def stream(client: httpx.AsyncClient, text: str, salt: int) -> tuple[float, int]:
    """Seconds to the first token, and tokens. The first event of a stream may have no text yet; its last has usage."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True, "cache_salt": str(salt), "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
    return first, tokens


def served(server: Server, texts: list[str], salts: Iterator[int]) -> Figures:
    """The same over HTTP."""

    async def run() -> Figures:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as client:
            first = [(await stream(client, text, next(salts)))[0] for text in texts[:ALONE]]
            salt = next(salts)
            used, began = processor_of_server(server), time.perf_counter()
            streams = await asyncio.gather(*(stream(client, text, salt) for text in texts))
            seconds = time.perf_counter() - began
        return Figures(first, sum(tokens for _, tokens in streams) / seconds, processor_of_server(server) - used)

    return asyncio.run(run())


def processor_of_server(server: Server) -> float:
    total = 0.0
    for process in server.processes():
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    texts, salts = human_eval_prompts(STREAMS), count()
    engine = load_engine(EngineConfig())
    with tempfile.TemporaryDirectory() as scratch, running(start(Path(scratch))) as server:
        bare(engine, texts[:2], salts)
        served(server, texts[:2], salts)
        rounds = [(bare(engine, texts, salts), served(server, texts, salts)) for _ in range(chosen.rounds)]
    tokens = STREAMS * TOKENS
    found = {
        "first_token_ms": {
            "bare": 1e3 * median(one for mine, _ in rounds for one in mine.first),
            "served": 1e3 * median(one for _, theirs in rounds for one in theirs.first),
        },
        "tokens_per_second": {
            "bare": median(mine.rate for mine, _ in rounds),
            "served": median(theirs.rate for _, theirs in rounds),
            "ratio": median(theirs.rate / mine.rate for mine, theirs in rounds),
        },
        # The client's own time is in neither: it is this process, while the server works. Answers that begin at other
        # moments make smaller batches than the bare engine's, and that is in it.
        "microseconds_a_token_outside_the_engine": 1e6
        * median((theirs.processor - mine.processor) / tokens for mine, theirs in rounds),
    }
    print(json.dumps(found, indent=2))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
