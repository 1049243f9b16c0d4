"""What the conversion's tests train with: a tiny base as the trainer runs it, documents, a training of seconds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import typer
from typer.testing import CliRunner

from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.config import Architecture, EngineConfig
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.command import convert_command
from tidar_core.convert.drafter import new_drafter, with_slot_head
from tidar_core.convert.forward import FrozenBase, frozen_base
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus, content_key
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, TrainingData, Watch, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.engine import load_engine
from tidar_core.layout import WithinBlock
from tidar_core.model.adapter import identify_base, load_adapter
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import AdapterWeights
from tidar_core.request import SamplingParams

# A model whose words a small drafter can learn to foresee in seconds, of sizes that the CPU kernels are made for.
SIMPLE = {"layers": 1, "hidden": 48, "head_dim": 16}
# Each of the conversations that are begun before there is a token takes what fits: up to 448 tokens.
BRIEF = {**SIMPLE, "max_positions": 256}
SMALL = ("--own-tokens", 3000, "--dtype", "float32", "--block-length", 4, "--rank", 8, "--rows", 256, "--threads", 1)
CONFIG = TrainConfig(
    block=4, anchors=16, rows_a_step=128, learning_rate=1e-2, warmup=5, measure_every=10, vocabulary=200
)


@dataclass(frozen=True, slots=True)
class TinyBase:
    """A tiny checkpoint, loaded for training, and a random adapter for it with blocks of 4."""

    directory: Path
    base: FrozenBase
    identity: BaseIdentity
    adapter_directory: Path
    adapter: AdapterWeights


def tiny_base(
    directory: Path, architecture: Architecture = "llama", within_block: WithinBlock = "bidirectional", **sizes: object
) -> TinyBase:
    """Everything in fp32, so that what should be equal is."""
    model = tiny_checkpoint(directory / "model", architecture, **sizes)  # type: ignore[arg-type]
    source = find_model(str(model))
    config = load_config(source)
    weights = load_weights(source, config, torch.float32, "cpu")
    identity = identify_base(source.name, config, weights, load_tokenizer(source))
    adapter = tiny_adapter(directory / "adapter", model, within_block=within_block)
    loaded = load_adapter(adapter, identity, torch.float32, "cpu").weights
    return TinyBase(model, frozen_base(config, weights), identity, adapter, loaded)


class Killed(BaseException):
    """What a test raises where a run would be killed; nothing catches it."""


def random_documents(count: int, seed: int = 0, longest: int = 60) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents (tokens, own) of random tokens, with a prompt in front and another given stretch in some."""
    draw = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(draw.integers(14, longest))
        own = np.arange(length) >= int(draw.integers(1, 6))
        if draw.random() < 0.5:
            own[length // 2 : length // 2 + 3] = False
        documents.append((draw.integers(3, 500, length).astype(np.int32), own))
    return documents


def corpus_of(documents: list[tuple[np.ndarray, np.ndarray]]) -> Corpus:
    """The documents as a corpus of conversations."""
    return Corpus(
        tokens=np.concatenate([tokens for tokens, _ in documents]),
        own=np.concatenate([own for _, own in documents]).astype(np.uint8),
        ends=np.cumsum([len(tokens) for tokens, _ in documents]),
        keys=np.array([content_key(tokens.tolist()) for tokens, _ in documents]),
        kinds=np.zeros(len(documents), np.int64),
        jobs=np.arange(len(documents)),
    )


def own_words_of(tiny: TinyBase, count: int) -> Corpus:
    """Greedy answers of the tiny base to random prompts."""
    engine = load_engine(EngineConfig(str(tiny.directory), "none", "float32", "cpu", max_running=64))
    prompts = [tuple(tokens[:8].tolist()) for tokens, _ in random_documents(count)]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    answers = answer_all(engine, prompts, [params] * count)
    texts = [np.array([*prompt, *answer.tokens], np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    return corpus_of([(text, np.arange(len(text)) >= 8) for text in texts])


def train(
    tiny: TinyBase,
    corpus: Corpus,
    directory: Path,
    steps: int | Budget,
    config: TrainConfig = CONFIG,
    slot_head: int = 0,
    step: Callable[[StepReport], None] = lambda report: None,
    **watch,
) -> tuple[list[StepReport], Progress]:
    """Trains a new drafter of the tiny base, or goes on with one in `directory`; what each step reported, the end."""
    start = new_drafter(tiny.identity, tiny.base.weights.embedding, 8, tiny.identity.projections, config.block, 0)
    start = with_slot_head(start, tiny.base.weights.embedding, slot_head, 0)
    learnt, held_out = corpus.split()
    longest = tiny.base.config.max_positions
    anchors = anchor_counts(corpus, learnt.tolist(), config.block, longest)
    sampler = Sampler(corpus.document, anchors, longest, config.seed)
    windows = choose_windows(corpus, held_out.tolist(), config.block, longest)
    seen: list[StepReport] = []

    def noted(report: StepReport) -> None:
        seen.append(replace(report, progress=replace(report.progress)))
        step(report)

    vocabulary = Vocabulary(corpus, tiny.base.weights.head, config.vocabulary)
    budget = steps if isinstance(steps, Budget) else Budget(steps=steps)
    data = TrainingData(sampler, vocabulary, windows)
    return seen, train_drafter(tiny.base, start, data, config, budget, directory, Watch(noted, **watch))


def run_command(*arguments: object) -> tuple[int, str]:
    """`tidar convert` with these arguments: its exit status and its output."""
    app = typer.Typer()
    app.command()(convert_command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
