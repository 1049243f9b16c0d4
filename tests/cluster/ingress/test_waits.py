"""How long clients wait at an ingress, how many do, and who gives up: whatever keeps a request from its engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.carry.handover import Carrier, Update
from cluster.errors import not_ready
from cluster.ingress import api as routes
from cluster.ingress.models import SHORT_BODY
from cluster.observe.ingress_metrics import IngressMetrics, render
from cluster.options import ServeOptions
from tests.cluster.ingress.test_answering import Replaced
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import tiny_tokenizer
from tidar_core.request import Finish, FinishReason, Request, StepOutput

HELD_SECONDS = 0.1
PATHS = {"whole": False, "stream": True}


class Gate(Replaced):
    """A model that is awake once `opened`; `fails`: it never is. Its answers have two steps, the second of which comes
    once `rest` is set."""

    def __init__(self) -> None:
        super().__init__(card_for(tiny_tokenizer()), comes=False)
        self.opened, self.rest, self.fails = asyncio.Event(), asyncio.Event(), False

    async def awake(self) -> tuple[ModelCard, Tokenizer]:
        await self.opened.wait()
        if self.fails:
            raise not_ready()
        return self.model

    async def run(self, request: Request, base: str) -> AsyncGenerator[Update, None]:
        yield Update("r1", (StepOutput(request.request_id, (65,)),))
        await self.rest.wait()
        yield Update("r1", (StepOutput(request.request_id, (66,), finish=Finish(FinishReason.LENGTH)),))


class Asking:
    """A client that has sent its request, and takes in what comes."""

    def __init__(self, api: FastAPI, path: str, body: dict[str, Any], cut: bool = False):
        self.sent: list[Message] = []
        self._left, self._raw, self._cut = asyncio.Event(), json.dumps(body).encode(), cut
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._raw))]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        scope |= {"root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"}}
        self.task = asyncio.create_task(api(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def leave(self) -> None:
        """As Serve tells it: a stream listens for it itself, all else is cancelled."""
        self._left.set()
        await asyncio.wait({self.task}, timeout=0.2)
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _receive(self) -> Message:
        if self._raw:
            raw, self._raw = self._raw, b""
            return {"type": "http.request", "body": raw[:10] if self._cut else raw, "more_body": self._cut}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> IngressMetrics:
    made = IngressMetrics("here")
    monkeypatch.setattr(routes, "IngressMetrics", lambda _: made)
    return made


def told(metrics: IngressMetrics, name: str) -> dict[str, float]:
    """The series of one name that are not 0, by model, or by code where they have one."""
    page = render([metrics.collect()]).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        one.labels.get("code", one.labels["model_name"]): one.value
        for one in samples
        if one.name == f"tidar:{name}" and one.value
    }


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


def play(
    scene: Callable[[FastAPI, Gate], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    async def run() -> None:
        gate = Gate()
        monkeypatch.setattr(Carrier, "run", lambda self, request, base: gate.run(request, base))
        await scene(routes.build_api({"tiny": gate}, ServeOptions(**options)), gate)

    asyncio.run(run())


def body(stream: bool, prompt: str = "a") -> dict[str, Any]:
    return {"prompt": prompt, "stream": stream}


@pytest.mark.parametrize("stream", PATHS.values(), ids=PATHS)
def test_a_request_is_in_progress_until_its_answers_end_and_waits_until_its_first_token(
    stream: bool, metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(api: FastAPI, gate: Gate) -> None:
        asking = Asking(api, "/v1/completions", body(stream))
        await until(lambda: told(metrics, "requests_in_progress") == {"tiny": 1})
        await asyncio.sleep(HELD_SECONDS)
        assert told(metrics, "http_first_token_seconds_count") == {}
        gate.opened.set()
        await until(lambda: told(metrics, "http_first_token_seconds_count"))
        waited = told(metrics, "http_first_token_seconds_sum")
        assert waited["tiny"] >= HELD_SECONDS, "while the model woke"
        assert told(metrics, "requests_in_progress") == {"tiny": 1}
        gate.rest.set()
        await asking.task
        assert told(metrics, "requests_in_progress") == {}
        assert told(metrics, "http_first_token_seconds_sum") == waited
        assert told(metrics, "http_responses_total") == {"200": 1}

    play(scene, monkeypatch)


def test_a_long_body_is_in_progress_before_it_is_known_whose_it_is(
    metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(api: FastAPI, gate: Gate) -> None:
        held = asyncio.Event()

        async def behind_others(*_: object) -> Any:
            await held.wait()
            return body(False)

        monkeypatch.setattr(routes.Models, "work", behind_others)
        asking = Asking(api, "/v1/completions", body(False, "a" * SHORT_BODY))
        await until(lambda: told(metrics, "requests_in_progress") == {"": 1})
        held.set()
        await until(lambda: told(metrics, "requests_in_progress") == {"tiny": 1})
        await asking.leave()
        assert told(metrics, "requests_in_progress") == {}

    play(scene, monkeypatch)


@pytest.mark.parametrize("stream", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("first", [False, True])
def test_who_leaves_before_the_end_got_499_and_has_waited_once(
    stream: bool, first: bool, metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """first: there was a token by then."""

    async def scene(api: FastAPI, gate: Gate) -> None:
        asking = Asking(api, "/v1/completions", body(stream))
        if first:
            gate.opened.set()
        await until(lambda: told(metrics, "http_first_token_seconds_count" if first else "requests_in_progress"))
        await asking.leave()
        assert told(metrics, "http_responses_total") == {"499": 1}
        assert told(metrics, "http_first_token_seconds_count") == {"tiny": 1}
        assert told(metrics, "requests_in_progress") == {}

    play(scene, monkeypatch)


def test_who_leaves_while_the_request_comes_has_waited_for_nothing(
    metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(api: FastAPI, gate: Gate) -> None:
        await Asking(api, "/v1/completions", body(False), cut=True).leave()
        assert told(metrics, "http_responses_total") == {"499": 1}
        assert told(metrics, "http_first_token_seconds_count") == {}

    play(scene, monkeypatch)


def test_who_is_refused_has_waited_for_nothing(metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(api: FastAPI, gate: Gate) -> None:
        gate.fails = True
        gate.opened.set()
        asking = Asking(api, "/v1/completions", body(False))
        await asking.task
        assert asking.sent[0]["status"] == 503
        assert told(metrics, "http_responses_total") == {"503": 1}
        assert told(metrics, "http_first_token_seconds_count") == {}

    play(scene, monkeypatch)


def test_the_limit_of_answers_goes_by_the_engines_that_are_there(
    metrics: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(_: FastAPI, gate: Gate) -> None:
        for engines, limit in ((3, 15), (1, 5), (0, 5)):
            gate._heard = dict.fromkeys((f"r{number}" for number in range(engines)), 1 << 60)
            assert told(metrics, "requests_limit") == {"tiny": limit}

    play(scene, monkeypatch, max_ongoing=5)
