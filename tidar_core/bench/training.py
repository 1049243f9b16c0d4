"""`tidar bench training`: mask rows a second of the drafter's training here, and what the time goes to.

The trainer's own steps (`tidar_core.convert.trainer`) on documents of random tokens: what a step costs does not depend
on what they say. A few steps more run under torch's profiler, which slows them: they say where the time goes, not how
much there is.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from tidar_core.convert.drafter import new_drafter, with_slot_head
from tidar_core.convert.forward import FrozenBase, frozen_base
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus
from tidar_core.convert.speed import fast_dtype, measure_peak, work_per_row
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, TrainingData, Watch, check_rows, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.model.adapter import identify_base
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import widened
from tidar_core.transfer import choose_device

DOCUMENTS, LONGEST, SHORTEST = 512, 480, 120  # tokens of each, about as own words are
WARM_UP = 2  # steps that are not counted: the first compile what the others run
PROFILED = 3
LISTED = 15


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work (a kernel, or an operation on a CPU): its share of the device's time, its calls in a step."""

    name: str
    share: float
    calls: float


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """mask_rows_per_second: the median step's. fraction: of what a large matrix product reaches here. busy: share of
    the profiled time in which the device computed; None on a CPU, and where the profiler cannot see into the device."""

    mask_rows_per_second: float
    clean_rows_per_second: float
    seconds_a_step: float
    fraction: float
    busy: float | None
    work: tuple[Work, ...]


def random_corpus(vocab_size: int) -> Corpus:
    """Documents of random lengths and tokens, some tokens frequent and most rare, all of them to learn from."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(SHORTEST, LONGEST, DOCUMENTS)
    tokens = np.minimum(draw.zipf(1.2, int(lengths.sum())) - 1, vocab_size - 1).astype(np.int32)
    numbers = np.arange(DOCUMENTS, dtype=np.int64)
    keys = draw.integers(-(2**62), 2**62, DOCUMENTS, dtype=np.int64)
    return Corpus(tokens, np.ones(len(tokens), np.uint8), np.cumsum(lengths), keys, np.zeros_like(numbers), numbers)


def measure_training(
    base: FrozenBase, identity: BaseIdentity, config: TrainConfig, rank: int, steps: int
) -> TrainingSpeed:
    """Trains a new drafter for so many steps, and a few more to look where the time goes."""
    corpus, limit = random_corpus(base.config.vocab_size), base.config.max_positions
    embedding = base.weights.embedding
    start = new_drafter(identity, embedding, rank, identity.projections, config.block, 0)
    start = with_slot_head(start, embedding, config.slot_head, 0)
    some, held = corpus.split()
    sampler = Sampler(corpus.document, anchor_counts(corpus, some.tolist(), config.block, limit), limit, 0)
    vocabulary = Vocabulary(corpus, base.weights.head, config.vocabulary)
    data = TrainingData(sampler, vocabulary, choose_windows(corpus, held.tolist()[:1], config.block, limit))
    on_gpu = base.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    reports: list[StepReport] = []

    def seen(report: StepReport) -> None:
        reports.append(report)
        if len(reports) == WARM_UP + steps:
            profiler.start()
        if len(reports) == WARM_UP + steps + PROFILED:
            profiler.stop()

    with tempfile.TemporaryDirectory() as scratch:
        budget = Budget(steps=WARM_UP + steps + PROFILED)
        train_drafter(base, start, data, config, budget, Path(scratch), Watch(step=seen))
    counted, profiled = reports[WARM_UP : WARM_UP + steps], reports[WARM_UP + steps :]
    per_row, peak = work_per_row(base, start, vocabulary.columns), measure_peak(base.device, base.dtype)
    work, device_seconds = _work_of(profiler, on_gpu)
    typical = sorted(counted, key=lambda report: report.mask_rows / report.seconds)[len(counted) // 2]
    return TrainingSpeed(
        mask_rows_per_second=typical.mask_rows / typical.seconds,
        clean_rows_per_second=typical.clean_rows / typical.seconds,
        seconds_a_step=median(report.seconds for report in counted),
        fraction=per_row.fraction(typical.clean_rows, typical.mask_rows, typical.seconds, peak),
        busy=device_seconds / sum(report.seconds for report in profiled) if on_gpu and work else None,
        work=work,
    )


def _work_of(profiler: Any, on_gpu: bool) -> tuple[tuple[Work, ...], float]:
    """What took most of the device's time, a step, and that time in seconds."""
    found = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.key, event.count)
        for event in profiler.key_averages()
    ]
    total = sum(microseconds for microseconds, _, _ in found)
    longest = sorted((one for one in found if one[0] > 0), reverse=True)[:LISTED]
    work = tuple(Work(name[:100], microseconds / total, count / PROFILED) for microseconds, name, count in longest)
    return work, total / 1e6


def run_training_bench(model: str, rank: int, steps: int, rows: int, device: str, threads: int) -> dict[str, Any]:
    """`measure_training` for a model as `tidar convert` trains it. Raises ConfigError."""
    config = TrainConfig(rows_a_step=rows, measure_every=10**9)
    check_rows(config)
    if threads:
        torch.set_num_threads(threads)
    on = choose_device(device)
    source = find_model(model)
    shape = load_config(source)
    weights = load_weights(source, shape, torch.bfloat16, on)
    if fast_dtype(on, torch.bfloat16) is torch.float32:
        weights = widened(weights)
    base = frozen_base(shape, weights)
    identity = identify_base(source.name, shape, weights, load_tokenizer(source))
    speed = measure_training(base, identity, config, rank, steps)
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else "CPU"
    return {"model": source.name, "device": name, "torch": torch.__version__, "training": asdict(speed)}
