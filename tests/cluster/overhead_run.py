"""What HTTP and Ray Serve cost beside the bare engine: time to first token, tokens per second, processor time.

The same prompts of HumanEval in the chat template go to an engine in this process and to a server of its own, in turn,
those of one request alone prompt by prompt, since a busy machine is faster in one minute than in the next; while one
works the other is idle. Nothing is read from prefix caches.

For example: python -m tests.cluster.overhead_run --rounds 3

A replica's threads rest sooner than those of an engine alone, and what these wait awake is processor time too: to read
what is spent outside the engine, let both rest alike, with GOMP_SPINCOUNT=1000 before the command.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from tests.servers import Server, running, start
from tidar_core.bench.drive import answer_all
from tidar_core.bench.prompts import human_eval_prompts
from tidar_core.config import EngineConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.model.tokenizer import chat_prompt
from tidar_core.request import Request, SamplingParams

STREAMS, TOKENS, ALONE = 32, 96, 15
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Load:
    """rate: tokens per second of all streams together. processor: seconds that these took of all processors."""

    rate: float
    processor: float


def first_of_bare(engine: Engine, text: str, salt: int) -> float:
    """Seconds to the first token of one request at the engine alone."""
    prompt = chat_prompt(engine.tokenizer, text)
    began = time.perf_counter()
    engine.submit(Request("alone", prompt, PARAMS, cache_salt=str(salt)))
    while not any(output.tokens for output in engine.step()):
        pass
    seconds = time.perf_counter() - began
    engine.abort("alone")
    engine.step()
    return seconds


def bare(engine: Engine, texts: list[str], salt: int) -> Load:
    """All at once at the engine alone."""
    prompts = [chat_prompt(engine.tokenizer, text) for text in texts]
    used, began = processor_of_this(), time.perf_counter()
    answers = answer_all(engine, prompts, [PARAMS] * len(prompts), cache_salt=str(salt))
    seconds = time.perf_counter() - began
    return Load(sum(len(answer.tokens) for answer in answers) / seconds, processor_of_this() - used)


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


async def served(client: httpx.AsyncClient, server: Server, texts: list[str], salt: int) -> Load:
    """All at once over HTTP."""
    used, began = processor_of_server(server), time.perf_counter()
    streams = await asyncio.gather(*(stream(client, text, salt) for text in texts))
    seconds = time.perf_counter() - began
    return Load(sum(tokens for _, tokens in streams) / seconds, processor_of_server(server) - used)


def processor_of_server(server: Server) -> float:
    total = 0.0
    for process in server.processes():
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total


async def measure(engine: Engine, server: Server, rounds: int) -> dict[str, Any]:
    texts, salts = human_eval_prompts(STREAMS), count()
    alone: list[tuple[float, float]] = []
    loads: list[tuple[Load, Load]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as client:
        bare(engine, texts[:2], next(salts))
        await served(client, server, texts[:2], next(salts))
        for _ in range(rounds):
            for text in texts[:ALONE]:
                mine = first_of_bare(engine, text, next(salts))
                alone.append((mine, (await stream(client, text, next(salts)))[0]))
            loads.append((bare(engine, texts, next(salts)), await served(client, server, texts, next(salts))))
    firsts = 1e3 * median(mine for mine, _ in alone), 1e3 * median(theirs for _, theirs in alone)
    return {
        "first_token_ms": {
            "bare": firsts[0],
            "served": firsts[1],
            "difference": firsts[1] - firsts[0],
            "median_of_differences": 1e3 * median(theirs - mine for mine, theirs in alone),
        },
        "tokens_per_second": {
            "bare": median(mine.rate for mine, _ in loads),
            "served": median(theirs.rate for _, theirs in loads),
            "ratio": median(theirs.rate / mine.rate for mine, theirs in loads),
        },
        # The client's own time is in neither: it is this process, while the server works. Answers that begin at other
        # moments make smaller batches than the bare engine's, and that is in it.
        "microseconds_a_token_outside_the_engine": 1e6
        * median((theirs.processor - mine.processor) / (STREAMS * TOKENS) for mine, theirs in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    engine = load_engine(EngineConfig())
    with tempfile.TemporaryDirectory() as scratch, running(start(Path(scratch))) as server:
        found = asyncio.run(measure(engine, server, chosen.rounds))
    print(json.dumps(found, indent=2))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
