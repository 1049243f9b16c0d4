"""When a training is measured on held-out documents: often, and yet for a small share of its time."""

from dataclasses import dataclass

from tidar_core.convert.checkpoint import SETTLED, Progress


@dataclass(slots=True)
class Pace:
    """Tells when the next measurement of a run is due, and what it counts for. Times are seconds of training
    (`Progress.seconds`).

    least_seconds: between two measurements, at least. share: of the time, that measuring takes at most. every_steps:
    measure whenever so many steps were taken instead; 0 where the time decides. measured_at: when the last measurement
    ended; before the first, what its wait is counted from. expected: how long the next one will take. looked: whether
    this run has measured before.
    """

    least_seconds: float
    share: float
    every_steps: int = 0
    measured_at: float = 0.0
    expected: float = 0.0
    looked: bool = False

    def due(self, progress: Progress) -> bool:
        """Whether to measure now; always before the first step of a training."""
        if self.every_steps:
            return progress.step % self.every_steps == 0
        wait = max(self.least_seconds, self.expected / self.share)
        return not progress.step or progress.seconds - self.measured_at >= wait

    def counts(self, used: float) -> bool:
        """Whether a measurement without gain brings the training's end nearer. used: the share of the budget.

        A run's first does not: it finds what the run before had found, and is no sign that nothing is gained any more.
        """
        return self.looked and used >= SETTLED

    def measured(self, progress: Progress, seconds: float, typical: bool = True) -> None:
        """Adds a measurement's seconds to the training's. typical: whether the next one will take as long."""
        progress.seconds += seconds
        self.measured_at, self.expected, self.looked = progress.seconds, seconds if typical else 0.0, True
