"""The draft policy without a model: a measured cost of steps, and recorded traces of how far drafts held.

A trace tells for each position of an answer how many drafts in a row would hold if they were drafted behind it, which
does not depend on what was drafted before. With it any policy can be walked through the answer and timed by the cost
curves, and by how many times that real steps take: drafts off, full drafting, every fixed shape, our policy, and an
oracle that knows the trace.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from tidar_core.engine.acceptance_rates import AcceptanceRates
from tidar_core.engine.draft_policy import DraftPolicy, SequenceView, candidate_shapes
from tidar_core.engine.step_cost import StepCost, StepSize
from tidar_core.layout import Shape, fit_shape, full_shape


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer. accepted[t]: how many drafts behind its token t hold in a row, 0 … block length - 1. context: tokens
    of the prompt before it."""

    accepted: tuple[int, ...]
    context: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """tokens_per_second of a batch of `batch` sequences, and tokens_per_step of each. shape: of a fixed setting."""

    batch: int
    setting: str
    tokens_per_second: float
    tokens_per_step: float
    shape: Shape | None = None


@dataclass(slots=True)
class _Walker:
    """A sequence on its way through a trace: its last token's place, drafts in hand, and how many of them hold."""

    trace: Trace
    acceptance_rates: AcceptanceRates
    place: int = 0
    in_hand: int = 0
    holding: int = 0

    @property
    def context(self) -> int:
        return self.trace.context + self.place

    @property
    def arrived(self) -> bool:
        return self.place >= len(self.trace.accepted) - 1

    def fit(self, wanted: Shape) -> Shape:
        remaining = max(1, len(self.trace.accepted) - 1 - self.place)
        return fit_shape(
            wanted, drafts_in_hand=self.in_hand, remaining=remaining, position=self.place, max_positions=1 << 30
        )

    def step(self, shape: Shape) -> int:
        """Tokens that the step emits."""
        committed = 1 + min(shape.drafts, self.holding)
        if shape.drafts:
            self.acceptance_rates.observe(shape.drafts, committed - 1)
        left = committed == shape.drafts + 1 and self.holding > shape.drafts
        self.place += committed
        if committed in shape.proposals:
            self.in_hand = shape.block - 1
            self.holding = min(self.in_hand, self.trace.accepted[self.place])
        else:
            self.in_hand = self.in_hand - committed if left else 0
            self.holding = self.holding - committed if left else 0
        return committed


Choose = Callable[[Sequence[SequenceView]], list[Shape]]


def always(shape: Shape) -> Choose:
    """Chooses one shape for all; a sequence without drafts in hand drafts first."""
    renewing = Shape(0, (1,), shape.block) if shape.proposals else Shape()
    return lambda views: [shape if view.drafts_in_hand else renewing for view in views]


def simulate(
    cost: StepCost, traces: Sequence[Trace], batch: int, tokens: int, policy: DraftPolicy, choose: Choose
) -> tuple[float, float]:
    """Tokens per second and tokens per step of a batch that always has `batch` sequences, over `tokens` tokens."""
    waiting = cycle(traces)
    walkers = [_Walker(next(waiting), policy.new_acceptance_rates()) for _ in range(batch)]
    emitted = steps = 0
    seconds = 0.0
    while emitted < tokens:
        views = [SequenceView("auto", w.in_hand, policy.block_length, w.context, w.acceptance_rates) for w in walkers]
        shapes = [walker.fit(shape) for walker, shape in zip(walkers, choose(views), strict=True)]
        picking = [shape for shape in shapes if shape.proposals]
        size = StepSize(
            unscored=0,
            verify=sum(shape.verify_rows for shape in shapes),
            mask=sum(shape.mask_rows for shape in shapes),
            slots=sum(len(shape.proposals) * (shape.block - 1) for shape in picking),
            picked=sum(shape.block - 1 for shape in picking),
            sequences=batch,
            context=sum(walker.context for walker in walkers) / batch,
        )
        emitted += sum(walker.step(shape) for walker, shape in zip(walkers, shapes, strict=True))
        seconds += cost.seconds(size)
        steps += batch
        walkers = [
            _Walker(next(waiting), policy.new_acceptance_rates()) if walker.arrived else walker for walker in walkers
        ]
    return emitted / seconds, emitted / steps


