"""What a user chooses of a conversion, who is told how it goes, and who trains."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tidar_core.config import Device, DTypeName
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.own_words import GatherProgress, Goal
from tidar_core.convert.trainer import StepReport, TrainConfig
from tidar_core.model.adapter_config import Projection

Generator = Literal["engine", "transformers"]
Mode = Literal["adapter", "full"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What a user chooses. minutes: for everything, earlier runs included. own_tokens: how many to gather, in 90 % of
    the time at most where `steps` is 0; 0 for what fits into 45 %. steps: optimizer steps, 0 for what fits into the
    rest. start: an adapter to go on from, "default" for the shipped one, "none" for a new one. projections, layers
    (None: all): what a new one adapts, or what is kept of the one to go on from.

    mode: a drafter beside the base, or full TiDAR weights. For full weights nothing is generated where `text` is given,
    unless `prompts` or `own_tokens` are; what `data` holds already is learnt from as well.
    """

    model: str
    out: Path
    data: Path | None = None
    minutes: float = 60.0
    own_tokens: int = 0
    steps: int = 0
    prompts: Path | None = None
    text: Path | None = None
    start: str = "none"
    rank: int = 32
    projections: tuple[Projection, ...] | None = None
    layers: tuple[int, ...] | None = None
    generator: Generator = "engine"
    device: Device = "auto"
    dtype: DTypeName = "bfloat16"
    threads: int = 0
    answer_tokens: int = 320
    mode: Mode = "adapter"
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".work")

    @property
    def lock(self) -> Path:
        """The folder of the run's lock: `work`. Where `out` is a link it lies beside the folder that this leads to, so
        that a run by the other name finds it."""
        out = self.out.resolve()
        return out.with_name(out.name + ".work") if os.access(out.parent, os.W_OK) else self.work

    @property
    def shards(self) -> Path:
        return self.data or self.work / "data"


class Screen(Protocol):
    """Who shows the user how it goes. used: the share of the budget; fraction: of what the device can compute."""

    def line(self, text: str) -> None:
        """A line of its own."""
        ...

    def loading(self, done: int, total: int) -> None:
        """So many of the weights are read."""
        ...

    def gathered(self, gathered: GatherProgress, goal: Goal) -> None:
        """How far gathering is."""
        ...

    def trained(self, report: StepReport, used: float, fraction: float | None) -> None:
        """A step was taken."""
        ...

    def measured(self, result: HeldOutResult, progress: Progress, best: bool) -> None:
        """A drafter was measured. best: it is the best so far, and was kept."""
        ...


Train = Callable[[ConvertOptions, float, Screen], Progress]
