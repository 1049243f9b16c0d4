"""Users come and go, and replicas with them: how soon, and what became of the streams.

For example: python -m tests.cluster.scale_run --users 64 --max-replicas 3

Up to one replica a processor, which is what `tidar up` allows where there is no GPU; more show what happens where they
have to share.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from cluster.options import ServeOptions
from tests import plain_http
from tests.cluster.kills import slow_model
from tests.servers import Server, running, start_with

DECISION = re.compile(
    r"^INFO (\S+ \S+) controller .*(?:Up|Down)scaling Deployment\(name='Engine'.*?from (\d+) to (\d+)", re.MULTILINE
)
LONGEST_SECONDS = 240  # that a number of users may last
PROMPTS = ("The quick", "In the beginning", "She sells", "What is", "It costs")


@dataclass(frozen=True)
class Stream:
    """One answer: when it was asked for, seconds to its first token, its text, what went wrong."""

    asked: float
    first: float
    prompt: str
    text: str
    error: str | None


@dataclass
class Course:
    """What was seen: streams, how many replicas there were when, and when there was another number of users. All
    moments by time.time()."""

    streams: list[Stream] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    users: list[tuple[float, int]] = field(default_factory=list)

    def first_tokens(self, begin: float, end: float) -> list[float]:
        return sorted(one.first for one in self.streams if begin <= one.asked < end and one.error is None)

    def seen(self, count: Callable[[int], bool], since: float) -> float | None:
        """When the number of replicas was first like this."""
        return next((moment for moment, replicas in self.replicas if moment >= since and count(replicas)), None)


async def stream_once(client: httpx.AsyncClient, prompt: str, tokens: int) -> Stream:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked, clock, first, text, last = time.time(), time.monotonic(), 0.0, "", ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Stream(asked, 0.0, prompt, "", f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                first = first or time.monotonic() - clock
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    chunk = json.loads(last)
                    if "error" in chunk:
                        return Stream(asked, first, prompt, text, last)
                    text += "".join(choice["text"] for choice in chunk["choices"])
    except httpx.HTTPError as error:
        return Stream(asked, first, prompt, text, repr(error))
    return Stream(asked, first, prompt, text, None if last == "[DONE]" else f"the stream ended with {last!r}")


def replicas_there(server: Server, model: str = "") -> int:
    """How many replicas of a model whose name begins so the metrics page shows. Raises httpx.HTTPError where it cannot
    be had."""
    page = plain_http.get(f"{server.url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    return len(re.findall(rf'^vllm:num_requests_running\{{.*model_name="{model}', page, re.MULTILINE))


def follow(
    server: Server, phases: Sequence[tuple[int, Callable[[Course], bool], float]], tokens: int, model: str = ""
) -> Course:
    """Keep so many users busy, each asking again when its answer is there, until the phase's condition holds and its
    seconds are over, whichever comes later. model: whose replicas are counted."""
    course = Course()

    async def user(client: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            course.streams.append(await stream_once(client, PROMPTS[number % len(PROMPTS)], tokens))

    async def watch() -> None:
        while True:
            with suppress(httpx.HTTPError):
                count = await asyncio.to_thread(replicas_there, server, model)
                course.replicas.append((time.time(), count))
            await asyncio.sleep(0.3)

    async def run() -> None:
        watching = asyncio.create_task(watch())
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            users: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
            left: list[asyncio.Task[None]] = []
            try:
                for wanted, condition, seconds in phases:
                    course.users.append((time.time(), wanted))
                    while len(users) > wanted:
                        stop, task = users.pop()
                        stop.set()
                        left.append(task)
                    while len(users) < wanted:
                        stop = asyncio.Event()
                        users.append((stop, asyncio.create_task(user(client, len(users), stop))))
                    began = time.monotonic()
                    while time.monotonic() - began < seconds or not condition(course):
                        assert time.monotonic() - began < LONGEST_SECONDS, f"{wanted} users: {course.replicas[-1:]}"
                        await asyncio.sleep(0.2)
            finally:
                for stop, _ in users:
                    stop.set()
                await asyncio.gather(*left, *(task for _, task in users))
        watching.cancel()

    asyncio.run(run())
    course.users.append((time.time(), 0))
    return course


def decisions(logs: Path) -> list[tuple[float, int, int]]:
    """When Serve decided on another number of engines: the moment, from, to."""
    said = "".join(file.read_text() for file in logs.glob("ray/session_*/logs/serve/controller_*.log"))
    return sorted(
        (datetime.strptime(f"{moment}000", "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp(), int(old), int(new))
        for moment, old, new in set(DECISION.findall(said))
    )


def verdict(course: Course) -> tuple[list[str], int]:
    """The errors of streams, and how many texts differ from the others of their prompt."""
    errors = [one.error for one in course.streams if one.error is not None]
    texts = {prompt: [one.text for one in course.streams if one.prompt == prompt] for prompt in PROMPTS}
    different = sum(text != told[0] for told in texts.values() for text in told)
    return errors, different


def report(course: Course, logs: Path) -> None:
    """Print what happened, in order."""
    start = course.users[0][0]
    for (begin, users), (end, _) in zip(course.users, course.users[1:], strict=False):
        seconds = course.first_tokens(begin, end)
        p50, p95 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.95)) if seconds else (0.0, 0.0)
        print(
            f"{users} users from {begin - start:.0f} to {end - start:.0f} s: {len(seconds)} streams, "
            f"first token p50 {p50:.2f} s, p95 {p95:.2f} s"
        )
    for moment, old, new in decisions(logs):
        seen = course.seen((lambda count, new=new, up=new > old: count >= new if up else count <= new), moment)
        there = f"there {seen - moment:.1f} s later" if seen else "not seen"
        print(f"decided at {moment - start:.1f} s: from {old} to {new} replicas, {there}")
    errors, different = verdict(course)
    print(f"{len(course.streams)} streams: {len(errors)} errors, {different} texts differ", *errors[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description="Users come and go, and replicas with them.")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--seconds", type=float, default=30, help="of each number of users, at least")
    parser.add_argument("--max-replicas", type=int, default=max(2, os.cpu_count() or 2))
    parser.add_argument("--each", type=float, help="answers that a replica shall have; default: its batch and pages")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as logs,  # Ray's sockets need a short path
    ):
        model, adapter = slow_model(Path(name))
        options = ServeOptions(
            model=str(model),
            adapter=str(adapter),
            device="cpu",
            threads=1,
            max_replicas=chosen.max_replicas,
            target_ongoing_requests=chosen.each,
            downscale_delay_s=5,
        )
        more = {"RAY_TMPDIR": logs}
        with running(start_with(Path(name), options, cpus=chosen.max_replicas + 1, more=more)) as server:
            grown = f"{chosen.max_replicas} replicas"
            print(f"1 user, {chosen.users}, 1; {grown} at most", flush=True)
            course = follow(
                server,
                [
                    (1, lambda _: True, min(10.0, chosen.seconds)),
                    (chosen.users, lambda seen: seen.replicas[-1][1] > 1, chosen.seconds),
                    (1, lambda seen: seen.replicas[-1][1] == 1, 1.0),
                ],
                chosen.tokens,
            )
            report(course, Path(logs))


if __name__ == "__main__":
    main()
