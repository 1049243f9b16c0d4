"""`tidar`: get, serve and watch TiDAR models from the command line."""

import gc
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidar_core.arguments import (
    KV,
    MOST_THREADS,
    AdapterPath,
    DeviceName,
    Drafts,
    DType,
    Exact,
    Graphs,
    Makers,
    Model,
    Threads,
    load,
    user_errors,
    write_errors,
)
from tidar_core.bench.command import bench
from tidar_core.config import DEFAULT_MODEL, ConfigError, EngineConfig
from tidar_core.convert.command import convert_command

MANY_OBJECTS = 100_000  # made before the collector looks at them

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="TiDAR language models: think in diffusion, talk in autoregression. One forward pass verifies the last "
    "draft and drafts the next block; drafts change the speed, never the text.",
)
app.add_typer(bench, name="bench")
app.command("convert")(convert_command)


def show_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("tidar-cluster"))
        raise typer.Exit


@app.callback()
def tidar(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A further adapter of the same model, as NAME=ADAPTER, for requests whose `model` is NAME. Repeat it "
            "for several. In a Serve config: `adapters`."
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="A further model, as NAME=MODEL, for requests whose `model` is NAME. Repeat it for several. In a "
            "Serve config: `models`."
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines of each name that is served; each takes a GPU where there are GPUs.")
    ] = 1,
    min_replicas: Annotated[
        int,
        typer.Option(min=0, help="With --max-replicas: the fewest engines; 0 lets a model sleep while nobody asks."),
    ] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="The most engines; their number then follows the load. Not with --replicas."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: on all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API and the playground.")] = 8000,
    playground: Annotated[
        bool, typer.Option(help="Serve the playground too; --no-playground serves the API alone.")
    ] = True,
    dtype: DType = "bfloat16",
    kv_dtype: KV = "model",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Annotated[
        int,
        typer.Option(min=0, max=MOST_THREADS, help="CPU threads of each engine; 0: an equal share of its node's CPUs."),
    ] = 0,
    reasoning: Annotated[
        bool,
        typer.Option(help="Separate a model's thoughts from its answers; --no-reasoning leaves them in the text."),
    ] = True,
    exact: Exact = True,
    graphs: Graphs = True,
    max_model_len: Annotated[
        int, typer.Option(min=0, help="Tokens of a request and its answer together; 0: as many as the model allows.")
    ] = 0,
    max_running: Annotated[int, typer.Option(min=1, help="Answers that each engine decodes at once; others wait.")] = (
        EngineConfig().max_running
    ),
    cache_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="For how many tokens each engine holds keys and values; 0: as many as a share of the memory holds.",
        ),
    ] = 0,
    generation_config: Makers = "auto",
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients.", show_default="from --model")
    ] = None,
    max_ongoing: Annotated[
        int,
        typer.Option(min=1, help="Answers under way per engine, running or waiting; beyond that requests get a 429."),
    ] = 1024,
    priorities: Annotated[
        bool, typer.Option(help="Let requests go before others by their `priority`, and take their places.")
    ] = False,
    api_keys: Annotated[
        str | None, typer.Option(help="A file of API keys, one per line; requests then need one of them.")
    ] = None,
    metrics_keys: Annotated[
        str | None, typer.Option(help="A file of keys for /metrics, one per line; API keys do not open it then.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web site whose scripts may use the API; '*' for all. Repeat it for several."),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(help="An OpenTelemetry collector that gets spans of requests, as http://collector:4318."),
    ] = None,
) -> None:
    """Serve models: the OpenAI API at /v1 and the playground at /playground, on Ray Serve.

    Joins the Ray cluster that runs here (or at RAY_ADDRESS), else starts one; RAY_ADDRESS=local always starts one.
    Ctrl-C ends it.
    """
    with user_errors():
        try:
            import cluster.lean_serve  # noqa: F401  # before anything else imports Serve
            from cluster.operate import deploy
            from cluster.options import ServeOptions, UpOptions
            from tidar_core.settings import read_options
        except ModuleNotFoundError as error:
            raise ConfigError(f"serving needs {error.name}: pip install -e '.[cluster]' in the repository") from None
        given = {
            "model": model, "adapter": adapter, "adapters": named(also or [], "--also", "adapter"),
            "models": {name: {"model": path} for name, path in named(beside or [], "--beside", "model").items()},
            "name": name, "dtype": dtype, "kv_dtype": kv_dtype, "device": device, "drafts": drafts,
            "replicas": replicas, "min_replicas": min_replicas, "max_replicas": max_replicas, "threads": threads,
            "reasoning": reasoning, "exact": exact, "graphs": graphs, "max_model_len": max_model_len,
            "max_running": max_running, "cache_tokens": cache_tokens, "generation_config": generation_config,
            "max_ongoing": max_ongoing, "priorities": priorities,
            "api_keys": api_keys, "metrics_keys": metrics_keys, "cors_origins": cors_origin or [], "traces": traces,
            "playground": playground,
        }  # fmt: skip
        serve = read_options(ServeOptions, given)
        try:
            deploy.up(UpOptions(serve=serve, host=host, port=port))
        finally:
            gc.freeze()  # else Python's end walks through all of it once more: 0.7 s after the last word


