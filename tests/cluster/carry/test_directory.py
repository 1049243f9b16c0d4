"""What an ingress knows of the replicas where some of them hang, sleep or are replaced."""

import asyncio
import gc
import time
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.card import ModelCard
from cluster.carry import directory as room
from cluster.carry.directory import Directory, Wake
from cluster.carry.routing import fitting
from cluster.errors import ApiError
from cluster.ingress.models import Models
from cluster.line import ANYWHERE, Alive, IngressCounts, Route
from cluster.observe.ingress_metrics import IngressMetrics
from cluster.options import ServeOptions
from tests.cluster.carry.handles import TOLD, Handle, told
from tests.cluster.scripted import NOTHING_COUNTED
from tidar_core.prefixes import prefix_marks
from tidar_core.request import Request, SamplingParams


@pytest.mark.parametrize("known", [False, True], ids=["a new ingress", "a new replica"])
def test_who_answers_is_found_though_another_hangs(card: ModelCard, known: bool) -> None:
    """The answers of all are waited for together: one that hangs must not hide those that are new."""

    async def run() -> None:
        handle = Handle({"r0"} if known else {"r0", "r1"}, card, frozenset() if known else frozenset({"r0"}))
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        if known:
            assert directory.replicas == ("r0",)
            handle.there, handle.hung = {"r0", "r1"}, frozenset({"r0"})
        async with asyncio.timeout(10):
            while "r1" not in directory.replicas:
                await asyncio.sleep(0.05)
        assert told(directory.model[0]) == told(card)
        await directory.stop()

    asyncio.run(run())


