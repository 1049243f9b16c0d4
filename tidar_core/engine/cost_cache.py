"""Step costs that were measured before, kept on disk: a start need not measure what it can look up and check.

What a step costs depends on the weights' shapes and dtype, the drafter, the kernels, the kind of processor and the
number of threads; a file is named after all of them. A machine may be slower today than it was then, so a few points
are looked at. Where they changed alike the costs are taken times that, as on machines that others share, whose pace is
another from minute to minute, and where they were measured on a busy one; where some changed more than others all is
measured anew. That they are slower in a moment when other programs take the processor away, as when replicas start
beside those that answer, is no reason: that would be measured, and cost time just then.
"""

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tidar_core.engine.step_cost import FloatArray, StepCost
from tidar_core.files import write_atomically
from tidar_core.kernels.sources import code_digest

LOOKS = 2  # before all is measured anew
APART = 1.2  # times by which one thing may have changed more or less than they do in the middle
# While costs are checked. Seen: up to 5 in a short check and 20 a second in a long one where nothing else ran, over 100
# a second beside four busy programs.
BUSY_PREEMPTIONS, BUSY_PREEMPTIONS_A_SECOND = 5, 50


def cost_file(directory: Path, **depends_on: Any) -> Path:
    """Where the costs of an engine are kept that depend on these things and on the kernels' own code."""
    named = json.dumps([code_digest(), depends_on], sort_keys=True, default=str)
    digest = hashlib.sha256(named.encode())
    return directory / f"step-cost-{digest.hexdigest()[:16]}.json"


def own_preemptions() -> int:
    """How often the kernel has taken the processor from this thread (from this process, where it does not tell)."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nivcsw


def known_cost(
    path: Path,
    measure: Callable[[], StepCost],
    check: Callable[[StepCost], Iterable[tuple[float, float]]],
    preemptions: Callable[[], int] = own_preemptions,
) -> StepCost:
    """The cost kept in `path`, scaled to today's pace, where it still holds; else what `measure` finds, which is then
    kept there.

    check(cost) gives pairs (seconds by the cost, seconds now) of a few works; preemptions() counts how often the
    processor was given to other programs. A file that cannot be read or written is ignored.
    """
    cost = _read(path)
    if cost is not None and (pace := _pace_now(partial(check, cost), preemptions)) is not None:
        return cost.at_pace(pace)
    cost = measure()
    _write(path, cost)
    return cost


def _pace_now(check: Callable[[], Iterable[tuple[float, float]]], preemptions: Callable[[], int]) -> float | None:
    """How many times as long all works of a check take now as before, by the fastest of a few looks, since other
    programs may disturb some of them alone. None where the works do not agree."""
    fastest: FloatArray | None = None
    busy = True  # in each look so far: that makes things slower, and tells at most how much faster they have become
    for _ in range(LOOKS):
        began, before_look = time.perf_counter(), preemptions()
        before, now = np.array(list(check())).T
        most = BUSY_PREEMPTIONS + BUSY_PREEMPTIONS_A_SECOND * (time.perf_counter() - began)
        busy = busy and preemptions() - before_look > most
        fastest = now if fastest is None else np.minimum(fastest, now)
        if not ((before > 0).all() and (fastest > 0).all()):
            return None
        ratios = fastest / before
        pace = float(np.median(ratios))
        pace = min(1.0, pace) if busy else pace
        if ratios.min() >= pace / APART and (busy or ratios.max() <= pace * APART):
            return pace
    return None


def _read(path: Path) -> StepCost | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        rows, trunk, head, adapter = (tuple(held[name]) for name in ("rows", "trunk", "head", "adapter"))
        if not rows or {len(rows)} != {len(trunk), len(head), len(adapter)}:
            return None
        return StepCost(rows, trunk, head, adapter, held["reading"], held["attending"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, cost: StepCost) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own_part = f"{{}}.{os.getpid()}.part"  # replicas that start together measure the same
        write_atomically({path: json.dumps(asdict(cost)).encode()}, own_part)
