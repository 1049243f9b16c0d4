"""`tidar`: get, serve and watch TiDAR models from the command line."""

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from tidar_core.bench.prompts import PromptSet
from tidar_core.config import DEFAULT_MODEL, ConfigError, DTypeName, EngineConfig
from tidar_core.convert.command import convert_command
from tidar_core.request import DraftMode, RequestError

Device = Literal["auto", "cpu", "cuda"]
PeerName = Literal["vllm", "transformers", "llama.cpp"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="TiDAR language models: think in diffusion, talk in autoregression. One forward pass verifies the last "
    "draft and drafts the next block; drafts change the speed, never the text.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure: exactness, tokens per step.")
app.add_typer(bench, name="bench")
app.command("convert")(convert_command)

Model = Annotated[str, typer.Option(help="A checkpoint's directory, a .gguf file, a hub id, or the default model.")]
AdapterPath = Annotated[
    str, typer.Option(help="The drafter: a directory, 'default' (the one shipped for the model) or 'none'.")
]
DType = Annotated[DTypeName, typer.Option(help="Weights and arithmetic.")]
DeviceName = Annotated[Device, typer.Option(help="Where the model runs; auto takes a GPU where there is one.")]
Drafts = Annotated[DraftMode, typer.Option(help="auto: as much as pays here; off: none; full: everything.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of the engine; 0 leaves it to torch.")]
Count = Annotated[int, typer.Option(min=1, help="How many prompts.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures here as a record.")
]


@contextmanager
def user_errors():  # type: ignore[no-untyped-def]
    """One line on stderr and exit status 1 for what the user can mend; everything else is a fault of ours."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        Console(stderr=True).print(f"tidar: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def load(config: EngineConfig, report: Callable[[str], None] | None = None) -> Any:
    """The engine, with a progress bar on stderr while the weights are read."""
    from tidar_core.engine import load_engine

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(line: str) -> None:
            bar.update(task, description=line)
            if report is not None:
                report(line)

        engine = load_engine(config, show, lambda done, total: bar.update(task, completed=done, total=total))
    return engine


@app.command()
def up(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    replicas: Annotated[int, typer.Option(min=1, help="Engines; one a GPU where there are GPUs.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="One port for the API and the playground.")] = 8000,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Threads = 0,
    max_model_len: Annotated[int, typer.Option(min=0, help="Positions a request may use; 0: the model's.")] = 0,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_keys: Annotated[str | None, typer.Option(help="A file of API keys, one a line.")] = None,
    metrics_keys: Annotated[str | None, typer.Option(help="A file of keys for /metrics alone.")] = None,
) -> None:
    """Serve a model: the OpenAI API at /v1 and the playground at /playground, on Ray Serve.

    Joins the Ray cluster that runs here (or at RAY_ADDRESS), else starts one. Ctrl-C ends it.
    """
    with user_errors():
        try:
            from cluster import deploy
            from cluster.options import ServeOptions, UpOptions
        except ModuleNotFoundError as error:
            raise ConfigError(f"serving needs {error.name}: pip install 'tidar-cluster[cluster]'") from None
        serve = ServeOptions(
            model=model, adapter=adapter, name=name, dtype=dtype, device=device, drafts=drafts,
            replicas=replicas, threads=threads, max_model_len=max_model_len, api_keys=api_keys,
            metrics_keys=metrics_keys,
        )  # fmt: skip
        deploy.up(UpOptions(serve=serve, host=host, port=port))


@app.command()
def status(
    address: Annotated[str, typer.Option(help="Where the API is.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(envvar="TIDAR_API_KEY", help="An API key, where one is wanted.")] = None,
) -> None:
    """Show what a running server serves: model, replicas, load, acceptance."""
    with user_errors():
        try:
            from cluster.status import show_status
        except ModuleNotFoundError as error:
            raise ConfigError(f"this needs {error.name}: pip install 'tidar-cluster[cluster]'") from None
        show_status(address, key)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Serve config files, or RayService manifests.")],
) -> None:
    """Check Serve config files before a cluster gets them: Ray drops unknown keys silently. Exit status 1 if wrong."""
    with user_errors():
        try:
            from cluster.check import check_file
        except ModuleNotFoundError as error:
            raise ConfigError(f"this needs {error.name}: pip install 'tidar-cluster[cluster]'") from None
        found = [line for file in files for line in check_file(file)]
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
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as text, without the chat template.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print the answer alone.")] = False,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    drafts: Drafts = "auto",
    threads: Threads = 0,
) -> None:
    """Answer one prompt here, without a server; held drafts, the model's own tokens and rejected drafts in colour."""
    with user_errors():
        from tidar_core.terminal import print_answer

        engine = load(EngineConfig(model, adapter, dtype, device, threads, drafts))
        print_answer(
            engine, prompt, raw=raw, plain=plain or not sys.stdout.isatty(), max_tokens=max_tokens,
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, drafts=drafts,
        )  # fmt: skip