def test_nobody_is_forgotten_while_this_ingress_is_held_up_itself(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a thousand requests at once: the only replica, which lives, was taken for gone."""
    monkeypatch.setattr(room, "FORGET_SECONDS", 1.0)

    async def run() -> None:
        handle = Handle({"r0"}, card, frozenset())
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        handle.hung = frozenset({"r0"})
        time.sleep(1.5)  # what holds it up
        await asyncio.sleep(0)
        assert directory.replicas == ("r0",)
        async with asyncio.timeout(10):
            while directory.replicas:
                await asyncio.sleep(0.05)
        await directory.stop()

    asyncio.run(run())


def test_who_is_gone_is_asked_no_more_while_another_hangs(card: ModelCard) -> None:
    """Replicas come and go with the load, and one that hangs is there for long: each look asked all that ever were."""

    class Counting(Handle):
        def __init__(self, there: set[str], card: ModelCard) -> None:
            super().__init__(there, card)
            self.asked: list[str | None] = []

        async def answer(self, method: str, route: Route, *args: object) -> Any:
            self.asked.append(route.only)
            return await super().answer(method, route, *args)

    async def run() -> None:
        handle = Counting({"r0", "r1", "r2"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        handle.there, handle.hung = {"r0", "r2"}, frozenset({"r0"})
        async with asyncio.timeout(10):
            while directory.replicas != ("r0", "r2") or directory.silent != {"r0"}:
                await asyncio.sleep(0.02)
            handle.asked = []
            while "r2" not in handle.asked:
                await asyncio.sleep(0.02)
        assert "r0" in handle.asked
        assert "r1" not in handle.asked
        await directory.stop()

    asyncio.run(run())


def test_a_call_that_the_server_cancels_does_not_end_the_looking(card: ModelCard) -> None:
    """Serve raises what a task ends of that is cancelled itself, and the ingress knew no replica from then on."""

    class Cancelling(Handle):
        cancels: tuple[str, ...] = ()

        def broadcast(self, method: str, *_: object) -> "Cancelling":
            self.asked = method
            return self

        async def results_async(self, **_: Any) -> list[Any]:
            if self.asked in self.cancels:
                self.cancels = tuple(name for name in self.cancels if name != self.asked)
                raise asyncio.CancelledError
            return [TOLD] if self.asked == "metrics" else await super().results_async()

    async def run() -> None:
        handle = Cancelling({"r0"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        handle.there, handle.cancels = {"r1"}, ("alive", "metrics")
        assert await directory.metrics(), "those that run are asked once more"
        async with asyncio.timeout(10):
            while directory.replicas != ("r1",):
                await asyncio.sleep(0.02)
        await directory.stop()

    asyncio.run(run())


def test_the_only_replica_is_asked_for_its_metrics_though_it_was_late(card: ModelCard) -> None:
    """Prometheus got a 503 where one replica on a busy machine had not answered the look before."""

    async def run() -> None:
        directory = Directory(Handle({"r0"}, card))  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        directory.silence("r0")
        assert await directory.metrics() == [TOLD]
        await directory.stop()

    asyncio.run(run())


def test_a_model_that_slept_whenever_it_was_looked_for_is_woken_to_be_known(card: ModelCard) -> None:
    """Else an ingress that takes the place of another lists no model, and the page waits for one for ever."""

    async def run() -> None:
        handle = Handle(set(), card)
        directory = Directory(handle, Wake(seconds=10, most=4))  # type: ignore[arg-type]
        options = ServeOptions(model="tiny", max_replicas=1, min_replicas=0)
        models = Models({"tiny": directory}, options, IngressMetrics("here"), NoOpTracer())
        assert handle.woken == 0
        for _ in range(3):
            with pytest.raises(ApiError):
                models.cards()
            await asyncio.sleep(0.01)
        assert handle.woken == 1, "it is woken once, however many ask"
        asked = asyncio.create_task(directory.known())
        handle.there = {"r0"}
        async with asyncio.timeout(10):
            assert told((await asked)[0]) == told(card)
        handle.there = set()
        assert [told(each) for each in models.cards()] == [told(card)]
        assert told((await directory.known())[0]) == told(card)
        assert handle.woken == 1, "whom it knows it leaves asleep"
        await directory.stop()

    asyncio.run(run())


def test_who_has_said_nothing_for_long_is_not_there(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FORGET_SECONDS", 0.3)

    async def run() -> None:
        handle = Handle({"r0", "r1"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        await directory.start(lambda: NOTHING_COUNTED)
        assert directory.replicas == ("r0", "r1")
        handle.hung = frozenset({"r0"})
        async with asyncio.timeout(10):
            while directory.replicas != ("r1",):
                await asyncio.sleep(0.02)
        assert directory.silent == {"r0"}
        handle.hung = frozenset()
        async with asyncio.timeout(10):
            while directory.silent or directory.replicas != ("r0", "r1"):
                await asyncio.sleep(0.02)
        await directory.stop()

    asyncio.run(run())


def test_only_so_many_wait_for_a_model_that_sleeps_and_not_for_ever(card: ModelCard) -> None:
    async def run() -> None:
        directory = Directory(Handle(set(), card), Wake(seconds=0.2, most=2))  # type: ignore[arg-type]
        for _ in range(2):  # the places are given back
            answers = await asyncio.gather(*(directory.awake() for _ in range(3)), return_exceptions=True)
            assert sorted(answer.status for answer in answers if isinstance(answer, ApiError)) == [429, 503, 503]
        await directory.stop()

    asyncio.run(run())


def test_a_model_that_is_waited_for_in_vain_sleeps_no_more_until_it_was_there(card: ModelCard) -> None:
    async def run() -> None:
        handle = Handle(set(), card)
        directory = Directory(handle, Wake(seconds=0.2, most=2))  # type: ignore[arg-type]
        assert directory.sleeps
        asked = asyncio.create_task(directory.awake())
        await asyncio.sleep(0)
        assert directory.sleeps, "it may still wake in time"
        with pytest.raises(ApiError):
            await asked
        assert not directory.sleeps
        handle.there = {"r0"}
        await directory.look()
        assert directory.replicas == ("r0",)
        assert not directory.sleeps
        handle.there = set()
        await directory.start(lambda: NOTHING_COUNTED)
        async with asyncio.timeout(10):
            while directory.replicas:
                await asyncio.sleep(0.02)
        assert directory.sleeps
        await directory.stop()

    asyncio.run(run())


def test_a_model_that_does_not_wake_is_told_of_though_nobody_waits_for_it_to_the_end(card: ModelCard) -> None:
    async def run() -> None:
        directory = Directory(Handle(set(), card), Wake(seconds=0.5, most=2))  # type: ignore[arg-type]
        for _ in range(2):
            asked = asyncio.create_task(directory.awake())
            await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        async with asyncio.timeout(10):
            while directory.sleeps:
                await asyncio.sleep(0.02)
        await directory.stop()

    asyncio.run(run())


def test_who_waits_for_a_model_that_fails_to_start_is_told_at_once(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve tells those alone who call after that: they waited for all of `wake_seconds`, each of them anew."""
    monkeypatch.setattr(room, "CALL_AGAIN_SECONDS", 0.05)

    async def run() -> None:
        handle = Handle(set(), card)
        directory = Directory(handle, Wake(seconds=60, most=2))  # type: ignore[arg-type]
        asked = asyncio.create_task(directory.awake())
        await asyncio.sleep(0.2)
        assert not asked.done()
        assert (directory.serves, directory.sleeps) == (True, True)
        handle.failed = True
        async with asyncio.timeout(10):
            with pytest.raises(ApiError, match="failed to start"):
                await asked
        assert (directory.serves, directory.sleeps) == (False, False)
        handle.failed = False  # another config was deployed
        asked = asyncio.create_task(directory.awake())
        async with asyncio.timeout(10):
            while not directory.sleeps:
                await asyncio.sleep(0.01)
            assert directory.serves
            handle.there = {"r0"}
            assert told((await asked)[0]) == told(card)
        await directory.stop()

    asyncio.run(run())


def test_a_model_that_failed_to_start_may_sleep_once_it_was_there(card: ModelCard) -> None:
    """As where another config was deployed, which starts an engine that nobody called for."""

    async def run() -> None:
        handle = Handle(set(), card)
        handle.failed = True
        directory = Directory(handle, Wake(seconds=60, most=2))  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="failed to start"):
            await directory.awake()
        handle.failed, handle.there = False, {"r0"}
        await directory.look()
        assert directory.serves
        handle.there = set()
        await directory.start(lambda: NOTHING_COUNTED)
        async with asyncio.timeout(10):
            while not directory.sleeps:
                await asyncio.sleep(0.02)
        assert directory.serves
        await directory.stop()

    asyncio.run(run())


