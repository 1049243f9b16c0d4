"""The command `tidar bench peers`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidar_core.arguments import Model, user_errors
from tidar_core.bench.choices import DraftsChoice, DTypeChoice, PeerName
from tidar_core.bench.device_command import JsonFile, write_record
from tidar_core.config import DEFAULT_MODEL, ConfigError


def peers(
    directory: Annotated[
        Path, typer.Argument(help="The folder that install.sh installed the peers into; transformers needs none.")
    ] = Path("peers"),
    peer: Annotated[
        list[PeerName] | None,
        typer.Option(help="A peer; repeat it for several.", show_default="transformers and those installed"),
    ] = None,
    model: Model = DEFAULT_MODEL,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; repeat it for several.", show_default="1, 8, 32")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with the next prompts.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per round at least.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt at most.")] = 128,
    honour_end: Annotated[
        bool,
        typer.Option(help="End answers where the model ends them; --no-honour-end always decodes --max-tokens tokens."),
    ] = True,
    dtype: Annotated[
        list[DTypeChoice] | None,
        typer.Option(help="This engine's type of weights; repeat it for several.", show_default="bfloat16"),
    ] = None,
    drafts: Annotated[
        list[DraftsChoice] | None,
        typer.Option(help="This engine's drafts; repeat it for several.", show_default="off, auto"),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of this engine and of others, in turn, on the same machine, weights and prompts (HumanEval, and
    MT-Bench if it is installed). Each uses a GPU if it can."""
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
        from tidar_core.bench.prompts import mixed_prompts
        from tidar_core.kernels.cpu_build import cache_directory
        from tidar_core.model.configuration import load_config
        from tidar_core.model.sources import find_model
        from tidar_core.model.tokenizer import chat_text, load_tokenizer

        source, directory = find_model(model), directory.absolute()  # the engines run elsewhere
        model = str(Path(model).absolute()) if Path(model).exists() else model
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
        engines += [
            peer_engine(name, directory, str(Path(model_for(name, source, folder)).absolute()), room) for name in names
        ]

        say = partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)

        def keep(found: list[PeerResult]) -> None:
            peers = [result.as_record() for result in found]
            write_record(json_file, {"model": source.name, "prompts": sets, "peers": peers})

        results = compare_engines(
            engines, texts, batches=batches, rounds=rounds, at_least=prompts, max_tokens=max_tokens,
            honour_end=honour_end, say=say, keep=keep,
        )  # fmt: skip
        title = f"{source.name}, prompts of {' and '.join(sets)}"
        table = Table("batch", "engine", "device", "tokens/s", "against the first", title=title)
        for r in results:
            table.add_row(str(r.batch), r.engine, r.device, f"{r.tokens_per_second:.1f}", f"{r.ratio:.2f}")
        Console().print(table)
