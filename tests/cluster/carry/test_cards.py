"""What an ingress knows of the model, by what a replica tells of it."""

import asyncio
import pickle
from dataclasses import replace
from typing import Any

import pytest

from cluster.card import ModelCard, PackedCard, pack_card
from cluster.carry.directory import Directory
from cluster.errors import ApiError
from cluster.line import Route
from tests.cluster.carry.handles import Handle, told
from tests.cluster.scripted import NOTHING_COUNTED

GRPC_TAKES = 4 << 20


def test_the_card_is_not_read_again_because_another_replica_is_gone(card: ModelCard) -> None:
    """It brings the whole tokenizer, just when streams are to be handed over."""
    asked: list[str | None] = []

    class Counted(Handle):
        async def answer(self, method: str, route: Route, *args: object) -> Any:
            if method == "describe":
                asked.append(route.only)
            return await super().answer(method, route, *args)

    async def run() -> None:
        handle = Counted({"r0", "r1", "r2"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        for gone in ("", "r2", "r1"):
            handle.there = handle.there - {gone}
            await directory._look()
        assert asked == ["r0"]
        handle.there = {"r1"}
        await directory._look()
        assert asked == ["r0", "r1"]

    asyncio.run(run())


def test_the_tokenizer_comes_once_and_past_what_grpc_takes_by_itself(card: ModelCard) -> None:
    """That of a Qwen model, pickled, is larger than the 4 MiB of a message, and takes a third of a second to read."""
    backend = card.tokenizer.backend_tokenizer
    backend.add_tokens([f"{word * 2654435761 % 2**32:08x}" for word in range(70_000)])
    came: list[PackedCard] = []

    class Handles(Handle):
        async def answer(self, method: str, route: Route, *args: object) -> Any:
            answer = await super().answer(method, route, *args)
            if isinstance(answer, PackedCard):
                came.append(replace(answer, tokenizer=b"") if args == (answer.digest,) else answer)
                return came[-1]
            return answer

    async def run() -> None:
        handle = Handles({"r0"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory._look()
        tokenizer = directory.model[0].tokenizer
        assert len(pickle.dumps(tokenizer)) > GRPC_TAKES > len(came[0].tokenizer) > 0
        assert tokenizer.backend_tokenizer.to_str() == backend.to_str()
        for there in ({"r0", "r1"}, {"r2"}):
            handle.there = there
            await directory._look()
            assert directory.model[0].tokenizer is tokenizer
        assert [packed.tokenizer for packed in came[1:]] == [b"", b""]

    asyncio.run(run())


def test_a_replica_that_does_not_tell_what_it_serves_is_named_and_serves_nobody(
    card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for ready, and each request was told that no replica answers; the log said nothing."""

    class Silent(Handle):
        tells = False

        async def answer(self, method: str, route: Route, *args: object) -> Any:
            if method == "describe" and not self.tells:
                raise RuntimeError("message larger than max")
            return await super().answer(method, route, *args)

    async def run() -> None:
        handle = Silent({"r0"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        for _ in range(3):
            await directory._look()
        assert directory.replicas == ("r0",)
        assert not directory.serves
        with pytest.raises(ApiError):
            await directory.awake()
        handle.tells = True
        assert told((await directory.awake())[0]) == told(card)
        assert directory.serves

    with caplog.at_level("WARNING", logger="ray.serve"):
        asyncio.run(run())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "r0 does not tell what it serves: RuntimeError: message larger than max"


def test_a_replica_of_another_version_takes_no_other_with_it(card: ModelCard, caplog: pytest.LogCaptureFixture) -> None:
    class OfAnother(Handle):
        async def answer(self, method: str, route: Route, *args: object) -> Any:
            answer = await super().answer(method, route, *args)
            if method == "describe" and route.only == "r1":
                return replace(answer, tokenizer=b"not as it was", digest="another")
            return answer

    async def run() -> None:
        handle = OfAnother({"r0"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory._look()
        handle.there = {"r0", "r1"}
        await directory._look()
        assert directory.replicas == ("r0", "r1")
        assert told(directory.model[0]) == told(card)

    with caplog.at_level("WARNING", logger="ray.serve"):
        asyncio.run(run())
    assert "r1 does not tell what it serves: error: Error -3" in caplog.text


def test_the_card_is_a_new_replicas(card: ModelCard) -> None:
    """It may have another drafter than those before it."""

    class Handles(Handle):
        async def answer(self, method: str, route: Route, *args: object) -> Any:
            sign = await super().answer("alive", route)
            return pack_card(replace(self.card, adapter=f"of {sign.replica}")) if method == "describe" else sign

    async def run() -> None:
        handle = Handles({"r1"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        assert directory.model[0].adapter == "of r1"
        handle.there = {"r0", "r1", "r2"} - {"r0"}
        async with asyncio.timeout(10):
            while directory.model[0].adapter != "of r2":
                await asyncio.sleep(0.02)
        await directory.stop()

    asyncio.run(run())


def test_the_card_promises_what_every_replica_holds(card: ModelCard) -> None:
    """Where memory holds fewer positions at one of them, an answer that fits the card ended early there."""

    async def run() -> None:
        handle = Handle({"r0", "r1"}, card)
        handle.lengths = {"r0": 4096, "r1": 1024, "r2": 2048, "r3": 512}
        directory = Directory(handle)  # type: ignore[arg-type]

        async def promised() -> int:
            await directory._look()
            return directory.model[0].max_model_len

        assert await promised() == 1024
        handle.hung = frozenset({"r1"})
        assert await promised() == 1024, "one that hangs may speak again"
        handle.there, handle.hung = {"r0", "r2", "r3"}, frozenset({"r2"})
        assert await promised() == 512, "a stranger beside one that hangs"
        handle.there, handle.hung = {"r0", "r2"}, frozenset()
        assert await promised() == 2048
        handle.there = {"r0"}
        assert await promised() == 4096

    asyncio.run(run())
