"""Many streams over several replicas that are killed or stopped under them, and what became of the streams.

Every answer is compared with what one engine in a process of its own says, without drafts, in another batch.
"""

import asyncio
import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h11
import httpx
import psutil

from cluster.options import ServeOptions
from tests import plain_http
from tests.servers import Serving, kill_all, tiny_model, words_of
from tidar_core.bench.drive import answer_all
from tidar_core.engine import load_engine
from tidar_core.request import SamplingParams

REPLICA_TITLE = "ray::ServeReplica:api:Engine"
INGRESS_TITLE = "ray::ServeReplica:api:Ingress"
ON_THE_WAY_SECONDS = 0.5  # for what a replica has said to reach the client
REPLICA_LOG = re.compile(r"replica_api_Engine_(\w+)\.log")


def slow_model(directory: Path) -> tuple[Path, Path]:
    """Two layers, but wide: an engine that outran its ingress would have said all before it is hit."""
    return tiny_model(directory, hidden=384, intermediate=1024)


def ingresses(server: Serving) -> list[psutil.Process]:
    """Its ingresses that are alive."""
    return [process for process in server.processes() if INGRESS_TITLE in " ".join(words_of(process))]


@dataclass(frozen=True)
class Ask:
    """One request: its body but for the fields that all have, and the parameters that it stands for. traced: every step
    is a chunk that names its tokens and its replica; else a chunk may hold the text of several."""

    prompt: tuple[int, ...]
    body: dict[str, Any]
    traced: bool

    def wire(self) -> dict[str, Any]:
        return {
            **self.body,
            "prompt": list(self.prompt),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tidar": {"trace": self.traced},
        }

    def params(self) -> SamplingParams:
        return SamplingParams(**self.body, ignore_eos=True, drafts="off")


def draw_ask(worker: int, turn: int, tokens: int) -> Ask:
    """A request that the same two numbers always give: sampled in different ways, some with penalties."""
    draw = random.Random(1000 * worker + turn)
    body: dict[str, Any] = {"max_tokens": tokens, "seed": draw.randrange(2**32)}
    body["temperature"] = draw.choice((0.0, 0.7, 1.0, 1.3))
    if draw.random() < 0.5:
        body |= {"top_p": 0.95, "top_k": 40}
    if draw.random() < 0.25:
        body |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "min_tokens": tokens // 2}
    return Ask(tuple(draw.randrange(3, 500) for _ in range(draw.randint(1, 60))), body, traced=draw.random() < 0.75)


@dataclass
class Told:
    """What a client saw of one stream. moments: when each of its chunks came. tokens, steps and replicas (without
    repeats) are told where it is traced. counted: its tokens, by the usage at its end."""

    ask: Ask
    counted: int = 0
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    text: str = ""
    moments: list[float] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def waits(self) -> list[tuple[float, float]]:
        """When each wait for the next chunk began and ended."""
        return list(zip(self.moments, self.moments[1:], strict=False))

    def hear(self, chunk: dict[str, Any], moment: float) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        if chunk.get("usage"):
            self.counted = chunk["usage"]["completion_tokens"]
        if not chunk["choices"]:
            return
        self.moments.append(moment)
        self.text += chunk["choices"][0]["text"]
        trace = chunk.get("tidar")
        if trace is None:
            return
        self.tokens += [item["id"] for item in trace["drafted"][: trace["accepted"]]]
        if trace["anchor"] is not None:
            self.tokens.append(trace["anchor"]["id"])
        self.steps.append(trace["step"])
        if not self.replicas or self.replicas[-1] != trace["replica"]:
            self.replicas.append(trace["replica"])


@dataclass
class Recording:
    """The bytes of one answer, as they came; they are read when the run is over, lest the client be what is slow."""

    ask: Ask
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    def told(self) -> Told:
        told = Told(self.ask)
        raw = b"".join(part for _, part in self.parts)
        if b" 200 " not in raw[:16]:
            told.error = raw.decode(errors="replace")[:500] or "no answer"
            return told
        last = rest = b""
        for moment, data in self.payload():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    last = line.removeprefix(b"data: ").strip()
                    if last.startswith(b"{"):
                        told.hear(json.loads(last), moment)
        if last != b"[DONE]" and told.error is None:
            told.error = "the stream broke off"
        return told

    def payload(self) -> Iterator[tuple[float, bytes]]:
        """What came of the body, and when, whatever it was cut into on its way."""
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method="POST", target="/", headers=[("Host", "tidar"), ("Content-Length", "0")]))
        connection.send(h11.EndOfMessage())
        for moment, part in self.parts:
            connection.receive_data(part)
            while isinstance(event := connection.next_event(), h11.Response | h11.Data):
                if isinstance(event, h11.Data):
                    yield moment, bytes(event.data)