def test_a_model_whose_new_engine_is_lost_has_not_failed_to_start(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comes: who asks meanwhile waits for it, and is not told of what was before."""
    monkeypatch.setattr(room, "POLL_SECONDS", 0.02)

    async def run() -> None:
        handle = Handle(set(), card)
        handle.failed = True
        directory = Directory(handle, Wake(seconds=60, most=2))  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="failed to start"):
            await directory.awake()
        handle.failed, handle.dies = False, True
        asked = asyncio.create_task(directory.awake())
        async with asyncio.timeout(10):
            while not (directory.serves and directory.sleeps):
                await asyncio.sleep(0.01)
            assert not asked.done()
            handle.dies, handle.there = False, {"r0"}
            assert told((await asked)[0]) == told(card)
        await directory.stop()

    asyncio.run(run())


def test_who_waited_in_vain_is_told_for_how_long_and_where_to_look(card: ModelCard) -> None:
    async def run() -> None:
        directory = Directory(Handle(set(), card), Wake(seconds=0.3, most=2))  # type: ignore[arg-type]
        with pytest.raises(ApiError, match=r"no engine of it was up within 0.3 s\..*`serve status`"):
            await directory.awake()
        await directory.stop()

    asyncio.run(run())


def test_nobody_is_called_for_any_more_where_nobody_waits(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CALL_AGAIN_SECONDS", 0.05)

    async def run() -> None:
        handle = Handle(set(), card)
        directory = Directory(handle, Wake(seconds=60, most=2))  # type: ignore[arg-type]
        asked = asyncio.create_task(directory.awake())
        async with asyncio.timeout(10):
            while handle.woken < 2:
                await asyncio.sleep(0.01)
            asked.cancel()
            called = 0
            while handle.calling or handle.woken != called:  # until nobody has called for a while
                called = handle.woken
                await asyncio.sleep(0.2)
        await directory.stop()

    asyncio.run(run())


def test_prompts_are_named_to_the_router_by_what_their_cache_goes_by(card: ModelCard) -> None:
    async def run() -> None:
        directory = Directory(Handle({"r0"}, card))  # type: ignore[arg-type]
        prompt = tuple(range(200))
        plain = Request("r", prompt, SamplingParams(4), cache_salt="tenant")
        assert directory.marks(plain) == b""
        await directory.start(lambda: NOTHING_COUNTED)
        assert directory.marks(plain) == prefix_marks(prompt, card.page_size, "tenant", 256) != b""
        assert directory.marks(plain) is directory.marks(plain), (
            "all choices of a request ask, and it is worked out once"
        )
        other = Request("r", prompt, SamplingParams(4), cache_salt="another")
        assert directory.marks(other) == prefix_marks(prompt, card.page_size, "another", 256)
        assert directory.marks(Request("r", prompt, SamplingParams(4, prompt_logprobs=0))) == b""
        await directory.stop()

    asyncio.run(run())


def test_whoever_is_looked_at_hears_what_this_ingress_counted(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs must not keep it from the others, nor from one that came since: any may be asked for it."""
    heard: dict[str, int] = {}

    class Hearing(Handle):
        def broadcast(self, method: str, *said: object) -> "Hearing":
            self.said = said
            return self

        async def results_async(self, **_: Any) -> list[Alive]:
            signs = await super().results_async()
            self.hear({sign.replica for sign in signs}, *self.said)
            return signs

        def hear(self, names: set[str], ingress: object, counts: object) -> None:
            assert isinstance(counts, IngressCounts)
            heard.update(dict.fromkeys(names, counts.number))

    plain_ask = room.ask

    def ask(handle: Hearing, method: str, *said: object, route: Route = ANYWHERE) -> Any:
        if method == "alive":
            places = fitting(sorted(handle.there), route)
            handle.hear({sorted(handle.there)[place] for place in places or ()} - handle.hung, *said)
        return plain_ask(handle, method, *said, route=route)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "ask", ask)

    async def run() -> None:
        handle = Hearing({"r0", "r1"}, card)
        directory = Directory(handle)  # type: ignore[arg-type]
        numbers = iter(range(1, 100))
        await directory.start(lambda: IngressCounts("here", next(numbers), b""))
        assert heard == {"r0": 1, "r1": 1}
        handle.there, handle.hung = {"r0", "r1", "r2"}, frozenset({"r0"})
        async with asyncio.timeout(10):
            while min(heard.get("r1", 0), heard.get("r2", 0)) < 3:
                await asyncio.sleep(0.02)
        assert heard["r0"] == 1
        await directory.stop()

    asyncio.run(run())


def test_who_leaves_before_all_have_told_their_metrics_leaves_no_traceback(card: ModelCard) -> None:
    class Silent:
        async def get_async(self) -> None:
            await asyncio.sleep(60)

    class Serves(Handle):
        def broadcast(self, method: str, *args: object) -> Any:
            async def found() -> list[Any]:
                return [Silent(), Silent()]

            return DeploymentBroadcastResponse(found(), asyncio.get_running_loop())

    async def run() -> list[str]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said["message"]))
        scrape = asyncio.create_task(Directory(Serves({"r0"}, card)).metrics())  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        scrape.cancel()
        await asyncio.wait([scrape])
        assert scrape.cancelled()
        del scrape
        gc.collect()
        return complaints

    assert asyncio.run(run()) == []
