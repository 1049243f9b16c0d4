"""What an ingress' log says of requests. Serve puts the request's id in front of each line: the client's own
`X-Request-Id` where it sent one, and the one that the answer names."""

import logging
import time
from collections.abc import Callable, Sequence

from cluster.errors import ApiError, cut
from cluster.observe.seldom import Seldom
from tidar_core.error_text import unbroken

FULL_SECONDS = 10.0  # between two lines that say that the server is full
FIELD_SECONDS, MOST_FIELDS = 600.0, 1000  # between two lines of an unknown field, and of how many there are any
LONGEST_MESSAGE = 200

log = logging.getLogger("ray.serve")


class RequestLog:
    """A line for each request that the server failed, now and then one for those that it had no room for, and one for
    fields that it does not know."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._full = Seldom(FULL_SECONDS, clock=clock)
        self._fields = Seldom(FIELD_SECONDS, MOST_FIELDS, clock)

    def ended(self, what: str, model: str, status: int, error: ApiError | None, seconds: float) -> None:
        """A request for `what` ("POST /v1/completions") ended after so long; error: where that is known to be it."""
        times = self._full.times() if status == 429 else int(status >= 500)
        if times:
            said = f"{what} for {model}" if model else what
            code = f" ({error.code})" if error is not None and error.code else ""
            why = f": {cut(unbroken(error.message), LONGEST_MESSAGE)}" if error is not None else ""
            of_several = f" ({times} such answers since this was told last)" if times > 1 else ""
            log.warning("%s ended in %d%s after %.3f s%s%s", said, status, code, seconds, why, of_several)

    def ignored(self, fields: Sequence[str]) -> None:
        """A request had fields that nobody knows."""
        if told := [name for name in fields if self._fields.times(name)]:
            log.info("ignored unknown fields: %s", ", ".join(map(repr, told)))
