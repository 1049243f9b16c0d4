"""The `tidar bench` commands."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidar_core.arguments import (
    KV,
    AdapterPath,
    DeviceName,
    Drafts,
    DType,
    Exact,
    Graphs,
    Model,
    Threads,
    load,
    user_errors,
)
from tidar_core.bench.choices import DTypeChoice, KVChoice
from tidar_core.bench.device_command import (
    JsonFile,
    OverlapLaunches,
    OverlapSteps,
    gpu,
    kernels,
    steps,
    training,
    write_record,
)
from tidar_core.bench.peers.command import peers
from tidar_core.bench.prompts import PromptSet
from tidar_core.config import DEFAULT_MODEL, ConfigError, EngineConfig
from tidar_core.layout import Shape
from tidar_core.request import DraftMode

Count = Annotated[int, typer.Option(min=1, help="How many prompts.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
bench = typer.Typer(no_args_is_help=True, help="Measure: exactness, tokens per step and per second, the policy, peers.")


@bench.command()
def exact(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    prompts: Count = 164,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt.")] = 64,
    graphs: Graphs = True,
    overlap_steps: OverlapSteps = None,
    overlap_launches: OverlapLaunches = True,
    dtype: DType = "float32",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Check on HumanEval prompts that drafts never change the text: off, auto and full, alone and in a batch.

    Greedy answers in fp32 are compared with transformers' generate (near ties are counted separately). Sampled answers,
    and all answers in bf16, are compared bit for bit with this engine's own plain decoding. Exit status 1 if any answer
    differs.
    """
    with user_errors():
        from tidar_core.bench.exact import run_exact, shows_drafts
        from tidar_core.bench.prompts import human_eval_prompts
        from tidar_core.model.tokenizer import plain_prompt

        texts = human_eval_prompts(prompts)
        config = EngineConfig(
            model,
            adapter,
            dtype,
            device,
            threads,
            graphs=graphs,
            overlap_steps=overlap_steps,
            overlap_launches=overlap_launches,
        )
        engine = load(replace(config, max_running=max(config.max_running, batch)))
        if not engine.info.block_length:
            Console(stderr=True).print(f"{model} has no drafter: batches alone are compared, no drafts", style="yellow")
        chosen = [plain_prompt(engine.tokenizer, text) for text in texts]
        table = Table("rule", "against", "way", "equal", "near ties", "different", title=f"{model}, {dtype}")
        for heading in ("drafts verified", "held"):
            table.add_column(heading)
        comparisons: list[dict[str, object]] = []
        for result in run_exact(engine, model, chosen, batch=batch, max_tokens=max_tokens):
            comparisons.append(result.as_record())
            table.add_row(*map(str, result.as_record().values()))
            write_record(json_file, {"engine": engine.info, "comparisons": comparisons})
        Console().print(table)
        Console().print(f"the engine proves its rows exact at warm-up: {engine.info.exact}")
        if any(compared["different"] for compared in comparisons):
            raise typer.Exit(1)
        if engine.info.block_length > 1 and not shows_drafts(comparisons):
            raise ConfigError(
                "this shows nothing of drafts: some are to hold and some not; take more prompts or tokens"
            )


