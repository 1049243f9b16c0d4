"""When a training is measured on held-out documents, and when saved: often, and yet for a small share of its time."""

from dataclasses import dataclass

from tidar_core.convert.checkpoint import SETTLED, Progress

CHECKPOINT_SECONDS, CHECKPOINT_SHARE, CHECKPOINT_LATEST = 45.0, 0.05, 1800.0  # see `SavePace`


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

    def measured(self, progress: Progress, seconds: float, typical: bool = True, counted: float = 0.0) -> None:
        """Adds a measurement's seconds to the training's. typical: whether the next one will take as long. counted: how
        many of them the training has already, since the best model was saved in them."""
        progress.seconds += seconds - counted
        self.measured_at, self.expected, self.looked = progress.seconds, seconds if typical else 0.0, True


@dataclass(slots=True)
class SavePace:
    """Tells when a run's next checkpoint is due: `CHECKPOINT_SECONDS` behind the last, and rarely enough that saving
    takes `CHECKPOINT_SHARE` of the time at most: a whole model takes minutes. But a kill costs no more than
    `CHECKPOINT_LATEST` and what saving takes. Moments are of one clock, in seconds.

    saved_at: when the last one was written; before the first, when the run began. took: the seconds of the last.
    """

    saved_at: float
    took: float = 0.0

    def due(self, now: float) -> bool:
        """Whether to save now."""
        wait = max(CHECKPOINT_SECONDS, self.took / CHECKPOINT_SHARE)
        return now - self.saved_at >= min(wait, CHECKPOINT_LATEST + self.took)

    def saved(self, began: float, ended: float) -> float:
        """Takes note of a checkpoint; gives the seconds it took."""
        self.saved_at, self.took = ended, ended - began
        return self.took
