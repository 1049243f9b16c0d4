"""What an ingress knows of the replicas behind it: the model's card, and whether anyone answers."""

import asyncio
import logging
from contextlib import suppress

from prometheus_client.metrics_core import Metric
from ray.serve.handle import DeploymentHandle
from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.errors import not_ready
from cluster.prompts import prepare

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0

log = logging.getLogger("ray.serve")


class Directory:
    """Asks all replicas every second whether they live, and the first one that does for the model's card."""

    def __init__(self, engine: DeploymentHandle):
        self.engine = engine
        self.replicas: tuple[str, ...] = ()
        self._card: ModelCard | None = None
        self._backend: Tokenizer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask, on the running event loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @property
    def model(self) -> tuple[ModelCard, Tokenizer]:
        """The card and the tokenizer that many threads may use. Raises ApiError (503) while no replica answers."""
        if self._card is None or self._backend is None or not self.replicas:
            raise not_ready()
        return self._card, self._backend

    async def metrics(self) -> list[list[Metric]]:
        """Each replica's series; a replica that does not answer is left out. Raises ApiError (503) if none does."""
        try:
            answers = await self.engine.broadcast("metrics").results_async(
                timeout_s=ANSWER_SECONDS, return_exceptions=True
            )
        except Exception as error:
            raise not_ready() from error
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except TimeoutError:  # busy is not dead: Ray's own health check restarts a replica that hangs
                log.warning("replicas took more than %s s to say that they live", ANSWER_SECONDS)
            except Exception as error:  # no replica yet, or none any more
                self.replicas = ()
                log.debug("no replica answers: %s", error)
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        answers = await self.engine.broadcast("alive").results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        alive = tuple(sorted(answer for answer in answers if isinstance(answer, str)))
        if alive and self._card is None:
            card = await self.engine.describe.remote()
            self._backend = prepare(card)
            self._card = card
        self.replicas = alive
