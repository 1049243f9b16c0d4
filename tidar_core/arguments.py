"""What the commands have in common: options, errors in one line, the engine with a progress bar."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tidar_core.config import ConfigError, Device, EngineConfig, GenerationConfig, KVDType, ServedDType
from tidar_core.imports import quick_imports
from tidar_core.request import DraftMode, RequestError

Model = Annotated[
    str, typer.Option(help="A checkpoint's directory, a .gguf file, a hub id, or the default model's name.")
]
AdapterPath = Annotated[
    str,
    typer.Option(
        help="The drafter: a directory, a tidar.json, 'none', or 'default': the model's own, or else one shipped for "
        "it, or else none."
    ),
]
DType = Annotated[
    ServedDType,
    typer.Option(help="Type of weights and arithmetic. float8 is for GPUs (Ada, Hopper), int8 and int4 are for CPUs."),
]
KV = Annotated[
    KVDType,
    typer.Option(
        "--kv-dtype",
        help="Type of keys and values: the arithmetic's (model), or float8, which on a GPU takes half the memory.",
    ),
]
Makers = Annotated[
    GenerationConfig,
    typer.Option(
        "--generation-config",
        help="Source of sampling values that are not given: the model's files (auto) or OpenAI's defaults (none).",
    ),
]
DeviceName = Annotated[Device, typer.Option(help="Where the model runs; auto uses a GPU if there is one.")]
Drafts = Annotated[
    DraftMode, typer.Option(help="auto: draft where that is faster; off: never draft; full: always draft.")
]
MOST_THREADS = max(64, 2 * (os.cpu_count() or 1))  # far more than processors only wait for each other
Threads = Annotated[int, typer.Option(min=0, max=MOST_THREADS, help="CPU threads; 0: as many as torch uses by itself.")]
Exact = Annotated[
    bool,
    typer.Option(
        help="On a GPU, use matrix products whose results do not depend on the batch; --no-exact uses torch's."
    ),
]
Graphs = Annotated[bool, typer.Option(help="On a GPU, run steps as CUDA graphs.")]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def user_errors() -> Iterator[None]:
    """One line on stderr and exit status 1 for what the user can mend; everything else is a fault of ours."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        Console(stderr=True).print(f"tidar: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def write_errors() -> Iterator[None]:
    """Around a whole command, down to its exit: one line on stderr and exit status 1 where what it writes finds no
    room, nothing but the status where nobody reads on."""
    try:
        try:
            yield
        except SystemExit:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where the error can still be told
            raise
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EPIPE):
            raise
        with suppress(AttributeError, OSError):  # else Python's end tries to write the rest, and says more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            where = error.filename or "the output"
            line = f"tidar: {where} cannot be written ({error.strerror}): make room, or write elsewhere"
            Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


def load(config: EngineConfig) -> Any:
    """The engine, with a progress bar on stderr while the weights are read, above it what a user should know of."""
    with quick_imports():
        from tidar_core.engine import load_engine

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def tell(line: str) -> None:
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

        return load_engine(
            config,
            tell,
            lambda done, total: bar.update(task, completed=done, total=total),
            stage=lambda line: bar.update(task, description=line),
        )
