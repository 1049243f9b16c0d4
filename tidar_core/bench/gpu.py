"""`tidar bench gpu`: everything that only a GPU can tell, in one command with a limit of time.

Other bench commands are run one after the other, each in a process of its own: a kernel that goes wrong ends its own
phase and no other, one that hangs is stopped, and what was found so far is on disk after every phase. The most needed
comes first: are the kernels right, how fast does the default model decode, what does a step cost.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidar_core.bench.shapes import SHAPES, STEP_SHAPES
from tidar_core.signals import SIGNALS, taken

LAST_SECONDS = 10.0  # less than this is not worth a phase's start
KEPT = 4000  # characters from either end of a failed phase's output that are kept


@dataclass(frozen=True, slots=True)
class Phase:
    """A bench command without `--json`, and the seconds it may take. where_failed: a phase; this one is run only where
    that one failed."""

    name: str
    command: tuple[str, ...]
    seconds: float
    where_failed: str | None = None


def phases(model: str) -> list[Phase]:
    """What is run, the most needed first."""
    small, *large = SHAPES
    decode = ("decode", "--model", model, "--device", "cuda", "--max-tokens", "128", "--rounds", "1")
    exact = ("exact", "--model", model, "--device", "cuda", "--prompts", "4")
    one_by_one = ("--no-overlap-steps", "--no-graphs", "--no-overlap-launches")
    batches = tuple(word for batch in (1, 8, 32, 128) for word in ("--batch", str(batch)))
    found = [
        Phase(f"kernels {small}", ("kernels", "--shape", small), 180),
        Phase("decode", (*decode, *batches), 140),
        Phase("exact", exact, 150),
        Phase("exact, nothing overlaps", (*exact, *one_by_one), 90, where_failed="exact"),  # whose fault is it?
        Phase(f"steps {small}", ("steps", "--shape", small), 60),
    ]
    # What is timed is right: heads of another size are other kernels. A hundred variants a shape, compiled one by one,
    # are most of the 75 seconds that a shape took beside an H200. The largest is whole before the next begins.
    for name in reversed(large):
        found += [
            Phase(f"kernels {name}, checks", ("kernels", "--shape", name, "--no-measure"), 120),
            Phase(f"steps {name}", ("steps", "--shape", name), 110),
        ]
    # With drafts off too ours is to have twice transformers' tokens per second: its ratio is to be a half at most.
    beside = ("peers", "--peer", "transformers", "--model", model, "--batch", "1", "--drafts", "off")
    few = ("--batch", "1", "--batch", "32")
    found += [
        Phase("decode, one step at a time", (*decode, *few, "--no-overlap-steps"), 120),
        Phase("transformers beside it", (*beside, "--rounds", "3", "--prompts", "4"), 200),
        Phase("decode, sampled", (*decode, *few, "--temperature", "0.7", "--top-p", "0.9"), 120),
        Phase("prefix", ("prefix", "--model", model, "--device", "cuda"), 110),
        Phase("decode without graphs", (*decode, "--batch", "1", "--prompts", "4", "--no-graphs"), 60),
        Phase("decode, not exact", (*decode, *few, "--no-exact"), 120),
        Phase(f"steps {small}, not exact", ("steps", "--shape", small, "--no-exact"), 40),
        Phase("training", ("training", "--model", model, "--device", "cuda"), 150),  # tells nothing before its end
    ]
    found += [
        Phase("decode, 8 bits", (*decode, *few, "--dtype", "float8", "--kv-dtype", "float8"), 150),
        Phase(f"steps {large[-1]}, 8 bits", ("steps", "--shape", large[-1], "--float8"), 110),
    ]
    found += [
        Phase(f"steps {name}, no prefetch", ("steps", "--shape", name, "--prefetch", "0"), 110) for name in SHAPES
    ]
    found += [Phase(f"kernels {name}", ("kernels", "--shape", name), 120) for name in large]
    return found + [
        Phase(f"steps {name}", ("steps", "--shape", name), 150) for name in STEP_SHAPES if name not in SHAPES
    ]


@contextmanager
def _interrupted_by_every_end() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an interrupt: else the phase under way, which has a session of its own, would stay
    on the GPU. Signals that are ignored, as under nohup, stay ignored."""
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    with taken(numbers, signal.default_int_handler):
        yield


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds interrupts back until this is over: one amid the start of a phase would leave a process that nobody
    knows."""
    came: list[int] = []
    caught = [one for one in SIGNALS if callable(signal.getsignal(one))]
    with taken(caught, lambda number, frame: came.append(number)):
        yield
    if came:
        raise KeyboardInterrupt


@_interrupted_by_every_end()
def run_gpu_bench(
    chosen: Sequence[Phase], minutes: float, report: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs the phases that there is time for. keep gets the whole record after each phase: by phase its own record, its
    seconds, and what went wrong."""
    record: dict[str, Any] = {"phases": {}}
    until = time.monotonic() + 60 * minutes
    for phase in chosen:
        if phase.where_failed is not None and not record["phases"].get(phase.where_failed, {}).get("failed"):
            continue
        left = until - time.monotonic()
        if left < LAST_SECONDS:
            record["phases"][phase.name] = {"error": "no time left"}
            report(f"{phase.name}: no time left")
            continue
        report(f"{phase.name}: {left:.0f} s left")
        began = time.monotonic()
        found = _run(phase, min(left, phase.seconds))
        wrong = [check for check in found.get("checks", ()) if not check["passed"]]
        if wrong or any(compared["different"] for compared in found.get("comparisons", ())):
            found["failed"] = True
        found["seconds"] = round(time.monotonic() - began, 1)
        record["phases"][phase.name] = found
        report(f"{phase.name}: {found.get('error', 'done')} ({found['seconds']} s)")
        keep(record)
    return record


