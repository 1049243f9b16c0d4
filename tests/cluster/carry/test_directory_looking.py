"""When an ingress looks at the replicas: at once where some come or go, and no more once it is told to stop."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from cluster.card import ModelCard, pack_card
from cluster.carry.directory import Directory
from cluster.errors import ApiError
from cluster.line import Alive
from tests.cluster.carry.handles import told
from tests.cluster.scripted import NOTHING_COUNTED
from tests.cluster.wire.test_schemas import card_for
from tests.tiny import HERMES_TEMPLATE, tool_tokenizer


class Stubborn:
    """Stands for the engine's handle: its second look takes long, and swallows the first cancellation, as
    `asyncio.wait_for` may where its answer comes in the same moment."""

    def __init__(self) -> None:
        self.looks = 0
        self.second = asyncio.Event()

    def broadcast(self, method: str, *_: object) -> "Stubborn":
        return self

    async def results_async(self, **_: Any) -> list[Alive]:
        self.looks += 1
        if self.looks == 2:
            self.second.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return []
        return [Alive("one", 64)]


def test_it_stops_though_a_cancellation_is_swallowed() -> None:
    async def run() -> None:
        handle = Stubborn()
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        async with asyncio.timeout(10):
            await handle.second.wait()
            await directory.stop()
        assert handle.looks == 2

    asyncio.run(run())


class Living:
    """Stands for the engine's handle: one replica lives."""

    name = "one"

    def broadcast(self, method: str, *_: object) -> "Living":
        return self

    async def results_async(self, **_: Any) -> list[Alive]:
        return [Alive(self.name, 64)]


class Undescribed(Directory):
    """Its replica takes its time to describe the model."""

    def __init__(self) -> None:
        super().__init__(Living())  # type: ignore[arg-type]
        self.asked = asyncio.Event()

    async def _try_each(self, names: Iterable[str], seconds: float, method: str, *args: object) -> dict[str, Any]:
        self.asked.set()
        await asyncio.sleep(60)
        return {}


def test_nobody_is_there_before_it_is_known_what_they_serve() -> None:
    """Else who comes in that moment is told that the model is not ready, by a server that said it was."""

    async def run() -> None:
        directory = Undescribed()
        starting = asyncio.create_task(directory.start(lambda: NOTHING_COUNTED))
        async with asyncio.timeout(10):
            await directory.asked.wait()
        assert directory.replicas == ()
        assert not directory.serves
        await directory.stop()
        starting.cancel()

    asyncio.run(run())


class Replaced(Directory):
    """Its first replica describes the model at once; another takes its place, and takes its time."""

    def __init__(self, card: ModelCard) -> None:
        self.living = Living()
        super().__init__(self.living)  # type: ignore[arg-type]
        self.card = card
        self.asked = asyncio.Event()

    async def _try_each(self, names: Iterable[str], seconds: float, method: str, *args: object) -> dict[str, Any]:
        if list(names) == ["one"]:
            return {"one": pack_card(self.card)}
        self.asked.set()
        await asyncio.sleep(60)
        return {}


def test_who_takes_the_place_of_another_is_there_at_once() -> None:
    """Else a request that comes while it computes what the other had begun is told that nobody answers."""

    async def run() -> None:
        directory = Replaced(card_for(tool_tokenizer(HERMES_TEMPLATE)))
        await directory.start(lambda: NOTHING_COUNTED)
        assert directory.replicas == ("one",)
        directory.living.name = "two"
        async with asyncio.timeout(10):
            await directory.asked.wait()
        assert directory.replicas == ("two",)
        assert told(directory.model[0]) == told(directory.card)
        await directory.stop()

    asyncio.run(run())


class Coming:
    """Stands for the engine's handle: at first there is no replica; every look takes a moment."""

    def __init__(self) -> None:
        self.there = False
        self.looks = 0

    def broadcast(self, method: str, *_: object) -> "Coming":
        return self

    async def results_async(self, **_: Any) -> list[Alive]:
        self.looks += 1
        await asyncio.sleep(0.01)
        if not self.there:
            raise RuntimeError("no replica yet")
        return [Alive("one", 64)]


class Described(Directory):
    """Whoever is there describes the model at once."""

    def __init__(self, handle: Coming, card: ModelCard) -> None:
        super().__init__(handle)  # type: ignore[arg-type]
        self.card = card

    async def _try_each(self, names: Iterable[str], seconds: float, method: str, *args: object) -> dict[str, Any]:
        return dict.fromkeys(names, pack_card(self.card))


def test_who_came_since_the_last_look_is_found_by_the_first_requests() -> None:
    """Of two ingresses the other may have met the replica already, and the server said that it is ready."""

    async def run() -> None:
        handle = Coming()
        directory = Described(handle, card_for(tool_tokenizer(HERMES_TEMPLATE)))
        with pytest.raises(ApiError) as refused:
            await directory.awake()
        assert refused.value.status == 503
        handle.there, handle.looks = True, 0
        answers = await asyncio.gather(*(directory.awake() for _ in range(20)))
        assert all(told(card) == told(directory.card) for card, _ in answers)
        assert handle.looks == 1
        await directory.stop()

    asyncio.run(run())
