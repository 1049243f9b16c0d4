"""The commands of `tidar bench` about a device: its kernels, its steps, its training. `command.py` has the others."""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidar_core.arguments import DeviceName, Exact, Model, Threads, user_errors
from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.files import write_atomically


def in_a_folder(path: Path | None) -> Path | None:
    """The path of a record, refused before anything is measured where its folder is not there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", dir_okay=False, writable=True, callback=in_a_folder, help="Also write the figures to this file."
    ),
]

Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="Shape of a model; repeat it for several.", show_default="all")
]
OverlapSteps = Annotated[
    bool | None, typer.Option(help="Plan the next step while the current one runs.", show_default="on a GPU")
]
OverlapLaunches = Annotated[
    bool, typer.Option(help="On a GPU that can do so (Hopper), let a kernel begin while the previous one still runs.")
]


def training(
    model: Model = DEFAULT_MODEL,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to measure.")] = 5,
    rows: Annotated[
        int, typer.Option(min=0, help="Mask rows per step, in whole documents; 0: a number that suits the device.")
    ] = 0,
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """How many mask rows per second the training of a drafter goes through here, on random text, and where the time
    goes."""
    with user_errors():
        from tidar_core.bench.training import run_training_bench

        record = run_training_bench(model, rank, steps, rows, device, threads)
        speed = record["training"]
        table = Table("figure", "value", title=f"{model} on {record['device']}")
        table.add_row("mask rows a second", f"{speed['mask_rows_per_second']:.0f}")
        table.add_row("clean rows a second", f"{speed['clean_rows_per_second']:.0f}")
        table.add_row("seconds a step", f"{speed['seconds_a_step']:.3f}")
        table.add_row("of a large matrix product's rate", f"{speed['fraction']:.0%}")
        if speed["busy"] is not None:
            table.add_row("the GPU computes, of the profiled time", f"{speed['busy']:.0%}")
        Console().print(table)
        where = Table("share", "calls a step", "kernel or operation")
        for one in speed["work"]:
            where.add_row(f"{one['share']:.1%}", f"{one['calls']:.0f}", one["name"])
        Console().print(where)
        write_record(json_file, record)


def gpu(
    model: Model = DEFAULT_MODEL,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 8.0,
    json_file: JsonFile = None,
) -> None:
    """Measure what only a GPU can show, the most important first: kernels, decoding, step times, exactness.

    Each phase is a bench command in a process of its own. After each of them the record is written, to
    tidar-gpu-DATE.json in the current folder unless --json names another file. Exit status 1 if a phase failed.
    """
    with user_errors():
        from datetime import UTC, datetime

        from tidar_core.bench.gpu import outcome, phases, run_gpu_bench, steps_chart
        from tidar_core.bench.kernels import require_gpu
        from tidar_core.bench.prompts import human_eval_prompts

        require_gpu()
        human_eval_prompts(1)  # nearly every phase needs them
        path = json_file or Path(f"tidar-gpu-{datetime.now(UTC):%Y-%m-%dT%H%M%S}.json")
        write_record(path, {"phases": {}})  # refused now, if at all
        say = Console(stderr=True).print
        record = run_gpu_bench(phases(model), minutes, say, lambda found: write_record(path, found))
        write_record(path, record)
        for name, found in record["phases"].items():
            Console().print(f"{name}: {outcome(found)}", markup=False, highlight=False)
        Console().print(steps_chart(record), markup=False, highlight=False)
        Console().print(f"all of it is in {path}", highlight=False)
        if any(found.get("failed") for found in record["phases"].values()):
            raise typer.Exit(1)


def steps(
    shape: Shapes = None,
    exact: Exact = True,
    prefetch: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="MiB of the next product's weights that each product prefetches in steps of few rows.",
            show_default="as an engine's",
        ),
    ] = None,
    float8: Annotated[bool, typer.Option("--float8", help="Weights and K/V in 8 bits.")] = False,
    json_file: JsonFile = None,
) -> None:
    """How long a step takes on this GPU, by rows and context, and how long a long prompt takes. Exit status 1 if some
    of it could not be measured."""
    with user_errors():
        from tidar_core.bench.kernels import require_gpu

        require_gpu()
        from tidar_core.bench.steps import StepSettings, run_step_bench

        say = Console(stderr=True).print
        settings = StepSettings(exact, float8=float8)
        if prefetch is not None:
            settings = replace(settings, prefetch_bytes=int(prefetch * 2**20))
        record = run_step_bench(
            say, _shapes(shape, whole_steps=True), settings, lambda found: write_record(json_file, found)
        )
        table = Table("shape", "context", "rows", "of them mask", "adapter", "µs", "of read bandwidth")
        for s in record["steps"]:
            cells = f"{s['microseconds']:.0f}", f"{s['share']:.0%}"
            table.add_row(s["shape"], str(s["context"]), str(s["rows"]), str(s["mask"]), str(s["adapter"]), *cells)
        Console().print(table)
        write_record(json_file, record)
        for failed in record["checks"]:
            Console().print(f"{failed['kernel']}: {failed['case']}", markup=False, highlight=False)
        if record["checks"]:
            raise typer.Exit(1)


def _shapes(named: list[str] | None, *, whole_steps: bool = False) -> tuple[str, ...]:
    from tidar_core.bench.shapes import SHAPES, STEP_SHAPES

    known = STEP_SHAPES if whole_steps else SHAPES
    for name in named or ():
        if name not in known:
            raise ConfigError(f"--shape {name}: choose among {', '.join(known)}")
    return tuple(named or SHAPES)


def kernels(
    shape: Shapes = None,
    measure: Annotated[
        bool, typer.Option(help="Measure times too, and check fp32 too; --no-measure only checks bf16.")
    ] = True,
    tune: Annotated[
        bool, typer.Option(help="Also search for better tile sizes; the record has what was found.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare every Triton kernel with its oracle and with this GPU's limits. Exit status 1 if one is wrong."""
    with user_errors():
        from tidar_core.bench.kernels import run_kernel_bench, show_kernel_bench

        say = Console(stderr=True).print
        keep = partial(write_record, json_file)
        record = run_kernel_bench(say, _shapes(shape), measured=measure, tuned=tune, keep=keep)
        right = show_kernel_bench(record, Console())
        write_record(json_file, record)
        if not right:
            raise typer.Exit(1)


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """A measurement as JSON: when, with which command, on which engine, and what came out."""
    if path is not None:
        from datetime import UTC, datetime

        if "engine" in record:
            record = {**record, "engine": asdict(record["engine"])}
        head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": ["tidar", *sys.argv[1:]]}
        text = json.dumps({**head, **record}, indent=2) + "\n"
        try:
            if path.exists() and not path.is_file():  # a pipe, a terminal
                path.write_text(text, encoding="utf-8")
                return
            write_atomically({path.resolve(): text.encode()}, ".{}.part")
        except OSError as error:
            raise ConfigError(f"the record cannot be written: {error}") from None
