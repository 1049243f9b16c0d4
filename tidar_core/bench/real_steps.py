"""What real steps take compared with the curves of warm-up: the engine's policy learns it as it serves, and a
simulation of it has to know it beforehand.

The curves are passes and heads, measured one apart from the other and at their fastest. A real step also plans, lays
rows and commits, and picks drafts by a slot head, which no curve has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from tidar_core.bench.simulate import always
from tidar_core.config import ConfigError
from tidar_core.engine import Engine, EngineInfo
from tidar_core.engine.draft_policy import DraftPolicy, Load, SequenceView, best_shape
from tidar_core.engine.step_cost import StepCost, StepSize
from tidar_core.layout import PLAIN, Shape
from tidar_core.request import Request, SamplingParams

SETTLING, STEPS = 4, 24  # steps of each kind: that come first, which find cold caches, and that count


@dataclass(frozen=True, slots=True)
class RealSteps:
    """Steps of `batch` answers, plain ones and ones that draft in `shape`: medians of their seconds and of the ratio to
    what the curves say (`StepCost.plain`, `StepCost.drafting`). picking_seconds: what picking drafts takes of a
    drafting step in which all sequences pick some."""

    batch: int
    shape: Shape
    plain: float
    drafting: float
    plain_seconds: float
    drafting_seconds: float
    picking_seconds: float

    def learnt(self, cost: StepCost) -> StepCost:
        """The cost as a policy knows it that has seen such steps for long."""
        return replace(cost, plain=self.plain, drafting=self.drafting)


def measure_real_steps(
    engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, acceptance: Sequence[float]
) -> RealSteps:
    """Decodes with `batch` sequences, plainly and in the drafting shape that is best by the curves at this acceptance.
    Raises ConfigError where the engine does not run so many at once."""
    info = engine.info
    load = Load(batch, context=sum(map(len, prompts)) // len(prompts))
    shape, _, _ = best_shape(info.cost, acceptance, info.block_length, load, batch)
    plain, drafting = (_measured(engine, prompts, batch, wanted) for wanted in (PLAIN, shape))
    return RealSteps(
        batch,
        shape,
        plain=median(seconds / curves for seconds, curves in plain),
        drafting=median(seconds / curves for seconds, curves in drafting),
        plain_seconds=median(seconds for seconds, _ in plain),
        drafting_seconds=median(seconds for seconds, _ in drafting),
        picking_seconds=engine.picking_seconds(batch, shape.block - 1),
    )


class _Watching(DraftPolicy):
    """A policy that lets all sequences decode in one shape, and notes for steps of the whole batch the seconds that
    they took and those that the curves say."""

    def __init__(self, info: EngineInfo, batch: int, shape: Shape):
        super().__init__(info.block_length, info.cost, info.expected_acceptance)
        self._batch, self._drafts, self._choose = batch, bool(shape.block), always(shape)
        self.seen: list[tuple[float, float]] = []

    def choose(self, views: Sequence[SequenceView], prompt_rows: int, coming: int = 0) -> list[Shape]:
        return self._choose(views)

    def took(self, size: StepSize, seconds: float) -> None:
        if not size.unscored and size.sequences == self._batch and bool(size.mask) == self._drafts:
            self.seen.append((seconds, self.cost.seconds(size)))


def _measured(
    engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, shape: Shape
) -> list[tuple[float, float]]:
    watching, steps = _Watching(engine.info, batch, shape), SETTLING + STEPS
    own = engine.use_policy(watching)
    try:
        # They are ended once enough was seen: longer than that they only are where prompts have to be read first.
        params = SamplingParams(max_tokens=4 * steps * (shape.drafts + 1), temperature=0.0, ignore_eos=True)
        names = [f"real step {number}" for number in range(batch)]
        for number, name in enumerate(names):
            engine.submit(Request(name, prompts[number % len(prompts)], params, cut=True))
        while engine.has_work and len(watching.seen) < steps:
            engine.step()
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
    finally:
        engine.use_policy(own)
    if not watching.seen:
        raise ConfigError(f"this engine never decodes {batch} of these prompts at once: take a smaller --batch")
    return watching.seen[-STEPS:]