def compare_settings(
    cost: StepCost,
    traces: Sequence[Trace],
    block_length: int,
    batch: int,
    tokens: int,
    expected_acceptance: Sequence[float] = (),
) -> list[Simulated]:
    """Drafts off, full, the best fixed shape, the policy, and for one sequence the oracle."""

    def full(views: Sequence[SequenceView]) -> list[Shape]:
        return [full_shape(block_length, view.drafts_in_hand) for view in views]

    def run(setting: str, choose: Choose, shape: Shape | None = None, policy: DraftPolicy | None = None) -> Simulated:
        rate, per_step = simulate(cost, traces, batch, tokens, policy or DraftPolicy(block_length, cost), choose)
        return Simulated(batch, setting, rate, per_step, shape)

    policy = DraftPolicy(block_length, cost, expected_acceptance)
    shapes = {shape for shape, _ in candidate_shapes(mean_acceptance(traces, block_length), block_length)}
    best = max((run("best fixed", always(s), s) for s in (Shape(), *shapes)), key=lambda found: found.tokens_per_second)
    results = [
        run("off", always(Shape())),
        run("full", full),
        best,
        run("auto", lambda views: policy.choose(views, 0), policy=policy),
    ]
    if batch == 1:
        results.append(_oracle(cost, traces, block_length, tokens))
    return results


def mean_acceptance(traces: Sequence[Trace], block_length: int) -> tuple[float, ...]:
    """P(draft i holds | drafts 1 … i-1 hold) over all places of all traces."""
    reached = [sum(count >= i for trace in traces for count in trace.accepted) for i in range(block_length)]
    return tuple(reached[i] / max(1, reached[i - 1]) for i in range(1, block_length))


def _oracle(cost: StepCost, traces: Sequence[Trace], block_length: int, tokens: int) -> Simulated:
    """The result of a policy that knows how far all drafts hold: it verifies only those that do, and drafts only for
    the outcome that comes. Computed backwards, from the end of each answer."""
    emitted = steps = 0
    seconds = 0.0
    for trace in _enough(traces, tokens):
        end = len(trace.accepted) - 1
        context = trace.context + end / 2
        price = {
            (drafts, block): cost.seconds(
                StepSize(0, 1 + drafts, block, max(0, block - 1), max(0, block - 1), 1, context)
            )
            for drafts in range(block_length)
            for block in (0, *range(2, block_length + 1))
        }
        # best[place][drafts in hand that hold]: seconds to the end, and steps
        best = [[(0.0, 0)] * block_length for _ in range(end + block_length + 1)]
        for place in range(end - 1, -1, -1):
            for holding in range(block_length):
                best[place][holding] = min(_moves(trace, place, holding, block_length, price, best))
        seconds += best[0][0][0]
        steps += best[0][0][1]
        emitted += end
    return Simulated(1, "oracle", emitted / seconds, emitted / steps)


def _moves(
    trace: Trace,
    place: int,
    holding: int,
    block_length: int,
    price: dict[tuple[int, int], float],
    best: list[list[tuple[float, int]]],
) -> Iterator[tuple[float, int]]:
    end = len(trace.accepted) - 1
    for drafts in range(min(holding, end - place - 1) + 1):
        there = place + drafts + 1
        for block in (0, *range(2, block_length + 1)):
            after = min(trace.accepted[there], block - 1) if block else max(0, holding - drafts - 1)
            seconds, steps = best[there][after]
            yield seconds + price[drafts, block], steps + 1


def _enough(traces: Sequence[Trace], tokens: int) -> Iterator[Trace]:
    for trace in cycle(traces):
        if tokens <= 0:
            return
        tokens -= len(trace.accepted) - 1
        yield trace
