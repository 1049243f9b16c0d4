"""Recorded event streams for the page's real script, and a small server that plays them on the page's own origin.

They serve what a live model cannot promise: hostile text, a character cut in two, a thousand tokens a second.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from cluster.observe.ingress_metrics import render
from cluster.observe.replica_metrics import ReplicaMetrics, Timing
from playground.page import mount
from tidar_core.engine import EngineStats
from tidar_core.request import StepOutput, StepTrace

HOSTILE_REPLICA = 'r<b>"\\{}'

MODEL = {
    "id": "recorded/SmolLM2-135M-Instruct",
    "object": "model",
    "max_model_len": 8192,
    "tidar": {
        "block_length": 8,
        "exact": True,
        "adapter": "default",
        "dtype": "bfloat16",
        "device": "cpu",
        "sampling_defaults": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        "step_cost": {
            "rows": [1, 4, 16, 64],
            "trunk_ms": [18.0, 19.0, 30.0, 96.0],
            "head_ms": [2.0, 2.5, 6.0, 20.0],
            "adapter_ms": [0.5, 1.0, 4.0, 16.0],
        },
    },
}


@dataclass(frozen=True)
class Step:
    """One step of a recording: texts of the drafts, how many held, what the model said, and the text released."""

    drafted: Sequence[str]
    accepted: int
    anchor: str | None
    delta: str
    logprobs: dict[str, Any] | None = None


@dataclass
class Recording:
    """What the server answers to one chat request: a status and body, or events with `pause` seconds between them."""

    events: Sequence[str] = ()
    pause: float = 0.0
    status: int = 200
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    end: str = "data: [DONE]\n\n"
    media_type: str = "text/event-stream"


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def token_id(text: str) -> int:
    """An id for a token: the same for the same text, as a tokenizer has it."""
    return zlib.crc32(text.encode()) % 49_152


def recording(steps: Sequence[Step], pause: float = 0.0, finish: str = "stop") -> Recording:
    """The events of an answer made of `steps`, as the API sends them; step 0 is the one that reads the prompt."""
    events = []
    for number, step in enumerate(steps):
        trace = {
            "step": number,
            "t_ms": 80.0 + 40.0 * number,
            "drafted": [{"id": token_id(text), "text": text} for text in step.drafted],
            "accepted": step.accepted,
            "anchor": None if step.anchor is None else {"id": token_id(step.anchor), "text": step.anchor},
            "block": 4,
            "proposals": [{"a": 1}],
            "used": None,
            "rows": {"verify": 1 + len(step.drafted), "mask": 4},
            "replica": "r1",
        }
        reason = finish if number == len(steps) - 1 else None
        choices = [{"index": 0, "delta": {"content": step.delta}, "finish_reason": reason, "logprobs": step.logprobs}]
        events.append(event({"object": "chat.completion.chunk", "choices": choices, "tidar": trace, "usage": None}))
    events.append(event({"choices": [], "usage": usage(steps), "metrics": metrics(steps)}))
    return Recording(events, pause)


def burst(answers: int, steps: int, pause: float = 0.0) -> Recording:
    """A completion of several prompts: every answer one token a step, and the last to end alone."""
    events = []
    for number in range(steps + answers - 1):
        for index in range(answers):
            if number >= steps + index:
                continue
            trace = {"step": number, "drafted": [], "accepted": 0, "anchor": {"id": 7, "text": "x"}, "proposals": []}
            trace |= {"t_ms": 10.0 * number, "rows": {"verify": 1, "mask": 4 if answers - index < 3 else 0}, "block": 4}
            reason = "length" if number == steps + index - 1 else None
            choice = {"index": index, "text": "x", "finish_reason": reason}
            events.append(event({"object": "text_completion", "choices": [choice], "tidar": trace}))
    return Recording(events, pause)


def metrics_pages(steps: int, names: tuple[str, ...] = ("one", HOSTILE_REPLICA), other: str = "m") -> list[str]:
    """Metrics pages of a real `ReplicaMetrics`: each has a prompt and `steps` steps more than the one before it. other:
    the model of all replicas but the first, which has m."""
    replicas = {name: ReplicaMetrics(other if place else "m", name, 4) for place, name in enumerate(names)}
    made = []
    for _ in range(30):
        for metrics in replicas.values():
            metrics.stepped(StepOutput("x", (), StepTrace(0, 0.1, (), 0, None, 0, (), None, 400, 0)), Timing(0.0), 1.0)
            for _ in range(steps):
                trace = StepTrace(3, 0.1, (1, 2), 1, 9, 4, (1,), None, 3, 4)
                metrics.stepped(StepOutput("x", (1, 9), trace), Timing(0.0), 1.0)
        made.append(render(metrics.collect(EngineStats(2, 1, 25, 100)) for metrics in replicas.values()).decode())
    return made


def usage(steps: Sequence[Step]) -> dict[str, int]:
    tokens = sum(step.accepted + (step.anchor is not None) for step in steps)
    return {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}


def metrics(steps: Sequence[Step]) -> dict[str, Any]:
    decode = steps[1:]
    drafted = sum(len(step.drafted) for step in decode)
    accepted = sum(step.accepted for step in decode)
    tokens = sum(step.accepted + (step.anchor is not None) for step in decode)
    return {
        "speculative_decoding": {
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
        },
        "tidar": {
            "decode_steps": len(decode),
            "tokens_per_step": tokens / len(decode) if decode else None,
            "seed": 18446744073709551615,
        },
    }


def plain_steps(tokens: Sequence[str], wrong: str = " wrong") -> list[Step]:
    """Steps that say `tokens`: after the first, 0 to 3 drafts hold in turn, and two wrong ones follow."""
    steps = [Step((), 0, tokens[0], tokens[0])]
    at = 1
    while at < len(tokens):
        held = min(len(steps) % 4, len(tokens) - at - 1)
        said = tokens[at : at + held + 1]
        steps.append(Step([*said[:held], wrong, wrong + "er"], held, said[held], "".join(said)))
        at += held + 1
    return steps


@dataclass
class RecordedServer:
    """The playground beside an API that plays `answers`, one a request (the last again and again)."""

    address: str
    answers: list[Recording] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    wanted_key: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    under_way: int = 0
    most_under_way: int = 0
    metrics: list[str] = field(default_factory=list)
    metrics_key: str | None = None
    model: dict[str, Any] = field(default_factory=lambda: MODEL)
    others: list[str] = field(default_factory=list)

    def play(self, *answers: Recording) -> None:
        """Answer the next chat requests so; forget what was asked before."""
        self.answers[:] = answers
        self.bodies.clear()
        self.tokenized.clear()
        self.keys.clear()
        self.cancelled.clear()
        self.most_under_way = 0

    def forget(self) -> None:
        """As new: nothing to play, no keys wanted."""
        self.play()
        self.wanted_key = self.metrics_key = None
        self.metrics[:] = []
        self.model = MODEL
        self.others[:] = []


def api(server: RecordedServer) -> FastAPI:
    app = FastAPI()

    def refused(request: Request) -> Response | None:
        key = request.headers.get("authorization")
        server.keys.append(key)
        if server.wanted_key is None or key == f"Bearer {server.wanted_key}":
            return None
        error = {"message": "Incorrect API key provided.", "type": "invalid_request_error", "code": "invalid_api_key"}
        return JSONResponse({"error": error}, 401)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        served = [server.model, *(server.model | {"id": name} for name in server.others)]
        return refused(request) or JSONResponse({"object": "list", "data": served})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if server.metrics_key and request.headers.get("authorization") != f"Bearer {server.metrics_key}":
            return JSONResponse({"error": {"message": "This server requires an API key."}}, 401)
        pages = server.metrics or [""]
        return Response(pages.pop(0) if len(pages) > 1 else pages[0], media_type="text/plain")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        server.tokenized.append(json.loads(await request.body()))
        text = server.tokenized[-1]["messages"][0]["content"]
        return JSONResponse({"tokens": list(text.encode()), "count": len(text)})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if refusal := refused(request):
            return refusal
        server.bodies.append(json.loads(await request.body()))
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if answer.status != 200:
            return JSONResponse(answer.body, answer.status, answer.headers)
        return StreamingResponse(play(server, answer), media_type=answer.media_type)

    return mount(app)


async def play(server: RecordedServer, answer: Recording) -> AsyncIterator[bytes]:
    begun = time.monotonic()
    server.under_way += 1
    server.most_under_way = max(server.most_under_way, server.under_way)
    try:
        for number, one in enumerate(answer.events):
            ahead = begun + number * answer.pause - time.monotonic()
            if answer.pause and ahead > 0:
                await asyncio.sleep(ahead)
            yield one.encode()
        yield answer.end.encode()
    except asyncio.CancelledError:
        server.cancelled.set()
        raise
    finally:
        server.under_way -= 1


@contextlib.contextmanager
def serve_recorded() -> Iterator[RecordedServer]:
    """Run a `RecordedServer` on a free port, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = RecordedServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    runner = uvicorn.Server(uvicorn.Config(api(server), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not runner.started:
        if not thread.is_alive():
            raise RuntimeError("the recorded server did not start")
        time.sleep(0.02)
    try:
        yield server
    finally:
        runner.should_exit = True
        thread.join(10)
