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
    AdapterPath,
    DeviceName,
    Drafts,
    DType,
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
            help="NAME=ADAPTER: another adapter, for requests that ask for NAME; may be given again. `adapters` in a "
            "config."
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=MODEL: another model, for requests that ask for NAME; may be given again. `models` in a config."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines; one a GPU where there are GPUs.")] = 1,
    min_replicas: Annotated[int, typer.Option(min=0, help="With --max-replicas: 0 lets the model sleep.")] = 1,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="As many engines as the load wants, up to this.")] = (
        None
    ),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="One port for the API and the playground.")] = 8000,
    playground: Annotated[bool, typer.Option(help="The page, beside the API.")] = True,
    dtype: DType = "bfloat16",
    kv_dtype: KV = "model",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Threads = 0,
    reasoning: Annotated[bool, typer.Option(help="Tell a model's thoughts apart from its answer in chats.")] = True,
    exact: Annotated[bool, typer.Option(help="On a GPU: the same bits in any batch, or torch's products.")] = True,
    graphs: Annotated[bool, typer.Option(help="On a GPU: steps as CUDA graphs.")] = True,
    max_model_len: Annotated[int, typer.Option(min=0, help="Positions a request may use; 0: the model's.")] = 0,
    max_running: Annotated[int, typer.Option(min=1, help="Answers that each engine decodes at once.")] = (
        EngineConfig().max_running
    ),
    cache_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens whose K/V each engine holds; 0: what a share of the memory allows.")
    ] = 0,
    generation_config: Makers = "auto",
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_ongoing: Annotated[
        int, typer.Option(min=1, help="Answers under way for each engine, running or not, before a 429.")
    ] = 1024,
    priorities: Annotated[
        bool, typer.Option(help="Requests may go before others by their `priority`, and take their places.")
    ] = False,
    api_keys: Annotated[str | None, typer.Option(help="A file of API keys, one a line.")] = None,
    metrics_keys: Annotated[str | None, typer.Option(help="A file of keys for /metrics alone.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web site whose scripts may use the API; may be given again.")
    ] = None,
    traces: Annotated[
        str | None, typer.Option(help="An OpenTelemetry collector for spans of requests: http://collector:4318.")
    ] = None,
) -> None:
    """Serve models: the OpenAI API at /v1 and the playground at /playground, on Ray Serve.

    Joins the Ray cluster that runs here (or at RAY_ADDRESS), else starts one. Ctrl-C ends it.
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
    key: Annotated[str | None, typer.Option(envvar="TIDAR_API_KEY", help="An API key, where one is wanted.")] = None,
    metrics_key: Annotated[
        str | None, typer.Option(envvar="TIDAR_METRICS_KEY", help="One of --metrics-keys, where those differ.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as to a pipe.")] = False,
) -> None:
    """Show what a running server serves: model, replicas, load, tokens per second, acceptance; on a terminal until
    Ctrl-C."""
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
    """Check Serve config files before a cluster gets them: Ray drops unknown keys silently. Exit status 1 if wrong."""
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
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as text, without the chat template.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print the answer alone.")] = False,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Threads = 0,
    generation_config: Makers = "auto",
) -> None:
    """Answer one prompt here, without a server; held drafts, the model's own tokens and rejected drafts in colour.

    Greedy unless --temperature is given; the rest that is not given is as a server has it (--generation-config).
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