def _run(phase: Phase, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "record.json"
        program = [sys.executable, "-c", "from tidar_core.cli import main; main()", "bench"]
        with open(Path(scratch) / "output", "w+", encoding="utf-8", errors="replace") as output:
            process: subprocess.Popen[bytes] | None = None
            status: int | None = None
            try:
                with _interrupts_wait():
                    process = subprocess.Popen(
                        [*program, *phase.command, "--json", str(path)],
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(seconds)
            finally:
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            printed = output.read()
            printed = printed if len(printed) <= 2 * KEPT else f"{printed[:KEPT]}\n…\n{printed[-KEPT:]}"
        found = _read(path)
    if status is None:
        return found | {"error": f"stopped after {seconds:.0f} s", "output": printed}
    return found if status == 0 else found | {"error": f"exit status {status}", "failed": True, "output": printed}


def outcome(found: dict[str, Any]) -> str:
    """The result of a phase in one line."""
    parts = [found["error"]] if "error" in found else []
    checks = found.get("checks", ())
    if "steps" in found:  # what is not there raised
        parts += [f"{check['kernel']}: {check['case']}" for check in checks]
    elif checks:
        parts.append(f"{sum(check['passed'] for check in checks)} of {len(checks)} checks passed")
    for one in found.get("decode", ()):
        parts.append(f"batch {one['batch']} {one['drafts']} {one['tokens_per_second']:.0f} tokens/s")
    for one in found.get("steps", ()):
        if one["context"] == 512 and one["rows"] == 1:
            parts.append(f"a row {one['microseconds']:.0f} µs, {one['share']:.0%} of read bandwidth")
    for one in found.get("peers", ()):
        parts.append(f"{one['engine']} {one['tokens_per_second']:.0f} tokens/s")
    if trained := found.get("training"):
        parts.append(f"{trained['mask_rows_per_second']:.0f} mask rows a second")
    if compared := found.get("comparisons"):
        parts.append(f"{sum(one['different'] for one in compared)} answers differ")
    return "; ".join(parts) or "done"


def _read(path: Path) -> dict[str, Any]:
    """A phase's record as far as it got; empty where the phase was stopped while it wrote."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def steps_chart(record: dict[str, Any]) -> str:
    """Step time against rows at the shortest context, in multiples of one row's, a line a shape, as far as all shapes
    were measured: a mermaid chart."""
    by_shape: dict[str, list[dict[str, Any]]] = {}
    for phase in record["phases"].values():
        if phase.get("exact") and not phase.get("float8") and phase.get("steps"):
            by_shape.setdefault(phase["steps"][0]["shape"], phase["steps"])  # further ones have other settings
    curves = [_curve(steps) for steps in by_shape.values()]
    rows = [count for count in curves[0] if all(count in curve for curve in curves)] if curves else []
    if not rows:
        return ""
    ratios = [[curve[count] / curve[rows[0]] for count in rows] for curve in curves]
    lines = [f"    line [{', '.join(f'{ratio:.3f}' for ratio in line)}]" for line in ratios]
    axis = ", ".join(map(str, rows))
    head = ["```mermaid", "xychart-beta", f'    x-axis "rows in a step" [{axis}]']
    most = 1.1 * max(ratio for line in ratios for ratio in line)
    return "\n".join([*head, f'    y-axis "time, one row is 1" 0 --> {most:.1f}', *lines, "```"])


def _curve(steps: list[dict[str, Any]]) -> dict[int, float]:
    """Microseconds by rows at the shortest context, drafting where there are mask rows."""
    nearest = min(step["context"] for step in steps)
    chosen = [step for step in steps if step["context"] == nearest and step["adapter"] == (step["mask"] > 0)]
    return {step["rows"]: step["microseconds"] for step in sorted(chosen, key=lambda step: step["rows"])}
