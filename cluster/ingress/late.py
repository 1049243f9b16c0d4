"""A stream that begins before its first token, where that is late: a model is woken, or reads a long prompt.

Until then what goes wrong has a status of its own; from then on it is told in the stream. Proxies on the way, many of
which give up after a minute's silence, see the stream's comments instead.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response

from cluster.errors import ApiError, server_error
from cluster.ingress.outcomes import Outcome
from cluster.wire.completions_told import EventStreamResponse

LATE_SECONDS = 15.0
LOOK_SECONDS = 1.0  # between two looks whether a stream is asked for, where that is not known by then

log = logging.getLogger("ray.serve")


async def begun_in_time(
    making: Coroutine[Any, Any, Response], failed: Callable[[ApiError], bytes], outcome: Outcome
) -> Response:
    """The response that is made, or, where a stream was asked for and `LATE_SECONDS` are over, one that goes on as that
    one does. Raises what `making` raises before that; what it raises then is told by `failed`, all that is in the
    stream, and to `outcome`. `making` ends where this is cancelled, and where the stream is closed before it begins."""
    made = asyncio.create_task(making)
    try:
        await asyncio.wait({made}, timeout=LATE_SECONDS)
        while not made.done() and outcome.streams is None:  # the body waits behind others to be read
            await asyncio.wait({made}, timeout=LOOK_SECONDS)
        if made.done() or not outcome.streams:
            return await made
        events = _events_once(made, failed, outcome)
        await anext(events)
        return EventStreamResponse(events)
    except asyncio.CancelledError:
        await _given_up(made)
        raise


async def _events_once(
    made: asyncio.Task[Response], failed: Callable[[ApiError], bytes], outcome: Outcome
) -> AsyncGenerator[bytes, None]:
    """Nothing at first: only a generator that has begun does anything when it is closed."""
    try:
        yield b""
        response = await made
        assert isinstance(response, EventStreamResponse)
        async with aclosing(response.events) as events:
            async for event in events:
                yield event
    except Exception as error:
        outcome.broke(error)
        if not isinstance(error, ApiError):
            log.error("a stream failed before its first token", exc_info=error)
        yield failed(error if isinstance(error, ApiError) else server_error())
    finally:
        await _given_up(made)


async def _given_up(made: asyncio.Task[Response]) -> None:
    """Until it has ended: the request's span and counts, to which it adds what came of it, end behind this."""
    made.cancel()
    await asyncio.gather(made, return_exceptions=True)