@bench.command()
def exact(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    prompts: Count = 164,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt.")] = 64,
    dtype: DType = "float32",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Check on HumanEval prompts that drafts never change the text: off, auto and full, alone and in a batch.

    Greedy against transformers' generate in fp32 (near ties counted apart), sampled and in bf16 against our own
    plain decoding, bit for bit. Exit status 1 if any answer differs.
    """
    with user_errors():
        from tidar_core.bench.exact import run_exact
        from tidar_core.bench.prompts import human_eval_prompts, plain_prompt

        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        chosen = [plain_prompt(engine.tokenizer, text) for text in human_eval_prompts(prompts)]
        results = run_exact(engine, model, chosen, batch=batch, max_tokens=max_tokens)
        table = Table("rule", "against", "way", "equal", "near ties", "different", title=f"{model}, {dtype}")
        for result in results:
            table.add_row(*map(str, result.as_record().values()))
        Console().print(table)
        Console().print(f"the engine proves its rows exact at warm-up: {engine.info.exact}")
        write_record(json_file, {"engine": engine.info, "comparisons": [result.as_record() for result in results]})
        if any(result.different for result in results):
            raise typer.Exit(1)


@bench.command()
def acceptance(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    prompt_set: Annotated[
        list[PromptSet] | None, typer.Option("--set", help="Prompt set; repeat it for several. [default: humaneval]")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts of each set, at most.")] = 164,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    drafts: Drafts = "full",
    block: Annotated[int, typer.Option(min=0, help="Slots a proposal at most; 0: what the drafter has.")] = 0,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Tokens per step in the chat template, end of sequence honoured."""
    with user_errors():
        from tidar_core.bench.acceptance import measure_acceptance
        from tidar_core.bench.prompts import chat_prompt, read_set
        from tidar_core.request import SamplingParams

        texts = {name: read_set(name, prompts) for name in prompt_set or ["humaneval"]}
        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, drafts=drafts, block=block or None)
        results = {
            name: measure_acceptance(engine, [chat_prompt(engine.tokenizer, text) for text in chosen], params)
            for name, chosen in texts.items()
        }
        table = Table("figure", *results, title=f"{model}, drafter {engine.info.adapter}, drafts {drafts}")
        records = [result.as_record() for result in results.values()]
        for figure in records[0]:
            table.add_row(figure.replace("_", " "), *(_figures(record[figure]) for record in records))
        Console().print(table)
        if len(results) > 1:
            mean = sum(result.tokens_per_step for result in results.values()) / len(results)
            Console().print(f"mean of the sets: {mean:.3f} tokens per step")
        write_record(json_file, {"engine": engine.info, "acceptance": dict(zip(results, records, strict=True))})


def _figures(value: object) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)


