"""The `tidar bench` commands."""

from dataclasses import asdict, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidar_core.arguments import KV, AdapterPath, DeviceName, Drafts, DType, Model, Threads, load, user_errors
from tidar_core.bench.device_command import Exact, JsonFile, gpu, kernels, steps, training, write_record
from tidar_core.bench.prompts import PromptSet
from tidar_core.config import DEFAULT_MODEL, ConfigError, EngineConfig
from tidar_core.request import DraftMode


class PeerName(StrEnum):
    """The peers that a worker can run."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama.cpp"


class DTypeChoice(StrEnum):
    """`config.ServedDType`, where several may be named."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT8 = "float8"
    INT8 = "int8"
    INT4 = "int4"


class DraftsChoice(StrEnum):
    """`request.DraftMode`, where several may be named."""

    OFF = "off"
    AUTO = "auto"
    FULL = "full"


class KVChoice(StrEnum):
    """`config.KVDType`, where several may be named."""

    MODEL = "model"
    FLOAT8 = "float8"


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

        config = EngineConfig(model, adapter, dtype, device, threads)
        engine = load(replace(config, max_running=max(config.max_running, batch)))
        if not engine.info.block_length:
            Console(stderr=True).print(f"{model} has no drafter: batches alone are compared, no drafts", style="yellow")
        chosen = [plain_prompt(engine.tokenizer, text) for text in human_eval_prompts(prompts)]
        table = Table("rule", "against", "way", "equal", "near ties", "different", title=f"{model}, {dtype}")
        comparisons: list[dict[str, object]] = []
        for result in run_exact(engine, model, chosen, batch=batch, max_tokens=max_tokens):
            comparisons.append(result.as_record())
            table.add_row(*map(str, result.as_record().values()))
            write_record(json_file, {"engine": engine.info, "comparisons": comparisons})
        Console().print(table)
        Console().print(f"the engine proves its rows exact at warm-up: {engine.info.exact}")
        if any(compared["different"] for compared in comparisons):
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
    temperature: Temperature = 0.0,
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
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Where tokens are sampled; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Where tokens are sampled.")] = 1.0,
    full: Annotated[bool, typer.Option(help="Full drafts too: slow where rows are dear.")] = True,
    exact: Exact = True,
    graphs: Annotated[bool, typer.Option(help="On a GPU: steps as CUDA graphs.")] = True,
    overlap: Annotated[
        bool | None, typer.Option(help="Plan the next step while one runs.", show_default="on a GPU")
    ] = None,
    dtype: DType = "bfloat16",
    kv_dtype: KV = "model",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second on HumanEval prompts in the chat template: drafts off, auto and full in turn."""
    with user_errors():
        from tidar_core.bench.decode import measure_decode
        from tidar_core.bench.prompts import chat_prompt, human_eval_prompts
        from tidar_core.request import SamplingParams

        most = max(batch or [0], default=0)
        config = EngineConfig(
            model, adapter, dtype, device, threads, exact=exact, graphs=graphs, overlap=overlap, kv_dtype=kv_dtype
        )
        engine = load(replace(config, max_running=max(config.max_running, most)))
        chosen = [chat_prompt(engine.tokenizer, text) for text in human_eval_prompts()]
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
        Path | None, typer.Option(help="A text, its paragraphs taken apart. [default: the three prompt sets]")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many texts, of each set.")] = 40,
    dtype: Annotated[list[DTypeChoice] | None, typer.Option(help="Repeat it to compare; the first is one.")] = None,
    kv_dtype: Annotated[
        list[KVChoice] | None, typer.Option(help="K/V pages; each is combined with each dtype.")
    ] = None,
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """What weights in fewer bits cost in quality: perplexity of the same texts in several dtypes."""
    with user_errors():
        from tidar_core.bench.perplexity import measure_perplexity
        from tidar_core.bench.prompts import read_set, read_text

        texts = read_text(text, prompts) if text else [one for name in PromptSet for one in read_set(name, prompts)]
        results = []
        dtypes = dtype or [DTypeChoice.BFLOAT16, DTypeChoice.INT8, DTypeChoice.INT4]
        for name, kept in product(dtypes, kv_dtype or [KVChoice.MODEL]):
            config = EngineConfig(model, "none", name.value, device, threads, kv_dtype=kept.value)
            results.append(measure_perplexity(load(config), texts))
        table = Table("dtype", "K/V", "texts", "tokens", "nats a token", "perplexity", "against the first", title=model)
        for r in results:
            ratio = r.perplexity / results[0].perplexity
            table.add_row(
                r.dtype, r.kv_dtype, str(r.texts), str(r.tokens), f"{r.nats:.4f}", f"{r.perplexity:.3f}", f"{ratio:.4f}"
            )
        Console().print(table)
        write_record(json_file, {"model": model, "perplexity": [result.as_record() for result in results]})


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

        engine = load(EngineConfig(model, adapter, dtype, device, threads))
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
def soak(
    model: Model = DEFAULT_MODEL,
    adapter: AdapterPath = "default",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long requests come.")] = 5.0,
    dtype: DType = "bfloat16",
    device: DeviceName = "auto",
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Minutes of mixed traffic on one engine: requests lost, memory gained. Exit status 1 if any was lost or
    ended in an error."""
    with user_errors():
        from tidar_core.bench.prompts import chat_prompt, human_eval_prompts
        from tidar_core.bench.soak import run_soak

        engine = load(EngineConfig(model, adapter, dtype, device, threads))
        chosen = [chat_prompt(engine.tokenizer, text) for text in human_eval_prompts()]
        result = run_soak(engine, chosen, 60 * minutes, Console(stderr=True).print)
        table = Table("figure", "value", title=f"{model}, {dtype}")
        for name, value in result.as_record().items():
            table.add_row(name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
        Console().print(table)
        write_record(json_file, {"engine": engine.info, "soak": result.as_record()})
        if result.lost or result.wrong or result.pages_owned_at_the_end:
            raise typer.Exit(1)


@bench.command()
def peers(
    directory: Annotated[
        Path, typer.Argument(help="Where install.sh put the peers' environments; transformers needs none.")
    ] = Path("peers"),
    peer: Annotated[
        list[PeerName] | None,
        typer.Option(help="A peer; repeat it for several. [default: transformers and those installed]"),
    ] = None,
    model: Model = DEFAULT_MODEL,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    honour_end: Annotated[bool, typer.Option(help="End where the model does; else all do the same work.")] = True,
    dtype: Annotated[list[DTypeChoice] | None, typer.Option(help="Of ours; repeat it. [default: bfloat16]")] = None,
    drafts: Annotated[list[DraftsChoice] | None, typer.Option(help="Of ours; repeat it. [default: off, auto]")] = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second beside other engines, each on a GPU where it can use one: same weights, prompts (HumanEval,
    and MT-Bench where it is installed) and machine, in turn."""
    with user_errors():
        from tidar_core.bench.peers.compare import (
            DRAFTS,
            PeerResult,
            Room,
            compare_engines,
            model_for,
            own_engines,
            peer_engine,
            peer_python,
        )
        from tidar_core.bench.prompts import chat_text, mixed_prompts
        from tidar_core.kernels.cpu_build import cache_directory
        from tidar_core.model.configuration import load_config
        from tidar_core.model.sources import find_model
        from tidar_core.model.tokenizer import load_tokenizer

        source = find_model(model)
        names = peer or [name for name in PeerName if name == "transformers" or (directory / name).exists()]
        for name in names:
            peer_python(name, directory)  # before a model is written for it
        folder, tokenizer, batches = cache_directory() / "peers", load_tokenizer(source), batch or [1, 8, 32]
        read, sets = mixed_prompts()
        texts = [chat_text(tokenizer, text) for text in read]
        longest, positions = max(len(tokenizer(text)["input_ids"]) for text in texts), load_config(source).max_positions
        if longest + max_tokens > positions:
            fit = f"the {max(0, positions - longest)} that fit behind the longest prompt"
            raise ConfigError(f"--max-tokens {max_tokens} is more than {fit}")
        room = Room(min(positions, -(-(longest + max_tokens) // 64) * 64), max(batches))
        engines = own_engines(
            model, room, [choice.value for choice in dtype or [DTypeChoice.BFLOAT16]],
            [choice.value for choice in drafts or ()] or DRAFTS,
        )  # fmt: skip
        engines += [peer_engine(name, directory, model_for(name, source, folder), room) for name in names]

        def keep(found: list[PeerResult]) -> None:
            peers = [result.as_record() for result in found]
            write_record(json_file, {"model": source.name, "prompts": sets, "peers": peers})

        results = compare_engines(
            engines, texts, batches=batches, rounds=rounds, at_least=prompts, max_tokens=max_tokens,
            honour_end=honour_end, say=Console(stderr=True).print, keep=keep,
        )  # fmt: skip
        table = Table("batch", "engine", "device", "tokens/s", "against the first", title=source.name)
        for r in results:
            table.add_row(str(r.batch), r.engine, r.device, f"{r.tokens_per_second:.1f}", f"{r.ratio:.2f}")
        Console().print(table)


for device_command in (gpu, kernels, steps, training):
    bench.command()(device_command)
