"""How a starting replica tells the terminal of `tidar up` what it does: lines on a board, a small Ray actor.

Where nobody put up a board (an application deployed by other means), the lines go to the replica's log alone.
"""

import logging
from dataclasses import dataclass
from typing import Any

import ray

BOARD = "tidar-progress"
NAMESPACE = "tidar"

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
        self._lines: list[Line] = []

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def since(self, count: int) -> list[Line]:
        """Lines after the first `count`."""
        return self._lines[count:]


class ProgressLine:
    """A replica's way to the board."""

    def __init__(self, replica: str):
        self._replica = replica
        self._board: Any = None
        try:
            self._board = ray.get_actor(BOARD, namespace=NAMESPACE)
        except ValueError:
            log.info("no progress board on this cluster; progress goes to this log alone")

    def report(self, text: str) -> None:
        log.info(text)
        if self._board is not None:
            self._board.add.remote(Line(self._replica, text))

    def fail(self, text: str) -> None:
        log.error(text)
        if self._board is not None:
            self._board.add.remote(Line(self._replica, text, fatal=True))


def put_up_board() -> Any:
    """The board of this cluster, a new one where there is none; it goes with the driver that put it up."""
    return ray.remote(num_cpus=0)(Board).options(name=BOARD, namespace=NAMESPACE, get_if_exists=True).remote()