def named(pairs: list[str], option: str, kind: str) -> dict[str, str]:
    """What an option says by NAME=KIND each, by the names. Raises ConfigError."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {pair} names no {kind}: write NAME={kind.upper()}")
        if name in found:
            raise ConfigError(f"{option} names {name} twice")
        found[name] = value
    return found


@app.command()
def status(
    address: Annotated[str, typer.Option(help="Where the API is.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(envvar="TIDAR_API_KEY", help="An API key, if the server requires one.")
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(envvar="TIDAR_METRICS_KEY", help="A key for /metrics, if the server has --metrics-keys."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and end, as it also does where the output is no terminal.")
    ] = False,
) -> None:
    """Show what a running server serves: model, replicas, load, tokens per second, acceptance. On a terminal it goes on
    until Ctrl-C."""
    with user_errors():
        try:
            from cluster.operate.status import show_status
        except ModuleNotFoundError as error:
            raise ConfigError(f"this needs {error.name}: pip install -e '.[cluster]' in the repository") from None
        show_status(address, key, metrics_key, live=sys.stdout.isatty() and not once)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Serve config files, or RayService manifests.")],
) -> None:
    """Find mistakes in Serve config files before a cluster gets them: Ray silently drops unknown keys. Exit status 1 if
    there are any."""
    with user_errors():
        try:
            from cluster.operate.check import check_file
        except ModuleNotFoundError as error:
            raise ConfigError(f"this needs {error.name}: pip install -e '.[cluster]' in the repository") from None
        found = []
        for file in files:
            try:
                found += check_file(file)
            except ConfigError as error:  # of this file; the others' mistakes are told all the same
                found.append(str(error))
        for line in found:
            Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        if found:
            raise typer.Exit(1)
        print("no mistakes found")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0: among all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling: the same seed gives the same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as text, without the chat template.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print the answer alone, without colours and figures.")
    ] = False,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Threads = 0,
    generation_config: Makers = "auto",
) -> None:
    """Answer one prompt here, without a server. Colours tell drafts that held, the model's own tokens and rejected
    drafts apart.

    Decoding is greedy unless --temperature is given. Other sampling values that are not given are those of a server
    (--generation-config).
    """
    with user_errors():
        from tidar_core.terminal import print_answer

        if any("\udc80" <= letter <= "\udcff" for letter in prompt):
            raise ConfigError("the prompt is not UTF-8")
        config = EngineConfig(
            model, adapter, dtype, device, threads, generation_config=generation_config, max_running=1
        )  # fmt: skip
        engine = load(config)
        if drafts == "full" and engine.info.adapter is None:
            raise ConfigError(f"--drafts full needs a drafter, and {engine.info.model} runs without one")
        print_answer(
            engine, prompt, raw=raw, plain=plain or not sys.stdout.isatty(), max_tokens=max_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, drafts=drafts,
        )  # fmt: skip


def fill_closed_streams() -> None:
    """Have nothing behind stdin, stdout and stderr where they are closed: the next files and sockets would get their
    numbers, and what libraries and other processes print would go into these."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def main() -> None:
    """The entry point of the `tidar` command."""
    fill_closed_streams()
    gc.set_threshold(MANY_OBJECTS)  # all that is imported would be walked through again and again: 0.3 s of a start
    with write_errors():
        app()
