"""A request that was read for a model which is replaced before anybody takes the request on."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from cluster.card import ModelCard, tokenizer_backend
from cluster.carry.directory import Directory
from cluster.carry.handover import Carrier, Update
from cluster.errors import MODEL_CHANGED, model_changed
from cluster.ingress.api import build_api
from cluster.options import ServeOptions
from tests.cluster.ingress.test_api import NoReplica
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, tool_tokenizer
from tidar_core.request import Finish, FinishReason, Request, StepOutput

OLD, NEW = "old-base", "new-base"


class Replaced(Directory):
    """Knows the old model's card until it looks again; then, if ever, the new one's."""

    def __init__(self, card: ModelCard, comes: bool):
        super().__init__(NoReplica())  # type: ignore[arg-type]
        self.looks = 0
        self._comes = comes
        self.fingerprint = OLD
        self._card = card

    async def look(self) -> None:
        self.looks += 1
        self.fingerprint = NEW if self._comes else OLD

    async def awake(self) -> tuple[ModelCard, Tokenizer]:
        return replace(self._card, fingerprint=self.fingerprint), tokenizer_backend(self._card)


async def run(self: Carrier, request: Request, base: str) -> AsyncGenerator[Update, None]:
    if base == OLD:
        raise model_changed()
    yield Update("r1", (StepOutput(request.request_id, (65,), finish=Finish(FinishReason.LENGTH)),))


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

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://tidar") as client:
            return await client.post(f"/v1/{route}", json=asked | {"stream": stream})

    answer = asyncio.run(ask())
    assert directory.looks == 1
    if comes:
        assert answer.status_code == 200
        assert "error" not in answer.text.replace('"error":null', "")
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, MODEL_CHANGED)
        assert answer.headers["retry-after"]
