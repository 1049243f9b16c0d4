"""What a step costs here: curves measured at warm-up, and how to read them."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
NO_TIE = 1 - 1e-9  # what costs as much but for rounding is not cheaper, whichever way it was added up
BUSY_SHARE = 0.8  # of the most tokens per second that a batch of any size gives


@dataclass(frozen=True, slots=True)
class StepSize:
    """How many rows of each kind a step runs. unscored: verify rows whose scores nobody wants, as most of a prompt's.
    verify: those whose scores are wanted. mask: mask rows. slots: mask rows that may become drafts; picked: those that
    do become drafts if every sequence finds its outcome among its proposals. context: the average number of tokens of
    the `sequences`."""

    unscored: float
    verify: float
    mask: float = 0.0
    slots: float = 0.0
    picked: float = 0.0
    sequences: float = 0.0
    context: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured seconds at a few row counts (ascending); interpolated between, extended linearly beyond.

    trunk: all layers, with next to no context. head: scores and the token rule. adapter: what mask rows cost beside
    the trunk. reading, attending: what a token of context costs each sequence, and each row. plain, drafting: real
    steps without and with mask rows took so many times what the curves say.
    """

    rows: tuple[int, ...]
    trunk: tuple[float, ...]
    head: tuple[float, ...]
    adapter: tuple[float, ...]
    reading: float = 0.0
    attending: float = 0.0
    plain: float = 1.0
    drafting: float = 1.0

    def seconds(self, size: StepSize, any_hit: float = 1.0) -> float:
        """Seconds of a whole step. any_hit: the probability that drafts are picked at all."""
        # `draft_policy._step_seconds` is the same formula for many shapes at once.
        rows = size.unscored + size.verify + size.mask
        attention = size.context * (size.sequences * self.reading + rows * self.attending)
        trunk = self.trunk_seconds(rows) + attention
        if not size.mask:
            return self.plain * (trunk + self.head_seconds(size.verify))
        if self.at_once(size):
            head = self.head_seconds(size.verify + size.slots)
        else:
            head = self.head_seconds(size.verify) + any_hit * self.head_seconds(size.picked)
        return self.drafting * (trunk + self.adapter_seconds(size.mask) + head)

    def trunk_seconds(self, rows: float) -> float:
        """All layers of so many rows of whichever kind, without the adapter and without context."""
        return self._at(self.trunk, rows)

    def adapter_seconds(self, mask: float) -> float:
        """What so many mask rows cost beside the trunk."""
        return self._at(self.adapter, mask) if mask else 0.0

    def head_seconds(self, rows: float) -> float:
        """Scores and tokens of so many rows, in one pass over the head."""
        return self._at(self.head, rows) if rows else 0.0

    def at_once(self, size: StepSize) -> bool:
        """Whether one pass of the head over verify rows and all slots costs less than two: first the verify rows, then
        the slots of the proposals that came true."""
        if not size.slots:
            return False
        apart = self.head_seconds(size.verify) + self.head_seconds(size.picked)
        return self.head_seconds(size.verify + size.slots) < NO_TIE * apart

    def full_batch(self, most: int) -> int:
        """How many sequences keep this engine busy: the fewest, of at most `most`, that give `BUSY_SHARE` of the most
        tokens per second that any number gives. More of them hardly raise what it yields, and each waits longer."""
        rates = [n / self.seconds(StepSize(unscored=0, verify=n, sequences=n)) for n in range(1, most + 1)]
        return next(n for n, rate in enumerate(rates, 1) if rate >= BUSY_SHARE * max(rates))

    def full_seconds(self, block: int, sequences: int) -> float:
        """Seconds of a step in which so many sequences draft fully, with blocks of `block` slots."""
        size = StepSize(0, sequences * block, mask=sequences * block * block, sequences=sequences)
        return self._seconds_at_least(size)

    def rows_within(self, seconds: float, context: int, most: int) -> int:
        """How many rows of one prompt, behind `context` tokens, a step computes in so many seconds; `most` at most."""
        return bisect_right(
            range(1, most + 1),
            seconds,
            key=lambda rows: self._seconds_at_least(StepSize(rows, 0, sequences=1, context=context)),
        )

    def _seconds_at_least(self, size: StepSize) -> float:
        """As `seconds`, but more rows than were measured take as much longer as there are more of them: where another
        program disturbed the last points, the curve is flat there and would have them cost nothing."""
        rows, seconds = size.unscored + size.verify + size.mask, self.seconds(size)
        if rows <= self.rows[-1]:
            return seconds
        return max(seconds, self.plain * self.trunk[-1] * rows / self.rows[-1])

    def at_pace(self, pace: float) -> "StepCost":
        """The costs of an engine that takes `pace` times as long for everything."""
        trunk, head, adapter = (
            tuple(pace * seconds for seconds in curve) for curve in (self.trunk, self.head, self.adapter)
        )
        reading, attending = pace * self.reading, pace * self.attending
        return replace(self, trunk=trunk, head=head, adapter=adapter, reading=reading, attending=attending)

    def describe(self) -> dict[str, list[float]]:
        """The measured points for people and other programs: row counts, and milliseconds of each part there."""
        curves = {"trunk_ms": self.trunk, "head_ms": self.head, "adapter_ms": self.adapter}
        described = {name: [round(1000 * seconds, 4) for seconds in curve] for name, curve in curves.items()}
        return {"rows": list(self.rows), **described}

    def _at(self, curve: tuple[float, ...], rows: float) -> float:
        if rows <= self.rows[0]:
            return curve[0]
        if len(self.rows) == 1:
            return curve[0] * rows / self.rows[0]
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)
        return curve[right - 1] + share * (curve[right] - curve[right - 1])


def curve_at(rows: tuple[int, ...], seconds: tuple[float, ...], at: NDArray[Any]) -> FloatArray:
    """A measured curve at many row counts."""
    x, y = _points(rows, seconds)
    return np.interp(at, x, y)


@lru_cache(maxsize=16)
def _points(rows: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[FloatArray, FloatArray]:
    """The points of a curve, and one far behind them in line with the last two."""
    far = float(1 << 24)
    if len(rows) == 1:
        x, y = np.array([rows[0], far]), np.array([seconds[0], seconds[0] * far / rows[0]])
    else:
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        x, y = np.array([*rows, far]), np.array([*seconds, seconds[-1] + slope * (far - rows[-1])])
    x.setflags(write=False)
    y.setflags(write=False)
    return x, y
