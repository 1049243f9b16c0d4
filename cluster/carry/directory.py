"""What an ingress knows of the replicas behind it: the model's card, who answers, who has fallen silent."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from tokenizers import Tokenizer

from cluster.card import ModelCard, tokenizer_backend, unpacked_tokenizer
from cluster.carry.routing import ask, cancelled_there, listen
from cluster.errors import full, not_ready, not_woken, unavailable
from cluster.line import (
    ANYWHERE,
    PROMPT_MARKS,
    Accepted,
    Address,
    Alive,
    EngineKind,
    EventBatch,
    IngressCounts,
    ReplicaCounts,
    Route,
)
from tidar_core.prefixes import prefix_marks
from tidar_core.request import Request

POLL_SECONDS = 1.0
FIRST_POLL_SECONDS = 0.1  # until a replica has answered: a server that starts is ready so much sooner
FIRST_SECONDS = 3.0  # that an ingress waits for a replica before it takes requests
REPLY_SECONDS = 1.5
FORGET_SECONDS = 10.0  # busy is not dead: a replica counts as there until it has said nothing for so long
TICK_SECONDS = 0.25
METRICS_SECONDS = 5.0
CALL_AGAIN_SECONDS = 5.0  # a call that waits for a replica is never told that none will come; the next one is
LONGEST_REASON = 300  # characters of what an error says

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Wake:
    """A model that sleeps while nobody asks: for how long a request may wait for it, and how many may."""

    seconds: float
    most: int


class Directory:
    """Asks all replicas every second whether they live, and whenever others do, one of them for the model's card. What
    it promises of a sequence's length holds wherever a request goes: it is the least of all.

    wake: where there may be no replica because nobody asked for one.
    """

    def __init__(self, engine: DeploymentHandle, wake: Wake | None = None):
        self.engine = engine
        self._name = secrets.token_hex(8)  # under which the replicas know this ingress
        self._wake = wake
        self._waking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._held = 0
        self._woken_at: float | None = None  # on the monotonic clock, where nobody has come since
        self._failed = False  # the last call that should wake the model was told that none will come
        self.silent: frozenset[str] = frozenset()
        self._ticks = 0  # not time: while this event loop is held up nobody can be heard
        self._ticking: asyncio.Task[None] | None = None
        self._heard: dict[str, int] = {}  # the tick of each one's last word
        self._max_model_lens: dict[str, int] = {}
        self._model: tuple[ModelCard, Tokenizer] | None = None
        self._digest = ""  # of the model's tokenizer
        self._not_read = ""  # why the card could not be read
        self._task: asyncio.Task[None] | None = None
        self._described: set[str] = set()  # the replicas of which one, `_describer`, gave the card
        self._describer: str | None = None
        self._found = asyncio.Event()
        self._marked: tuple[tuple[int, ...], str, int, bytes] | None = None  # the last prompt that was, salt, page size
        self._count: Callable[[], IngressCounts | None] = lambda: None

    async def start(self, count: Callable[[], IngressCounts]) -> None:
        """Begin to ask, on the running event loop. count: what this ingress has counted until then, told with each sign
        of life.

        Where replicas run already, one has answered when this returns: an ingress that takes the place of another
        refuses nobody.
        """
        self._count = count
        self._task, self._ticking = asyncio.create_task(self._watch()), asyncio.create_task(self._tick())
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._found.wait()

    async def stop(self) -> None:
        """End the asking. Without this an ingress that is shut down would stay until its time of grace is over."""
        for task in (self._task, self._ticking, self._waking, self._looking):
            while task is not None and not task.done():
                # More than once: `asyncio.wait_for`, by which Serve awaits, may swallow it (Python before 3.12).
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of those that are there."""
        oldest = self._ticks - FORGET_SECONDS / TICK_SECONDS
        return tuple(sorted(name for name, heard in self._heard.items() if heard > oldest))

    @property
    def name(self) -> str | None:
        """What the replicas call their model, once one has told. In a change it may not be what they shall call it."""
        return None if self._model is None else self._model[0].name

    @property
    def model(self) -> tuple[ModelCard, Tokenizer]:
        """The card and the tokenizer that many threads may use. Raises ApiError (503) while no replica answers, or none
        has told its card, unless the model only sleeps."""
        if self._model is None or not self.serves:
            raise not_ready()
        return self._model

    async def known(self) -> tuple[ModelCard, Tokenizer]:
        """As `model`; a model that slept whenever this ingress looked is woken, and waited for: only its replicas know
        it. Raises ApiError as `awake` does."""
        return await self.awake() if self._model is None else self.model

    def wake(self) -> None:
        """Wake the model where it may sleep, unless that is under way."""
        if self._wake is not None and (self._waking is None or self._waking.done()):
            self._woken_at = self._woken_at or time.monotonic()
            self._waking = asyncio.create_task(self._call_for_one())

    @property
    def serves(self) -> bool:
        """Whether a request has somebody to answer it, even if it must wake the model first."""
        return self._known_and_there or (self._wake is not None and not self._failed)

    @property
    def _known_and_there(self) -> bool:
        return bool(self.replicas) and self._model is not None

    @property
    def may_wake(self) -> bool:
        """Whether nobody is there because the model sleeps."""
        return self._wake is not None and not self.replicas

    @property
    def sleeps(self) -> bool:
        """Whether nobody is there because nobody asks; not where it does not wake in the time that requests have, or
        failed to start."""
        if self._wake is None or not self.may_wake or self._failed:
            return False
        return self._woken_at is None or time.monotonic() - self._woken_at < self._wake.seconds

    async def awake(self) -> tuple[ModelCard, Tokenizer]:
        """As `model`, once there is a replica: a model that sleeps is woken; else one may have come just now.
        Raises ApiError: 503 where none comes in time, or will come; 429 where as many requests as may wait already."""
        if not self._known_and_there and self._wake is None:
            await self.look()
        if self._wake is None or self._known_and_there:
            return self.model
        if self._held >= self._wake.most:
            raise full()
        self._held += 1
        try:
            self.wake()  # before the time runs: where it is over, the model is known not to have woken
            async with asyncio.timeout(self._wake.seconds):
                while not self._known_and_there:
                    self.wake()
                    assert self._waking is not None
                    await asyncio.wait({self._waking})
                    if self._failed:
                        raise unavailable()
        except TimeoutError:
            raise not_woken(self._wake.seconds) from None
        finally:
            self._held -= 1
        return self.model

    async def look(self) -> None:
        """See anew who is there and what they serve, if somebody answers soon, lest another ingress serve what this one
        says is not there. One look does for all who come meanwhile."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait({self._looking}, timeout=REPLY_SECONDS)
        if self._looking.done() and not self._looking.cancelled() and self._looking.exception() is not None:
            log.debug("no replica answers: %s", self._looking.exception())

    async def _call_for_one(self) -> None:
        try:
            if await self._one_comes():
                await self._look()
                if self._model is None:
                    await asyncio.sleep(POLL_SECONDS)
        except Exception as error:
            log.warning("the model could not be woken yet: %s", error)
            await asyncio.sleep(POLL_SECONDS)

    async def _one_comes(self) -> bool:
        """Whether a replica answers a call, which Serve starts one for, and comes to that though nobody waits any
        more. Raises what else the call fails of."""
        failed = False
        try:
            await self._answer(ANYWHERE, CALL_AGAIN_SECONDS, "alive", self._name, self._count())
        except TimeoutError:
            return False
        except DeploymentUnavailableError:
            failed = True
            return False
        finally:
            self._failed = failed  # whatever it ended with: one that is lost had found a replica
        return True

    def silence(self, name: str) -> None:
        """Take a replica for silent until it answers again."""
        self.silent |= {name}

    def marks(self, request: Request) -> bytes:
        """What names the prefixes of a prompt to the router; nothing for a request that reads no cached prefix."""
        if self._model is None or request.params.prompt_logprobs is not None:
            return b""
        key = request.prompt, request.cache_salt, self._model[0].page_size
        if self._marked is None or self._marked[0] is not request.prompt or self._marked[1:3] != key[1:]:
            # All choices of a request ask at once: 7 ms each for 128,000 tokens would hold up every stream.
            self._marked = (*key, prefix_marks(request.prompt, key[2], request.cache_salt, PROMPT_MARKS))
        return self._marked[3]

    def generate(
        self, request: Request, mailbox: str, kind: EngineKind | None, route: Route
    ) -> DeploymentResponseGenerator[Accepted | EventBatch]:
        """Send a request to a replica (`EngineReplica.generate`)."""
        return listen(self.engine, "generate", request, Address(self._name, mailbox), kind, route=route)

    def listen(self, replica: str, mailbox: str) -> DeploymentResponseGenerator[Accepted | EventBatch]:
        """Fetch what a replica has for a mailbox (`EngineReplica.listen`)."""
        return listen(self.engine, "listen", Address(self._name, mailbox), route=Route(only=replica))

    async def metrics(self) -> list[ReplicaCounts]:
        """What each replica tells; one that does not answer is left out. Raises ApiError (503) if none does, unless the
        model only sleeps."""
        told = await self._told()
        if not told and self.replicas:  # a busy machine, or a router that lost sight of the only one for a moment
            await asyncio.sleep(POLL_SECONDS)
            told = await self._told()
        if not told and (self.replicas or not self.serves):
            raise not_ready()
        return told

    async def _told(self) -> list[ReplicaCounts]:
        answers = await self._all_tell()
        told = [answer for answer in answers if isinstance(answer, ReplicaCounts)]
        if not told and self.replicas:
            log.warning("no replica tells its metrics, though %s answered: %r", ", ".join(self.replicas), answers)
        return told

    async def _all_tell(self) -> list[Any]:
        """What the replicas that run answer to `metrics`, or fail of."""
        if not self.silent:
            try:
                # To those that run, not to those that were heard of: a call that waits for one that is gone wakes a
                # model.
                return await self._broadcast(METRICS_SECONDS, "metrics")
            except TimeoutError:  # one that hangs holds up the answers of all
                pass
            except Exception as error:  # no replica yet, or none any more
                return [error]
        # On a busy machine the only one may be late, and tell in time all the same.
        there = [name for name in self.replicas if name not in self.silent] or self.replicas
        return list((await self._try_each(there, METRICS_SECONDS, "metrics")).values())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._ticks += 1

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:  # no replica yet, or none any more
                self._heard = {}
                log.debug("no replica answers: %s", error)
            await asyncio.sleep(POLL_SECONDS if self._found.is_set() else FIRST_POLL_SECONDS)

    async def _look(self) -> None:
        sign = self._name, self._count()
        try:
            answers = await self._broadcast(REPLY_SECONDS, "alive", *sign)
        except TimeoutError:  # one that hangs holds up the answers of all
            known = set(self._heard)
            told, strangers = await asyncio.gather(
                self._try_each(known, REPLY_SECONDS, "alive", *sign), self._ask_a_stranger(known, *sign)
            )
            signs = strangers + [answer for answer in told.values() if isinstance(answer, Alive)]
            alive = {sign.replica for sign in signs}
            # The router's word: those are gone, not silent, and no name is used again.
            gone = {name for name, answer in told.items() if type(answer) is LookupError}
            self.silent = (self.silent | known) - alive - gone
            self._heard = {name: heard for name, heard in self._heard.items() if name not in gone}
        else:
            signs = [answer for answer in answers if isinstance(answer, Alive)]
            alive = {sign.replica for sign in signs}
            self.silent = frozenset()
            self._heard = {name: heard for name, heard in self._heard.items() if name in alive}
        if alive and self._model is None:
            await self._read_card(alive)  # before anybody is told that they are there: without it nothing is served
        self._heard |= dict.fromkeys(alive, self._ticks)
        lengths = self._max_model_lens | {sign.replica: sign.max_model_len for sign in signs}
        self._max_model_lens = {name: length for name, length in lengths.items() if name in self._heard}
        if alive:
            self._woken_at, self._failed = None, False
            self._found.set()
        if alive - self._described or (alive and self._describer not in alive):
            await self._read_card(alive)
        elif alive:  # some are gone: to read the same card again would keep streams waiting that they leave behind
            self._described = alive
        self._promise_the_least()

    async def _broadcast(self, seconds: float, method: str, *args: object) -> list[Any]:
        """What all replicas that run answer, or fail of. Raises TimeoutError where not all do in time."""
        # Not Serve's own limit: whoever stops waiting within it leaves a traceback in the log.
        async with asyncio.timeout(seconds):
            with cancelled_there():
                return await self.engine.broadcast(method, *args).results_async(return_exceptions=True)

    async def _try_each(self, names: Iterable[str], seconds: float, method: str, *args: object) -> dict[str, Any]:
        """What each replica answers, or fails of."""
        asked = list(names)
        calls = [self._answer(Route(only=name), seconds, method, *args) for name in asked]
        return dict(zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def _answer(self, route: Route, seconds: float, method: str, *args: object) -> Any:
        """What a replica on that route answers. Raises TimeoutError where it does not in time."""
        response = ask(self.engine, method, *args, route=route)
        try:
            async with asyncio.timeout(seconds):
                with cancelled_there():
                    return await response
        except TimeoutError:
            response.cancel()
            raise

    async def _ask_a_stranger(self, known: set[str], *sign: object) -> list[Alive]:
        """A replica beside the known ones, if there is one that answers."""
        try:
            return [await self._answer(Route(never=frozenset(known)), REPLY_SECONDS, "alive", *sign)]
        except Exception as error:
            log.debug("no other replica answers: %s", error)
        return []

    def _promise_the_least(self) -> None:
        least = min((self._max_model_lens[name] for name in self.replicas), default=None)
        if self._model is not None and least is not None:
            card, tokenizer = self._model
            self._model = replace(card, max_model_len=least), tokenizer

    async def _read_card(self, alive: set[str]) -> None:
        """Ask a replica for the card, a new one where there is one: it may have another drafter.

        Where it does not answer, the card that is known stays until the next look.
        """
        name = min(alive - self._described or alive)
        known, digest = self._model, self._digest
        try:
            packed = (await self._try_each([name], METRICS_SECONDS, "describe", digest))[name]
            if isinstance(packed, BaseException):
                raise packed
            if known is not None and packed.digest == digest:
                model = ModelCard(**packed.facts, tokenizer=known[0].tokenizer), known[1]
            else:
                # In a thread: streams must go on meanwhile.
                tokenizer = await asyncio.to_thread(unpacked_tokenizer, packed)
                card = ModelCard(**packed.facts, tokenizer=tokenizer)
                model = card, tokenizer_backend(card)
        except Exception as error:  # of the call, or of a replica of another version
            why = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            if why != self._not_read:
                self._not_read = why
                log.warning("%s does not tell what it serves: %s", name, why)
            return
        self._model, self._digest, self._not_read = model, packed.digest, ""
        self._described, self._describer = alive, name