@bench.command()
def decode(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second on HumanEval prompts in the chat template: drafts off, auto and full in turn."""
    with user_errors():
        from tidar_core.bench.decode import measure_decode
        from tidar_core.bench.prompts import chat_prompt, human_eval_prompts

        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        chosen = [chat_prompt(engine.tokenizer, text) for text in human_eval_prompts()]
        results = measure_decode(
            engine, chosen, batches=batch or [1, 8, 32], modes=("off", "auto", "full"),
            rounds=rounds, max_tokens=max_tokens, at_least=prompts,
        )  # fmt: skip
        table = Table("batch", "drafts", "tokens/s", "against off", "tokens per step", title=f"{model}, {dtype}")
        for r in results:
            cells = f"{r.tokens_per_second:.1f}", f"{r.ratio:.2f}", f"{r.tokens_per_step:.2f}"
            table.add_row(str(r.batch), r.drafts, *cells)
        Console().print(table)
        write_record(json_file, {"engine": engine.info, "decode": [result.as_record() for result in results]})


@bench.command()
def policy(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts whose answers are walked through.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens for each prompt at most.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each setting is walked through.")] = 2000,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """What the draft policy is worth: simulated on this machine's step costs and on how far real drafts held,
    against drafts off, full, the best fixed shape, and an oracle that knows what holds."""
    with user_errors():
        from tidar_core.bench.policy import run_policy_bench
        from tidar_core.bench.prompts import chat_prompt, human_eval_prompts

        config = EngineConfig(model, adapter, dtype, device, threads)
        engine = load(config)
        chosen = [chat_prompt(engine.tokenizer, text) for text in human_eval_prompts(prompts)]
        results = run_policy_bench(
            engine, config, chosen, batches=batch or [1, 4, 8, 16, 32], max_tokens=max_tokens, tokens=tokens
        )
        table = Table("batch", "setting", "tokens/s", "tokens per step", "shape", title=f"{model}, {dtype}, simulated")
        for r in results:
            shape = "" if r.shape is None else f"n {r.shape.drafts}, P {set(r.shape.proposals)}, b {r.shape.block}"
            table.add_row(str(r.batch), r.setting, f"{r.tokens_per_second:.1f}", f"{r.tokens_per_step:.2f}", shape)
        Console().print(table)
        write_record(json_file, {"engine": engine.info, "policy": [asdict(result) for result in results]})


@bench.command()
def peers(
    directory: Annotated[Path, typer.Argument(help="Where install.sh put the peers' environments.")],
    peer: Annotated[
        list[PeerName] | None, typer.Option(help="A peer; repeat it for several. [default: those installed]")
    ] = None,
    model: Model = DEFAULT_MODEL,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    honour_end: Annotated[bool, typer.Option(help="End where the model does; else all do the same work.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second beside other engines: same weights, prompts (HumanEval, MT-Bench) and machine, in turn."""
    with user_errors():
        from tidar_core.bench.peers.compare import compare_engines, model_for, own_engines, peer_engine
        from tidar_core.bench.prompts import chat_text, read_set
        from tidar_core.kernels.cpu import cache_directory
        from tidar_core.model.loading import find_model, load_tokenizer

        source = find_model(model)
        names = peer or [name for name in get_args(PeerName) if (directory / name).exists()]
        context, folder = 2048, cache_directory() / "peers"
        engines = own_engines(model, context)
        engines += [peer_engine(name, directory, model_for(name, source, folder), context) for name in names]
        pairs = zip(read_set("humaneval"), read_set("mtbench"), strict=False)
        texts = [chat_text(load_tokenizer(source), text) for pair in pairs for text in pair]
        results = compare_engines(
            engines, texts, batches=batch or [1, 8, 32], rounds=rounds, at_least=prompts, max_tokens=max_tokens,
            honour_end=honour_end, say=Console(stderr=True).print,
        )  # fmt: skip
        table = Table("batch", "engine", "tokens/s", "against the first", title=f"{source.name}, bf16")
        for r in results:
            table.add_row(str(r.batch), r.engine, f"{r.tokens_per_second:.1f}", f"{r.ratio:.2f}")
        Console().print(table)
        write_record(json_file, {"model": source.name, "peers": [result.as_record() for result in results]})


@bench.command()
def kernels(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as a record.")] = None,
) -> None:
    """Hold every Triton kernel against its oracle and against this GPU's limits. Exit status 1 if one is wrong."""
    with user_errors():
        from tidar_core.bench.kernels import run_kernel_bench, show_kernel_bench

        record = run_kernel_bench(Console(stderr=True).print)
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
        try:
            path.write_text(json.dumps({**head, **record}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the record cannot be written: {error}") from None


def main() -> None:
    """The entry point of the `tidar` command."""
    app()
