"""A request that was read for a model which is replaced before anybody takes the request on."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer

from cluster.card import ModelCard, tokenizer_backend
from cluster.carry.directory import Directory
from cluster.carry.handover import Carrier, Update
from cluster.errors import MODEL_CHANGED, model_changed
from cluster.ingress import plans
from cluster.ingress.api import build_api
from cluster.options import ServeOptions
from tests.cluster.ingress.test_api import NoReplica
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, tool_tokenizer
from tidar_core.request import Finish, FinishReason, Request, StepOutput, TokenLogprobs

OLD, NEW = "old-base", "new-base"


class Replaced(Directory):
    """Knows the old model's card until it looks again; then, if ever, the new one's, perhaps by another name."""

    def __init__(self, card: ModelCard, comes: bool, new_name: str = "tiny"):
        super().__init__(NoReplica())  # type: ignore[arg-type]
        self.looks = 0
        self._comes = comes
        self._new_name = new_name
        self._model = replace(card, fingerprint=OLD), tokenizer_backend(card)
        self._heard = {"r0": 1 << 60}

    async def look(self) -> None:
        self.looks += 1
        if self._comes:
            card, backend = self.model
            self._model = replace(card, fingerprint=NEW, name=self._new_name), backend

    async def awake(self) -> tuple[ModelCard, Tokenizer]:
        return self.model


async def run(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
    if base == OLD:
        raise model_changed()
    yield Update("r1", (StepOutput(request.request_id, (65,), finish=Finish(FinishReason.LENGTH)),))


async def ask(api: FastAPI, route: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://tidar") as client:
        return await client.post(f"/v1/{route}", json=body)


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("comes", [True, False])
def test_it_is_read_anew_for_the_model_that_is_there(
    route: str, stream: bool, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be refused by all that are there until it is given up, a minute later."""
    monkeypatch.setattr(Carrier, "run", run)
    directory = Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes)
    api = build_api({"tiny": directory}, ServeOptions())
    turns = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}.get(
        route, {"messages": turns}
    )

    answer = asyncio.run(ask(api, route, asked | {"stream": stream}))
    assert directory.looks == 1
    if comes:
        assert answer.status_code == 200
        assert "error" not in answer.text.replace('"error":null', "")
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, MODEL_CHANGED)
        assert answer.headers["retry-after"]


@pytest.mark.parametrize(("asked", "status"), [({"model": "tiny"}, 404), ({}, 200)])
def test_who_asks_for_the_old_model_by_its_name_is_not_answered_by_the_new_one(
    asked: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Carrier, "run", run)
    directory = Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes=True, new_name="new")
    answer = asyncio.run(ask(build_api({"new": directory}, ServeOptions()), "completions", asked | {"prompt": "a"}))
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_requests_go_before_others_where_the_server_lets_them(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    async def noted(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
        priorities.append(request.priority)
        async for update in run(self, request, NEW):
            yield update

    monkeypatch.setattr(Carrier, "run", noted)
    directory = Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes=False)
    body = {"prompt": "a"} if route == "completions" else {}
    body |= {"input": "a"} if route == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    for allowed, priority in ((False, -1), (False, 0), (False, None), (True, -1)):
        api = build_api({"tiny": directory}, ServeOptions(priorities=allowed))
        answer = asyncio.run(ask(api, route, body | {"priority": priority}))
        assert answer.status_code == (400 if priority and not allowed else 200), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "priority"
    assert priorities == [0, 0, -1]


@pytest.mark.parametrize(("stream", "status"), [(False, 400), (True, 200)])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_an_answer_of_no_stated_length_has_no_more_log_probabilities_than_can_be_kept(
    route: str, stream: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    async def long(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
        entry = TokenLogprobs(65, -0.5, ((65, -0.5), (66, -1.0)))
        try:
            for place in range(30):
                finish = Finish(FinishReason.LENGTH) if place == 29 else None
                yield Update("r1", (StepOutput(request.request_id, (65,), finish=finish, logprobs=(entry,)),))
        finally:
            closed.append(True)

    monkeypatch.setattr(Carrier, "run", long)
    monkeypatch.setattr(plans, "MOST_LOGPROBS", 3 * 29)
    api = build_api({"tiny": Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes=True)}, ServeOptions())
    asked: dict[str, Any] = {"input": "a", "top_logprobs": 2}
    if route != "responses":
        asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    answer = asyncio.run(ask(api, route, asked | {"stream": stream}))
    assert (answer.status_code, closed) == (status, [True])
    if not stream:
        assert "may have 87 log-probabilities at most" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("completions", '"prompt": "a", "unknown": [{"kept by nobody": []}]'),
        ("chat/completions", '"messages": [{"role": "user", "content": "a", "unknown": [{"kept by nobody": []}]}]'),
        ("responses", '"input": "a", "unknown": [{"kept by nobody": []}]'),
    ],
)
def test_while_an_answer_comes_its_body_is_not_kept(
    route: str, asked: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's objects for it take some 24 times its size, and nobody reads them any more."""
    kept: list[int] = []

    async def noted(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
        for _ in range(20):  # the thread that read it may be a moment behind
            kept.append(sum(type(one) is dict and "kept by nobody" in one for one in gc.get_objects()))
            if not kept[-1]:
                break
            await asyncio.sleep(0.02)
        async for update in run(self, request, NEW):
            yield update

    async def sent(api: FastAPI) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://tidar") as client:
            body = f'{{{asked}, "stream": {stream}}}'
            return await client.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})

    monkeypatch.setattr(Carrier, "run", noted)
    api = build_api({"tiny": Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)), comes=True)}, ServeOptions())
    assert asyncio.run(sent(api)).status_code == 200
    assert kept[-1] == 0