async def record(host: str, port: int, ask: Ask) -> Recording:
    """One stream from its first to its last byte, over a socket of its own."""
    recording = Recording(ask)
    body = json.dumps(ask.wire()).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: tidar\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        while part := await reader.read(1 << 16):
            recording.parts.append((time.monotonic(), part))
            if b"data: [DONE]" in part:
                break
    finally:
        writer.close()
    return recording


def engine_processes(server: Serving) -> dict[str, psutil.Process]:
    """The replicas' processes that are not stopped, by name, the one that has lived longest first."""
    found: list[tuple[float, str, psutil.Process]] = []
    for process in server.processes():
        with suppress(psutil.Error):
            if REPLICA_TITLE in " ".join(process.cmdline()) and process.status() != psutil.STATUS_STOPPED:
                names = [name[1] for file in process.open_files() if (name := REPLICA_LOG.search(file.path))]
                found += [(process.create_time(), name, process) for name in names]
    return {name: process for _, name, process in sorted(found, key=lambda one: one[0])}


def requests_by_replica(server: Serving) -> dict[str, float]:
    """How many requests each replica on the metrics page runs."""
    page = plain_http.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    return {
        name: float(count)
        for name, count in re.findall(r'^vllm:num_requests_running.*engine="(\w+)".* (\S+)$', page, re.M)
    }


