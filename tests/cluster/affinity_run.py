"""Prompts that begin alike, over several replicas: how much of them is read from caches, by this project's router and
by Ray Serve's own.

For example: python -m tests.cluster.affinity_run --replicas 4 --requests 32 --prefixes 8 --at-once 8
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from cluster.app import ROUTER
from cluster.options import ServeOptions, UpOptions
from tests.cluster.kills import wait_for_replicas
from tests.servers import Server, free_port, launch, running, tiny_model

SERVES = "tests.cluster.serves_router:ServesRouter"
CODE = """
import sys
from functools import partial
from cluster.operate import deploy
from cluster.options import UpOptions
deploy.app.application = partial(deploy.app.application, router=sys.argv[1])
deploy.up(UpOptions.model_validate_json(sys.argv[2]))
"""


@dataclass(frozen=True)
class Cached:
    """Prompt tokens, those of them that were read from a cache, and seconds to each answer."""

    prompt: int
    cached: int
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        return self.cached / self.prompt


def prompts_of(requests: int, prefixes: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of `tokens` shared ones and 20 of their own, every prefix as often as the others, shuffled."""
    chance = random.Random(seed)
    heads = [[chance.randrange(3, 500) for _ in range(tokens)] for _ in range(prefixes)]
    prompts = [heads[number % prefixes] + [chance.randrange(3, 500) for _ in range(20)] for number in range(requests)]
    chance.shuffle(prompts)
    return prompts


def ask_all(server: Server, prompts: Sequence[Sequence[int]], at_once: int) -> Cached:
    """Send every prompt, so many at a time."""

    async def run() -> list[tuple[int, int, float]]:
        places = asyncio.Semaphore(at_once)

        async def one(client: httpx.AsyncClient, prompt: Sequence[int]) -> tuple[int, int, float]:
            async with places:
                began = time.monotonic()
                body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                usage = (await client.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
                seconds = time.monotonic() - began
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], seconds

        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    answers = asyncio.run(run())
    return Cached(
        sum(prompt for prompt, _, _ in answers),
        sum(cached for _, cached, _ in answers),
        tuple(seconds for _, _, seconds in answers),
    )


def start_routed(directory: Path, options: ServeOptions, router: str) -> Server:
    """As `tests.servers.start_with`, with another class that chooses replicas."""
    chosen = UpOptions(serve=options, port=free_port())
    words = [sys.executable, "-c", CODE, router, chosen.model_dump_json()]
    counted = {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": options.replicas + 1})}
    return launch(directory, chosen.port, words, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cached tokens by this project's router and by Ray Serve's own.")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="of each prefix")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    chosen = parser.parse_args()
    rates: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, _ = tiny_model(directory)
        options = ServeOptions(
            model=str(model), adapter="none", dtype="float32", device="cpu", replicas=chosen.replicas, threads=1
        )
        for router, path in (("prefix affinity", ROUTER), ("Ray Serve's default", SERVES)):
            with running(start_routed(directory, options, path)) as server:
                wait_for_replicas(server, chosen.replicas)
                for at_once in chosen.at_once:
                    prompts = prompts_of(chosen.requests, chosen.prefixes, chosen.tokens, seed=at_once)
                    got = ask_all(server, prompts, at_once)
                    rates[router, at_once] = got.rate
                    print(
                        f"{router}, {at_once} at once: {got.cached} of {got.prompt} prompt tokens cached "
                        f"({got.rate:.3f}), median answer {statistics.median(got.seconds):.2f} s",
                        flush=True,
                    )
    for at_once in chosen.at_once:
        ours, serves = (rates[router, at_once] for router in ("prefix affinity", "Ray Serve's default"))
        print(
            f"{at_once} at once: {ours / serves:.2f} times Ray Serve's rate" if serves else f"{at_once}: Serve's is 0"
        )


if __name__ == "__main__":
    main()
