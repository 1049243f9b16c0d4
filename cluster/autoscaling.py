"""How many engine replicas there should be, by what limits one: its batch, its K/V pages, the wait before it.

Ray Serve asks the policy several times a second and applies bounds and delays itself; the first replica after none it
starts by itself, for the first request that waits. It holds a copy of this module, pickled by value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ray.serve.config import AutoscalingContext

FULL = 0.8  # of what a replica can take: the rest is for what comes while another one starts
EASY = 0.75  # of what replicas shall have: above it none is taken away, lest it be started again at once
LONG_WAIT_SECONDS = 1.0
SOMEBODY = 0.5  # calls under way on average; the ingresses' looks at replicas are some too, but short
START_SECONDS = 300.0  # those that were started are let come, for so long


@dataclass(frozen=True, slots=True)
class Reading:
    """What a replica told, averaged over the last seconds. answers: under way, running or waiting. batch: how many of
    them keep its engine busy (`StepCost.full_batch`). pages: share of its K/V pages in use. wait: seconds that the
    first in its queue has waited, of those that never ran yet."""

    answers: float
    batch: float
    pages: float
    wait: float


def replicas_wanted(readings: Sequence[Reading], target: int, answers_each: float | None = None) -> int:
    """How many replicas, where `target` are wanted so far; none where nothing is under way.

    answers_each: answers under way that a replica shall have; None for as many as nearly fill its batch or its pages.
    Where requests wait at half of them, whatever the room in both, as when long prompts come, one more than there are:
    those that `target` has beside them have just been started, and shall come first.
    """
    if answers_each is not None:
        needed = sum(reading.answers for reading in readings) / answers_each
    else:
        needed = sum(max(reading.answers / reading.batch, reading.pages) / FULL for reading in readings)
        if 2 * sum(reading.wait > LONG_WAIT_SECONDS for reading in readings) >= len(readings):
            needed = max(needed, len(readings) + 1)
    return max(ceil(needed), min(ceil(needed / EASY), target))


def read(metrics: Mapping[str, Mapping[Any, float]]) -> list[Reading]:
    """A reading for each replica that told everything (`EngineReplica.record_autoscaling_stats`)."""
    columns = [metrics.get(name, {}) for name in Reading.__dataclass_fields__]
    told = set(columns[0]).intersection(*columns[1:])
    return [Reading(*(column[replica] for column in columns)) for replica in sorted(told, key=str)]


class LoadPolicy:
    """Serve's interface. answers_each: as in `replicas_wanted`."""

    def __init__(self, answers_each: float | None = None):
        self._answers_each = answers_each

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        readings = read(context.aggregated_metrics or {})
        if not readings:  # nobody runs, or those that do have yet to tell
            return context.target_num_replicas, {}
        target = context.target_num_replicas
        wanted = replicas_wanted(readings, target, self._answers_each)
        started = context.last_scale_up_time or 0.0
        if context.current_num_replicas < target and (context.current_time or 0.0) - started < START_SECONDS:
            wanted = max(wanted, target)
        if context.total_num_requests > SOMEBODY:  # as the ingresses see it, who know before a new replica tells
            wanted = max(wanted, 1)
        return wanted, {}
