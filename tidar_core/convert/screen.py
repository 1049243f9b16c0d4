"""How a conversion is shown in the terminal: a bar for each stage, what is measured, an honest time left."""

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tidar_core.convert.checkpoint import Progress as TrainProgress
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.own_words import GatherProgress, Goal
from tidar_core.convert.trainer import StepReport

MEMORY = 120.0  # seconds that a rate is taken over
LINE_SECONDS = 60.0  # between lines where there is no terminal


class Rate:
    """How fast something grows, over the last two minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def see(self, amount: float) -> None:
        now = time.monotonic()
        self._seen.append((now, amount))
        while len(self._seen) > 2 and now - self._seen[0][0] > MEMORY:
            self._seen.popleft()

    def a_second(self) -> float:
        """0 until two moments were seen, and where it shrinks."""
        (first, low), (last, high) = self._seen[0], self._seen[-1]
        return max(0.0, high - low) / (last - first) if last > first else 0.0

    def seconds_for(self, amount: float) -> float | None:
        """How long `amount` more takes at this rate; None where nobody can know."""
        speed = self.a_second()
        return max(0.0, amount) / speed if speed > 0 else None


def time_left(seconds: float | None) -> str:
    """In words; None where nobody knows."""
    if seconds is None:
        return "time left unknown yet"
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"


class TerminalScreen:
    """Bars on a terminal, one line a minute elsewhere. Use as a context manager."""

    def __init__(self, console: Console):
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[say]}"))
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._stage = ""
        self._rate, self._rows = Rate(), Rate()
        self._line_due = 0.0

    def __enter__(self) -> "TerminalScreen":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def loading(self, done: int, total: int) -> None:
        if done < total:
            self._show("reading weights", done / total, f"{done / total:.0%}", quiet=True)
        elif self._task is not None:  # what comes next may take minutes and shows no bar
            self._bars.remove_task(self._task)
            self._bars.refresh()
            self._task = None

    def gathered(self, gathered: GatherProgress, goal: Goal) -> None:
        tokens = gathered.own_tokens + gathered.growing
        self._begin("gathering its own words")
        self._rate.see(tokens)
        left: float | None = None
        if goal.own_tokens:
            share = tokens / goal.own_tokens
            if share < 1 or not gathered.asked:  # what answers to prompts bring beyond the goal nobody knows
                left = self._rate.seconds_for(goal.own_tokens - tokens)
            if left is not None and gathered.until:
                left = min(left, max(0.0, gathered.until - gathered.seconds))
        else:
            share, left = gathered.seconds / gathered.until, max(0.0, gathered.until - gathered.seconds)
        say = f"{gathered.documents:,} documents, {tokens:,} tokens, {self._rate.a_second():,.0f} a second, "
        if gathered.asked:
            say += f"{gathered.asked:,} given prompts to answer, "
        self._show("gathering its own words", share, say + time_left(left))

    def trained(self, report: StepReport, used: float, fraction: float | None) -> None:
        progress = report.progress
        self._begin("training")
        self._rate.see(used)
        self._rows.see(progress.rows)
        rows = f"{speed:,.0f} mask rows a second" if (speed := self._rows.a_second()) else "mask rows not counted yet"
        left = time_left(self._rate.seconds_for(1.0 - used))
        of_peak = "" if fraction is None else f" ({fraction:.0%} of peak)"
        # What is left stands first: a terminal of 80 columns cuts the end off.
        say = f"{left}, step {progress.step:,}, loss {report.loss:.3f}, {rows}{of_peak}"
        self._show("training", used, say)

    def measured(self, result: HeldOutResult, progress: TrainProgress, best: bool) -> None:
        slots = " ".join(f"{share:.2f}" for share in result.all_right)
        kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in result.by_kind.items())
        self.line(
            f"step {progress.step:,}, {progress.rows:,} mask rows: {result.tokens_per_step:.3f} tokens per step on "
            f"{result.documents} held-out documents ({kinds}); slots {slots}{', kept' if best else ''}"
        )

    def _begin(self, stage: str) -> None:
        if stage != self._stage:
            self._stage, self._rate, self._rows = stage, Rate(), Rate()

    def _show(self, stage: str, share: float, say: str, quiet: bool = False) -> None:
        if self._bars.disable:
            if not quiet and time.monotonic() >= self._line_due:
                self.line(f"{stage}: {min(share, 1.0):.0%}, {say}")
                self._line_due = time.monotonic() + LINE_SECONDS
            return
        if self._task is None:
            self._task = self._bars.add_task(stage, total=1.0, say=say)
        self._bars.update(self._task, description=stage, completed=min(share, 1.0), say=say)
