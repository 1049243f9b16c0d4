"""A training worker that leaves what it holds: its drafter's bits at each measurement, and a checkpoint every step."""

import json
import os
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ray.util.queue import Queue

from cluster.training.train_worker import work
from tidar_core.convert import run, trainer
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.pace import SavePace
from tidar_core.model.weights import named_tensors


def observed_work(options: ConvertOptions, spent: float, queue: Queue) -> Progress:
    """As `work`; `<work>/seen-<rank>.json` gets {step: hash of the drafter}, `<work>/pid-<rank>` the process. The
    second worker does not get past step 16 until `<work>/struck` is there, lest it end before somebody kills it."""
    SavePace.due = lambda *_: True  # type: ignore[method-assign]
    seen: dict[int, str] = {}

    def train_drafter(*arguments: Any) -> Progress:
        *others, watch, crew, origin = arguments
        (options.work / f"pid-{crew.rank}").write_text(str(os.getpid()))

        def measured(result: Any, adapter: Any, progress: Progress, best: bool) -> None:
            while crew.rank == 1 and progress.step == 16 and not (options.work / "struck").exists():
                time.sleep(0.05)
            bits = blake2b(b"".join(tensor.numpy().tobytes() for _, tensor in named_tensors(adapter)))
            seen[progress.step] = bits.hexdigest()
            (options.work / f"seen-{crew.rank}.json").write_text(json.dumps(seen))
            watch.measured(result, adapter, progress, best)

        return trainer.train_drafter(*others, replace(watch, measured=measured), crew, origin)

    run.train_drafter = train_drafter
    return work(options, spent, queue)


def seen_by(directory: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / f"seen-{rank}.json").read_text())
    return found
