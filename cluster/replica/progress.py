"""How a starting replica tells the terminal of `tidar up` what it does: lines on a board, which is a few keys in the
store of Ray's head, for an actor would be a process of its own.

Where nobody put up a board (an application deployed by other means), the lines go to the replica's log alone.
"""

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from ray.exceptions import RayError
from ray.experimental import internal_kv

BOARD = "tidar-progress"
NAMESPACE = "tidar"
QUIET_SECONDS = 10.0

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Line:
    """What a replica said; `fatal` where it cannot start and says why."""

    replica: str
    text: str
    fatal: bool = False


class Board:
    """Lines in the order in which they came."""

    def __init__(self) -> None:
        self._read: set[bytes] = set()

    def news(self) -> list[Line]:
        """Lines since the last call."""
        keys = sorted(set(internal_kv._internal_kv_list(f"{BOARD}/", namespace=NAMESPACE)) - self._read)
        self._read.update(keys)
        return [Line(**json.loads(internal_kv._internal_kv_get(key, namespace=NAMESPACE))) for key in keys]

    def take_down(self) -> None:
        """Lines that nobody reads would stay for as long as the cluster does."""
        internal_kv._internal_kv_del(BOARD, del_by_prefix=True, namespace=NAMESPACE)


class ProgressLine:
    """A replica's way to the board."""

    def __init__(self, replica: str):
        self._replica = replica
        self._stage, self._said = "", 0.0
        self._board_is_up = internal_kv._internal_kv_exists(BOARD, namespace=NAMESPACE)
        if not self._board_is_up:
            log.info("no progress board on this cluster; progress goes to this log alone")

    def report(self, text: str) -> None:
        log.info(text)
        self._said = time.monotonic()
        self._put(Line(self._replica, text))

    def begin(self, stage: str) -> None:
        """Reports a stage, of which `advance` may tell how far it is."""
        self._stage = stage
        self.report(stage)

    def advance(self, done: int, total: int) -> None:
        """Reports how far the stage is, where nothing was reported for a while: a large model is read for minutes."""
        if time.monotonic() - self._said >= QUIET_SECONDS and done < total:
            self.report(f"{self._stage}: {done / total:.0%}")

    def fail(self, text: str) -> None:
        log.error(text)
        self._put(Line(self._replica, text, fatal=True))

    def _put(self, line: Line) -> None:
        if self._board_is_up:
            with suppress(RayError):  # without its head a replica goes on
                key = f"{BOARD}/{time.time_ns():020}/{self._replica}"
                internal_kv._internal_kv_put(key, json.dumps(asdict(line)), namespace=NAMESPACE)


def put_up_board() -> Board:
    """An empty board for this cluster; what one was told whose driver was killed is forgotten."""
    board = Board()
    board.take_down()
    internal_kv._internal_kv_put(BOARD, b"", namespace=NAMESPACE)
    return board
