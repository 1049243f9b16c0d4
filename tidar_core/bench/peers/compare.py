"""Sends the same rounds to several engines in turn."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch

import tidar_core
from tidar_core.config import ConfigError, ServedDType
from tidar_core.error_text import last_line
from tidar_core.model.dense import dense_model
from tidar_core.model.sources import ModelSource
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.request import DraftMode

WORKER = Path(__file__).with_name("worker.py")
DRAFTS: tuple[DraftMode, ...] = ("off", "auto")
Ask = Callable[[dict[str, Any]], dict[str, Any]]
ENDS_WITHIN = 10.0  # seconds that a process has to end by itself


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine of the comparison: its name in the table, and the command that starts its process."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """What every engine has room for: positions of a sequence, sequences at once."""

    context: int
    running: int

    @property
    def words(self) -> tuple[str, ...]:
        return "--context", str(self.context), "--running", str(self.running)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Medians over the rounds. device: what the engine says it computes on. ratio: tokens per second against the first
    engine's in the same round."""

    engine: str
    device: str
    batch: int
    tokens_per_second: float
    ratio: float
    rounds: tuple[float, ...]

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def own_engines(
    model: str, room: Room, dtypes: Sequence[ServedDType] = ("bfloat16",), drafts: Sequence[DraftMode] = DRAFTS
) -> list[Contender]:
    """Ours in each dtype, with each way to draft."""
    # As a module: a script would find the tidar_core that is installed, if any, and not the one that runs this.
    base = (sys.executable, "-m", "tidar_core.bench.peers.worker", "tidar", model, *room.words)
    return [
        Contender(f"tidar {dtype}, drafts {mode}", (*base, "--dtype", dtype, "--drafts", mode))
        for dtype in dtypes
        for mode in drafts
    ]


def peer_python(name: str, directory: Path) -> Path:
    """The Python of the environment that `install.sh` made for a peer; our own for transformers, which it has, where
    none was made. Raises ConfigError where there is none."""
    if name == "transformers" and not (directory / name).exists():
        return Path(sys.executable)
    python = directory / name / "bin" / "python"
    if not python.exists():
        script = WORKER.with_name("install.sh")
        raise ConfigError(f"{name} is not installed in {directory}: bash {script} {directory} {name}")
    return python


def peer_engine(name: str, directory: Path, model: str, room: Room) -> Contender:
    """A peer by its name. Raises ConfigError as `peer_python` does."""
    shown = f"{name}, one prompt at a time" if name == "llama.cpp" else name
    return Contender(shown, (str(peer_python(name, directory)), str(WORKER), name, model, *room.words))


def model_for(peer: str, source: ModelSource, folder: Path) -> str:
    """The model as a peer reads it: llama.cpp a GGUF file, the others a directory in bf16, which is written to `folder`
    where the model is a GGUF file. Raises ConfigError where there is no such form."""
    if peer == "llama.cpp":
        if source.gguf_path is None:
            raise ConfigError("llama.cpp reads GGUF files: give one as the model, or leave this peer out")
        return str(source.gguf_path)
    if source.gguf_path is None:
        return str(source.directory)
    found = source.gguf_path.stat()  # another file may have the same name
    target = folder / f"{source.name}-{found.st_size:x}-{found.st_mtime_ns:x}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "model"
            dense_model(source, torch.bfloat16, local_files_only=True).save_pretrained(made)
            load_tokenizer(source).save_pretrained(made)
            made.rename(target)
    return str(target)


def compare_engines(
    engines: Sequence[Contender],
    prompts: Sequence[str],
    *,
    batches: Sequence[int],
    rounds: int,
    at_least: int,
    max_tokens: int,
    honour_end: bool,
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[list[PeerResult]], None] = lambda found: None,
) -> list[PeerResult]:
    """Sends rounds of at least `at_least` prompts, `batch` at a time, to each engine in turn. Before the first round of
    a batch size every engine gets one that does not count, in which it compiles what it needs for that size. keep gets
    the results so far after each round.

    Raises ConfigError where an engine does not start or dies.
    """
    results: list[PeerResult] = []
    question = partial(_question, prompts, max_tokens, honour_end)
    with ExitStack() as stack:
        running = [stack.enter_context(_running(engine, say)) for engine in engines]
        for batch in batches:
            speeds: list[list[float]] = [[] for _ in engines]
            so_far = results
            parts = -(-at_least // batch)
            say(f"batch {batch}: warming up")
            for _, ask in running:
                ask(question(0, batch))
            for number in range(rounds):
                firsts = range(number * parts * batch, (number + 1) * parts * batch, batch)
                for (_, ask), mine in zip(running, speeds, strict=True):
                    mine.append(_speed([ask(question(first, batch)) for first in firsts]))
                shown = ", ".join(f"{e.name} {s[-1]:.1f}" for e, s in zip(engines, speeds, strict=True))
                say(f"batch {batch}, round {number + 1} of {rounds}: {shown} tokens/s")
                results = so_far + [
                    _result(engine, device, batch, mine, speeds[0])
                    for engine, (device, _), mine in zip(engines, running, speeds, strict=True)
                ]
                keep(results)
    return results


def _result(engine: Contender, device: str, batch: int, speeds: list[float], first: list[float]) -> PeerResult:
    ratios = [speed / base for speed, base in zip(speeds, first, strict=True)]
    rounded = tuple(round(speed, 1) for speed in speeds)
    return PeerResult(engine.name, device, batch, median(speeds), median(ratios), rounded)


def _speed(replies: Sequence[dict[str, Any]]) -> float:
    """Tokens per second."""
    tokens: int = sum(reply["tokens"] for reply in replies)
    return tokens / sum(reply["seconds"] for reply in replies)


def _question(prompts: Sequence[str], max_tokens: int, honour_end: bool, first: int, batch: int) -> dict[str, Any]:
    """What an engine is sent: `batch` of the prompts from `first` on."""
    chosen = [prompts[(first + i) % len(prompts)] for i in range(batch)]
    return {"prompts": chosen, "max_tokens": max_tokens, "honour_end": honour_end}


@contextmanager
def _running(engine: Contender, say: Callable[[str], None]) -> Iterator[tuple[str, Ask]]:
    """The engine's process, ready; gives the name of its device, and the function that sends it a round."""
    say(f"starting {engine.name}")
    root = str(Path(tidar_core.__file__).absolute().parent.parent)
    with (
        TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            engine.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=root
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def reply() -> dict[str, Any]:
            line = answers.readline()
            if not line:
                status = process.wait()
                log.seek(0)
                last = last_line(log.read(), "nothing")
                raise ConfigError(f"{engine.name} ended by itself (status {status}) and said last: {last}")
            read: dict[str, Any] = json.loads(line)
            return read

        def ask(question: dict[str, Any]) -> dict[str, Any]:
            with suppress(BrokenPipeError):  # the reply, which is none, tells who ended
                questions.write(json.dumps(question) + "\n")
                questions.flush()
            return reply()

        try:
            loaded = reply()
            for note in loaded["notes"]:
                say(f"{engine.name}: {note}")
            yield loaded["device"], ask
        finally:
            with suppress(BrokenPipeError):
                questions.close()
            try:
                process.wait(ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