@bench.command()
def acceptance(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    prompt_set: Annotated[
        list[PromptSet] | None,
        typer.Option("--set", help="Prompt set; repeat it for several.", show_default="humaneval"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts of each set at most.")] = 164,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 256,
    temperature: Temperature = 0.0,
    drafts: Drafts = "full",
    block: Annotated[int, typer.Option(min=0, help="Slots per proposal at most; 0: the drafter's block length.")] = 0,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Tokens per step with the chat template; answers end where the model ends them."""
    with user_errors():
        from tidar_core.bench.acceptance import measure_acceptance
        from tidar_core.bench.prompts import read_set
        from tidar_core.model.tokenizer import chat_prompt
        from tidar_core.request import SamplingParams

        texts = {name: read_set(name, prompts) for name in prompt_set or [PromptSet.HUMANEVAL]}
        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        if drafts != "off" and not engine.info.block_length:
            raise ConfigError(f"{model} has no drafter here, so nothing would be drafted: name one with --adapter")
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
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.", show_default="1, 8, 32")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0: among all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="Sample among the likeliest tokens up to this mass.")
    ] = 1.0,
    full: Annotated[
        bool, typer.Option(help="Measure full drafts too, which are slow where rows are expensive.")
    ] = True,
    exact: Exact = True,
    graphs: Graphs = True,
    overlap_steps: OverlapSteps = None,
    overlap_launches: OverlapLaunches = True,
    dtype: DType = "bfloat16",
    kv_dtype: KV = "model",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second on HumanEval prompts with the chat template: drafts off, auto and full in turn."""
    with user_errors():
        from tidar_core.bench.decode import measure_decode
        from tidar_core.bench.prompts import human_eval_prompts
        from tidar_core.engine import keep_loaded
        from tidar_core.model.tokenizer import chat_prompt
        from tidar_core.request import SamplingParams

        most, texts = max(batch or [0], default=0), human_eval_prompts()
        config = EngineConfig(
            model, adapter, dtype, device, threads, exact=exact, graphs=graphs, overlap_steps=overlap_steps,
            overlap_launches=overlap_launches, kv_dtype=kv_dtype,
        )  # fmt: skip
        engine = load(replace(config, max_running=max(config.max_running, most)))
        keep_loaded()  # as where it serves
        chosen = [chat_prompt(engine.tokenizer, text) for text in texts]
        modes: list[DraftMode] = ["off", "auto", "full"] if full else ["off", "auto"]
        results = measure_decode(
            engine, chosen, batches=batch or [1, 8, 32], modes=modes, rounds=rounds, at_least=prompts,
            params=SamplingParams(max_tokens, temperature, top_k, top_p),
        )  # fmt: skip
        table = Table(
            "batch",
            "drafts",
            "tokens/s",
            "against off",
            "tokens per step",
            title=f"{model}, {dtype}, temperature {temperature:g}",
        )
        found = []
        for r in results:
            cells = f"{r.tokens_per_second:.1f}", f"{r.ratio:.2f}", f"{r.tokens_per_step:.2f}"
            table.add_row(str(r.batch), r.drafts, *cells)
            found.append(r.as_record())
            write_record(json_file, {"engine": engine.info, "decode": found})  # whatever stops what is left
        Console().print(table)


@bench.command()
def perplexity(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A text file, measured by paragraph.", show_default="the three prompt sets")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many paragraphs, or prompts of each set.")] = 40,
    dtype: Annotated[
        list[DTypeChoice] | None,
        typer.Option(
            help="Type of weights; repeat it to compare several.",
            show_default="bfloat16, int8 and int4; on a GPU bfloat16 and float8",
        ),
    ] = None,
    kv_dtype: Annotated[
        list[KVChoice] | None,
        typer.Option(help="Type of keys and values; each is combined with each --dtype.", show_default="model"),
    ] = None,
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """What weights in fewer bits cost in quality: the perplexity of the same texts in several dtypes."""
    with user_errors():
        from tidar_core.bench.perplexity import measure_perplexity
        from tidar_core.bench.prompts import read_set, read_text
        from tidar_core.transfer import choose_device

        texts = read_text(text, prompts) if text else [one for name in PromptSet for one in read_set(name, prompts)]
        results = []
        rounded = [DTypeChoice.INT8, DTypeChoice.INT4]
        if choose_device(device).type == "cuda":
            rounded = [DTypeChoice.FLOAT8]
        dtypes = dtype or [DTypeChoice.BFLOAT16, *rounded]
        for name, kept in product(dtypes, kv_dtype or [KVChoice.MODEL]):
            config = EngineConfig(model, "none", name.value, device, threads, kv_dtype=kept.value)
            results.append(measure_perplexity(load(config), texts))
            write_record(json_file, {"model": model, "perplexity": [result.as_record() for result in results]})
        table = Table("dtype", "K/V", "texts", "tokens", "nats a token", "perplexity", "against the first", title=model)
        for r in results:
            ratio = r.perplexity / results[0].perplexity
            table.add_row(
                r.dtype, r.kv_dtype, str(r.texts), str(r.tokens), f"{r.nats:.4f}", f"{r.perplexity:.3f}", f"{ratio:.4f}"
            )
        Console().print(table)


@bench.command()
def prefix(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that two requests share.")] = 1500,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of requests.")] = 5,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Time to first token of a prompt whose beginning is cached, against one whose is not."""
    with user_errors():
        from tidar_core.bench.prefix import measure_prefix
        from tidar_core.engine import keep_loaded

        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        keep_loaded()  # as where it serves
        result = measure_prefix(engine, tokens, rounds)
        table = Table("figure", "value", title=f"{model}, {dtype}")
        for name, value in result.as_record().items():
            table.add_row(name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value))
        Console().print(table)
        write_record(json_file, {"engine": engine.info, "prefix": result.as_record()})


@bench.command()
def policy(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences at once; repeat it for several.", show_default="1, 4, 8, 16, 32"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts whose answers the simulation follows.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens for each prompt at most.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens simulated with each setting.")] = 2000,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """What the draft policy is worth: a simulation against drafts off, drafts full, the best fixed shape, and an oracle
    that knows what holds.

    It uses this machine's step costs, corrected by real steps that are measured at each batch, and how far real drafts
    held.
    """
    with user_errors():
        from tidar_core.bench.policy import run_policy_bench
        from tidar_core.bench.prompts import human_eval_prompts
        from tidar_core.model.tokenizer import chat_prompt

        batches, texts = batch or [1, 4, 8, 16, 32], human_eval_prompts(prompts)
        config = EngineConfig(model, adapter, dtype, device, threads)
        config = replace(config, max_running=max(config.max_running, *batches))
        engine = load(config)
        chosen = [chat_prompt(engine.tokenizer, text) for text in texts]
        found = run_policy_bench(engine, config, chosen, batches=batches, max_tokens=max_tokens, tokens=tokens)
        real = Table(
            "batch", "shape", "plain steps", "drafting steps", "picking", title="real steps: ms, times the curves"
        )
        for step in found.steps:
            plain, drafting = f"{1e3 * step.plain_seconds:.1f}", f"{1e3 * step.drafting_seconds:.1f}"
            picking = f"{1e3 * step.picking_seconds:.2f} ({step.picking_seconds / step.drafting_seconds:.0%})"
            real.add_row(
                str(step.batch),
                _told(step.shape),
                f"{plain} ({step.plain:.2f})",
                f"{drafting} ({step.drafting:.2f})",
                picking,
            )
        Console().print(real)
        table = Table("batch", "setting", "tokens/s", "tokens per step", "shape", title=f"{model}, {dtype}, simulated")
        for r in found.simulated:
            shape = "" if r.shape is None else _told(r.shape)
            table.add_row(str(r.batch), r.setting, f"{r.tokens_per_second:.1f}", f"{r.tokens_per_step:.2f}", shape)
        Console().print(table)
        record = {"steps": [asdict(real) for real in found.steps], "policy": [asdict(one) for one in found.simulated]}
        write_record(json_file, {"engine": engine.info, **record})


def _told(shape: Shape) -> str:
    return f"n {shape.drafts}, P {set(shape.proposals) or '{}'}, b {shape.block}"


@bench.command()
def soak(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long requests are sent.")] = 5.0,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Minutes of mixed traffic on one engine: how many requests were lost, and how much memory grew. Exit status 1 if a
    request was lost or ended in an error."""
    with user_errors():
        from tidar_core.bench.prompts import human_eval_prompts
        from tidar_core.bench.soak import run_soak
        from tidar_core.model.tokenizer import chat_prompt

        texts = human_eval_prompts()
        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        chosen = [chat_prompt(engine.tokenizer, text) for text in texts]
        result = run_soak(engine, chosen, 60 * minutes, Console(stderr=True).print)
        table = Table("figure", "value", title=f"{model}, {dtype}")
        for name, value in result.as_record().items():
            table.add_row(name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
        Console().print(table)
        write_record(json_file, {"engine": engine.info, "soak": result.as_record()})
        if result.lost or result.wrong or result.pages_owned_at_the_end:
            raise typer.Exit(1)


for further in (peers, gpu, kernels, steps, training):
    bench.command()(further)
