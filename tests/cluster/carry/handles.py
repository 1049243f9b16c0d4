"""Stands for the engine's handle, as an ingress asks it: replicas that live, hang, sleep or are replaced."""

import asyncio
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.card import ModelCard, pack_card
from cluster.carry import directory as room
from cluster.carry.routing import fitting
from cluster.line import ANYWHERE, Alive, ReplicaCounts, Route
from cluster.replica.replica import EngineReplica
from tests.cluster.scripted import NOTHING_COUNTED
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, tool_tokenizer

TOLD = ReplicaCounts([], (NOTHING_COUNTED,))


def takes(method: str, *args: object) -> None:
    """Raises TypeError where a replica's method takes no such arguments."""
    signature(getattr(EngineReplica, method)).bind(None, *args)


def told(card: ModelCard) -> Any:
    """A card as one that can be compared."""
    return replace(card, tokenizer=card.tokenizer.backend_tokenizer.to_str())  # type: ignore[arg-type]


class Handle:
    """Stands for the engine's handle: `there` run, and `hung` of them give no answer. Methods are asked of one that a
    call's route allows, as by the router. failed: no replica will come, which only those calls are told that are made
    from then on; `calling` of those before wait for one. dies: the replica that a call found dies over it."""

    def __init__(self, there: set[str], card: ModelCard, hung: frozenset[str] = frozenset()) -> None:
        self.there, self.hung, self.card = there, hung, card
        self.woken = self.calling = 0
        self.failed = self.dies = False
        self.lengths: dict[str, int] = {}
        self._method = ""

    def options(self, method_name: str) -> "Handle":
        self._method = method_name
        return self

    def broadcast(self, method: str, *args: object) -> "Handle":
        takes(method, *args)
        return self

    async def results_async(self, **_: Any) -> list[Alive]:
        if not self.there:
            raise RuntimeError("no replica")
        if self.hung:
            raise TimeoutError
        return [self.sign(name) for name in sorted(self.there)]

    def sign(self, name: str) -> Alive:
        return Alive(name, self.lengths.get(name, self.card.max_model_len))

    async def answer(self, method: str, route: Route, *args: object) -> Any:
        if self.failed and not self.there:
            raise DeploymentUnavailableError(DeploymentID("Engine", "api"))
        if self.dies:
            raise LookupError
        self.woken += not self.there
        self.calling += 1
        try:
            while not self.there:
                await asyncio.sleep(0.01)
        finally:
            self.calling -= 1
        places = fitting(sorted(self.there), route)
        if not places:
            raise LookupError
        name = next((sorted(self.there)[place] for place in places if sorted(self.there)[place] not in self.hung), None)
        if name is None:
            await asyncio.sleep(60)
        assert name is not None
        if method == "metrics":
            return TOLD
        if method == "describe":
            return pack_card(replace(self.card, max_model_len=self.sign(name).max_model_len))
        return self.sign(name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> ModelCard:
    class Response:
        def __init__(self, asked: Any) -> None:
            self.task = asyncio.ensure_future(asked)

        def __await__(self) -> Any:
            return self.task.__await__()

        def cancel(self) -> None:
            self.task.cancel()

    def ask(handle: Handle, method: str, *args: object, route: Route = ANYWHERE) -> Response:
        takes(method, *args)
        return Response(handle.answer(method, route, *args))

    monkeypatch.setattr(room, "ask", ask)
    monkeypatch.setattr(room, "REPLY_SECONDS", 0.2)
    return card_for(tool_tokenizer(HERMES_TEMPLATE))