def wait_for_replicas(server: Serving, count: int, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while len(requests_by_replica(server)) < count:
        assert time.monotonic() < deadline, f"never {count} replicas"
        time.sleep(0.2)


Blow = Callable[[psutil.Process], None]


def kill(process: psutil.Process) -> None:
    process.kill()


def end(process: psutil.Process) -> None:
    """As its node does when it is shut down: Ray has the process clear up first."""
    process.terminate()


def hang(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def lose_node(engine: psutil.Process) -> None:
    """Kill everything of the node on which an engine runs."""
    raylet = engine.parent()
    assert raylet is not None
    assert "raylet" in raylet.name()
    kill_all((raylet, *raylet.children(recursive=True)))


def stop_for(seconds: float) -> Blow:
    """Stop a process, and let it go on later, while it is there still."""

    def stop(process: psutil.Process) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        if process.is_running():
            process.send_signal(signal.SIGCONT)

    return stop


def busiest(server: Serving, spared: int, requests: dict[str, float]) -> tuple[str, psutil.Process] | None:
    """The replica with most requests, but for the `spared` that have lived longest; None where fewer than two replicas
    are ready, or that one has none: a blow would hit nobody."""
    there = {name: process for name, process in list(engine_processes(server).items())[spared:] if requests.get(name)}
    name = max(there, key=requests.__getitem__, default=None)
    return None if name is None or len(requests) < 2 else (name, there[name])


@dataclass(frozen=True)
class Struck:
    """A blow. warm: it left a replica that was there at the blow before; else all that were left had just started."""

    moment: float
    warm: bool


def strike(server: Serving, every: float, blow: Blow, spared: int, over: threading.Event, blows: list[Struck]) -> None:
    """Every so many seconds, while two replicas are ready at least, the busiest is hit."""
    known = set(requests_by_replica(server))
    while not over.wait(every):
        while (target := busiest(server, spared, requests := requests_by_replica(server))) is None:
            if over.wait(0.1):
                return
        name, process = target
        left = set(requests) - {name}
        blows.append(Struck(time.monotonic(), warm=bool(left & known)))
        blow(process)
        known = left


def streams_under_blows(
    server: Serving, streams: int, seconds: float, tokens: int, every: float, blow: Blow, spared: int = 0
) -> tuple[list[Told], list[Struck]]:
    """So many streams at a time, one after the other in each place, for so long; the blows that fell meanwhile (see
    `busiest`)."""
    address = httpx.URL(server.url)
    assert address.port is not None
    end = time.monotonic() + seconds

    async def place(worker: int) -> list[Recording]:
        await asyncio.sleep(worker / streams)  # where all begin and end together, a blow in between hits nobody
        recordings = []
        while time.monotonic() < end:
            ask = draw_ask(worker, len(recordings), tokens)
            recordings.append(await record(address.host, address.port, ask))
        return recordings

    async def all_places() -> list[list[Recording]]:
        return await asyncio.gather(*(place(worker) for worker in range(streams)))

    blows: list[Struck] = []
    over = threading.Event()
    striker = threading.Thread(target=strike, args=(server, every, blow, spared, over, blows))
    striker.start()
    try:
        recordings = asyncio.run(all_places())
    finally:
        over.set()
        striker.join()
    return [recording.told() for place in recordings for recording in place], blows


@dataclass(frozen=True)
class Verdict:
    """Streams against what one undisturbed engine says. moved: of the traced ones. lost, repeated: tokens by index.
    gap: the longest wait for a chunk, in seconds; warm_gap: where no blow fell into it but such as are `Struck.warm`,
    `warm_blows` of all `blows`."""

    streams: int
    moved: int
    tokens: int
    errors: tuple[str, ...]
    different: int
    lost: int
    repeated: int
    gap: float
    warm_gap: float
    blows: int
    warm_blows: int

    def line(self) -> str:
        return (
            f"{self.streams} streams, {self.tokens} tokens compared, {self.blows} blows, {self.moved} streams moved: "
            f"{len(self.errors)} errors, {self.different} texts differ, {self.lost} tokens lost, "
            f"{self.repeated} repeated, longest gap {self.gap:.2f} s, "
            f"{self.warm_gap:.2f} s where a warm replica was left ({self.warm_blows} blows)"
            + "".join(f"\n  {error}" for error in self.errors)
        )


def longest_gaps(told: Iterable[Told], blows: Sequence[Struck]) -> tuple[float, float]:
    """The longest wait for a chunk; the longest that no blow fell into after which all that were left had just
    started."""
    longest = warmest = 0.0
    for began, ended in (wait for one in told for wait in one.waits):
        longest = max(longest, ended - began)
        if all(blow.warm for blow in blows if began - ON_THE_WAY_SECONDS <= blow.moment <= ended):
            warmest = max(warmest, ended - began)
    return longest, warmest


def judge(told: Sequence[Told], options: ServeOptions, blows: Sequence[Struck]) -> Verdict:
    """Compare every stream as text and by its count, the traced ones token by token, with an engine in this process."""
    engine = load_engine(replace(options.served[options.served_name].config, device="cpu", threads=1))
    answers = answer_all(engine, [one.ask.prompt for one in told], [one.ask.params() for one in told])
    different = lost = repeated = 0
    for one, answer in zip(told, answers, strict=True):
        text = engine.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        in_order = one.steps == list(range(len(one.steps)))
        told_right = one.counted == len(answer.tokens) and (one.tokens == answer.tokens or not one.ask.traced)
        different += not (told_right and in_order and one.text == text)
        missing = len(answer.tokens) - (len(one.tokens) if one.ask.traced else one.counted)
        lost += max(0, missing)
        repeated += max(0, -missing)
    gap, warm_gap = longest_gaps(told, blows)
    return Verdict(
        streams=len(told),
        moved=sum(len(one.replicas) > 1 for one in told),
        tokens=sum(len(answer.tokens) for answer in answers),
        errors=tuple(one.error for one in told if one.error is not None),
        different=different,
        lost=lost,
        repeated=repeated,
        gap=gap,
        warm_gap=warm_gap,
        blows=len(blows),
        warm_blows=sum(blow.warm for blow in blows),
    )


def check(told: Sequence[Told], options: ServeOptions, blows: Sequence[Struck]) -> int:
    """Every stream is what it would have been; gives how many moved."""
    verdict = judge(told, options, blows)
    print(verdict.line())
    assert verdict.errors == ()
    assert (verdict.different, verdict.lost, verdict.repeated) == (0, 0, 0)
    assert verdict.gap < 30
    return verdict.moved
