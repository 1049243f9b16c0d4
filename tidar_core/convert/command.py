"""The `tidar convert` command."""

import re
import shlex
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from tidar_core.arguments import Threads, user_errors
from tidar_core.config import DEFAULT_MODEL, ConfigError, Device, DTypeName
from tidar_core.layout import WithinBlock

if TYPE_CHECKING:  # it would import torch, and with it make every command slow to start
    from tidar_core.convert.options import ConvertOptions, Screen, Train
    from tidar_core.model.adapter_config import Projection


MOST_MINUTES = 366.0 * 24 * 60
WIDEST_SLOT_HEAD = 16384  # four times as wide as an 8B model
LARGEST_SEED = 2**64 - 1  # that torch takes
MOST_DIGITS = 5  # of a layer's number
LEARNING_RATES = {"adapter": 1.5e-3, "full": 1e-5}
OF_DRAFTERS = (
    "start", "rank", "projections", "layers", "block_sizes", "slot_head", "anchors", "kl_share", "slot_weights",
    "rows_at_once",
)  # fmt: skip


def convert_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A checkpoint's directory, a .gguf file, a hub id, or the default model's name.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path, typer.Option(help="The folder for the result. Intermediate work goes beside it, to OUT.work.")
    ] = Path("drafter"),
    minutes: Annotated[
        float, typer.Option(min=0.1, max=MOST_MINUTES, help="Time for gathering and training, earlier runs included.")
    ] = 60.0,
    own_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many tokens of self-generated text to gather. Without --steps, gathering stops at 90 % of "
            "--minutes. 0: gather for 45 % of --minutes.",
        ),
    ] = 0,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps; 0: as many as fit into the rest of --minutes.")
    ] = 0,
    answer_tokens: Annotated[
        int,
        typer.Option(
            min=16, help="Longest self-generated answer, in tokens; never more than half of the model's positions."
        ),
    ] = 320,
    prompts: Annotated[
        Path | None, typer.Option(help='A file of further questions to answer: one per line, plain or {"prompt": …}.')
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to learn from besides the self-generated text.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the gathered text, which later runs may use too.", show_default="OUT.work/data"),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            help="Continue training this adapter: a directory, or 'default'. Keeps its rank and slot head; an adapter "
            "without a slot head gets one of width --slot-head."
        ),
    ] = "none",
    rank: Annotated[int, typer.Option(min=1, help="Rank of a new adapter.")] = 32,
    projections: Annotated[
        str,
        typer.Option(
            help="What a new adapter adapts, or what is kept of --start: all, or some of qkv,o,gate_up,down (for "
            "mixtures of experts: of qkv,o,expert)."
        ),
    ] = "all",
    layers: Annotated[
        str, typer.Option(help="Layers that are adapted: all, or numbers from 0 on, as in 0,20-29.")
    ] = "all",
    block_length: Annotated[int, typer.Option(min=2, max=16, help="Slots (masked positions) per proposal.")] = 8,
    block_sizes: Annotated[
        Literal["whole", "mixed", "growing"],
        typer.Option(
            help="Slots per block in training: whole: always --block-length; mixed: any number from 2 up to it; "
            "growing: first 2, then more until it is reached."
        ),
    ] = "whole",
    slot_head: Annotated[
        int,
        typer.Option(
            min=0,
            max=WIDEST_SLOT_HEAD,
            help="Width of the slot head, which corrects a slot's guess by the token before it; 0: no slot head.",
        ),
    ] = 256,
    within_block: Annotated[
        WithinBlock,
        typer.Option(help="bidirectional: a slot sees all slots of its block; causal: only the earlier ones."),
    ] = "bidirectional",
    anchors: Annotated[int, typer.Option(min=1, help="Mask blocks per document in a training step at most.")] = 64,
    kl_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of KL divergence in the loss; the rest is total variation.")
    ] = 1.0,
    slot_weights: Annotated[
        Literal["decay", "product"],
        typer.Option(
            help="Weight of later slots in the loss: decay: falls at a fixed rate; product: how likely a slot is to be "
            "reached."
        ),
    ] = "decay",
    mode: Annotated[
        Literal["adapter", "full"],
        typer.Option(
            help="adapter: a drafter that leaves the model's text as it is; full: train all weights, as the paper does."
        ),
    ] = "adapter",
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Highest learning rate; 0: 1.5e-3 (adapter) or 1e-5 (full).")
    ] = 0.0,
    rows: Annotated[
        int,
        typer.Option(
            min=0,
            help="Mask rows per training step, in whole documents; 0: a number that suits the device. With --mode "
            "full: tokens per step; 0: 4096.",
        ),
    ] = 0,
    rows_at_once: Annotated[
        int,
        typer.Option(
            min=0, help="Mask rows in memory at once; fewer need less memory. 0: a number that suits the device."
        ),
    ] = 0,
    generator: Annotated[
        Literal["engine", "transformers"], typer.Option(help="What generates the text; the engine is faster.")
    ] = "engine",
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=LARGEST_SEED, help="Fixes the questions, the anchors and the new adapter's first weights."
        ),
    ] = 0,
    dtype: Annotated[DTypeName, typer.Option(help="Type of the base model's weights and arithmetic.")] = "bfloat16",
    device: Annotated[Device, typer.Option(help="Where it runs; auto uses a GPU if there is one.")] = "auto",
    threads: Threads = 0,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Train on this many GPUs (or CPU workers) of a Ray cluster; each adds --rows to a step."
        ),
    ] = 1,
) -> None:
    """Make a drafter for a model: the model writes questions and answers, and a small adapter learns to draft them.

    No data set is needed, and the model's text does not change. The same command started again continues where it
    stopped. The folder always has the best adapter so far, and a model card that says what was measured.
    """
    console = Console(stderr=True)
    try:
        with user_errors():
            _refuse_of_drafters(context, mode)
            from transformers.utils.logging import disable_progress_bar

            from tidar_core.convert.losses import LossConfig
            from tidar_core.convert.options import ConvertOptions
            from tidar_core.convert.run import convert
            from tidar_core.convert.screen import TerminalScreen
            from tidar_core.convert.trainer import TrainConfig
            from tidar_core.model.sources import from_home

            disable_progress_bar()  # beside ours it would write a bar of its own for each file
            train = TrainConfig(
                block=block_length, block_sizes=block_sizes, slot_head=slot_head, within_block=within_block,
                anchors=anchors, loss=LossConfig(kl_share, slot_weights), rows_a_step=rows, rows_a_pass=rows_at_once,
                learning_rate=learning_rate or LEARNING_RATES[mode], seed=seed,
            )  # fmt: skip
            options = ConvertOptions(
                model=model, out=from_home(out).absolute(), data=data and from_home(data), minutes=minutes,
                own_tokens=own_tokens, steps=steps, prompts=prompts and from_home(prompts),
                text=text and from_home(text), start=str(from_home(start)), rank=rank,
                projections=_projections(projections),
                layers=_layers(layers), generator=generator, device=device, dtype=dtype, threads=threads, train=train,
                answer_tokens=answer_tokens, mode=mode,
            )  # fmt: skip
            with TerminalScreen(console) as screen, _trainers(workers, options, screen) as trainers:
                progress = convert(options, screen, trainers)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", highlight=False)
        raise typer.Exit(130) from None
    arguments = shlex.join(["--model", model, "--adapter", str(out)] if mode == "adapter" else ["--model", str(out)])
    console.print(
        f"{progress.best:.2f} tokens per step on held-out documents. Serve it:\n    tidar up {arguments}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _refuse_of_drafters(context: typer.Context, mode: str) -> None:
    """Raises ConfigError where an option was given that the mode has no use for."""
    sources = {name: context.get_parameter_source(name) for name in OF_DRAFTERS}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if mode == "full" and given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for drafters: leave it out where --mode is full")


def _trainers(workers: int, options: "ConvertOptions", screen: "Screen") -> "AbstractContextManager[Train]":
    """Who trains: this process, or workers on Ray, which is there for as long as the context."""
    from tidar_core.convert.run import train_gathered

    if workers == 1:
        return nullcontext(train_gathered)
    if options.mode == "full":
        raise ConfigError("--mode full trains in one process: leave --workers out")
    try:
        from cluster.training.train import workers_on_ray
    except ImportError as error:
        missing = "Ray Train" if error.name is None else error.name
        raise ConfigError(f"--workers needs {missing}: pip install -e '.[cluster,train]' in the repository") from None
    return workers_on_ray(workers, options, screen)


def _projections(named: str) -> "tuple[Projection, ...] | None":
    from tidar_core.model.adapter_config import PROJECTIONS

    if named.strip() == "all":
        return None
    wanted = [name.strip() for name in named.split(",")]
    if not set(wanted) <= set(PROJECTIONS):
        raise ConfigError(f"--projections {named}: choose some of {', '.join(PROJECTIONS)}")
    return tuple(name for name in PROJECTIONS if name in wanted)


def _layers(named: str) -> tuple[int, ...] | None:
    if named.strip() == "all":
        return None
    spans = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part) for part in named.split(",")]
    ends = [(span[1], span[2] or span[1]) for span in spans if span]
    if any(len(end.lstrip("0")) > MOST_DIGITS for pair in ends for end in pair):
        raise ConfigError(f"--layers {named[:80]}: no model has so many layers")
    found = {layer for first, last in ends for layer in range(int(first), int(last) + 1)}
    if not all(spans) or not found:
        raise ConfigError(f"--layers {named}: write all, or numbers from 0 on, as in 0,20-29")
    return tuple(sorted(found))
