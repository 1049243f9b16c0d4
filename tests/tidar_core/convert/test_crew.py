"""A crew takes the steps that one worker with all its rows would take, and stays together in everything it decides."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tidar_core.convert.documents import HEADER, document
from tests.tidar_core.convert.trained import SIMPLE, Killed, TinyBase, corpus_of, random_documents
from tests.tiny import tiny_checkpoint
from tidar_core.config import ConfigError
from tidar_core.convert import run as run_module
from tidar_core.convert.blocks import draw_blocks, narrowed, pack_documents
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.crew import ALONE, Crew
from tidar_core.convert.drafter import new_drafter
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus, open_store
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, TrainingData, Watch, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.model.adapter import tokenizer_fingerprint
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.model.weights import named_tensors

SIZE = 3
CONFIG = TrainConfig(
    block=4, anchors=16, rows_a_step=64, learning_rate=1e-2, warmup=2, measure_every=2, vocabulary=200, patience=99
)


def crew_of_threads(size: int) -> list[Crew]:
    """Workers in the threads of this process, which wait for each other."""
    barrier, given = threading.Barrier(size, timeout=60), [None] * size

    def member(rank: int) -> Crew:
        def exchange(mine: object) -> list:
            given[rank] = mine
            barrier.wait()
            everything = list(given)
            barrier.wait()
            return everything

        def add_up(tensors: Sequence[Tensor]) -> None:
            everything = exchange([tensor.clone() for tensor in tensors])
            for place, tensor in enumerate(tensors):
                tensor.copy_(sum(theirs[place] for theirs in everything))

        return Crew(rank, size, add_up, lambda number: exchange(number)[0])

    return [member(rank) for rank in range(size)]


def together(crew: list[Crew], job: Callable[[Crew], object]) -> list:
    with ThreadPoolExecutor(len(crew)) as pool:
        return list(pool.map(job, crew))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of(random_documents(40))


class Run:
    """What one worker saw: its steps, and its drafter at each measurement."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.drafters: list[list[Tensor]] = []
        self.bests: list[bool] = []
        self.progress = Progress()


def train(
    tiny: TinyBase, corpus: Corpus, directory: Path, steps: int, crew: Crew, config: TrainConfig, windows: int = 99
) -> Run:
    torch.set_num_threads(1)
    run = Run()

    def measured(result, adapter, progress, best) -> None:
        run.drafters.append([tensor.clone() for _, tensor in named_tensors(adapter)])
        run.bests.append(best)

    start = new_drafter(tiny.identity, tiny.base.weights.embedding, 8, tiny.identity.projections, config.block, 0)
    learnt, held_out = corpus.split()
    longest = tiny.base.config.max_positions
    anchors = anchor_counts(corpus, learnt.tolist(), config.block, longest)
    data = TrainingData(
        Sampler(corpus.document, anchors, longest, config.seed),
        Vocabulary(corpus, tiny.base.weights.head, config.vocabulary),
        choose_windows(corpus, held_out[:windows].tolist(), config.block, longest),
    )
    run.progress = train_drafter(
        tiny.base, start, data, config, Budget(steps=steps), directory,
        Watch(step=lambda r: run.steps.append(replace(r, progress=replace(r.progress))), measured=measured), crew,
    )  # fmt: skip
    return run


def test_a_crew_takes_the_steps_of_one_worker_with_all_its_rows(tiny, corpus, tmp_path):
    alone = train(tiny, corpus, tmp_path / "one", 6, ALONE, replace(CONFIG, rows_a_step=SIZE * CONFIG.rows_a_step))
    runs = together(crew_of_threads(SIZE), lambda crew: train(tiny, corpus, tmp_path / "all", 6, crew, CONFIG))
    for run in runs:
        for one, ours in zip(alone.steps, run.steps, strict=True):
            assert ours.loss == pytest.approx(one.loss, rel=1e-4)
            assert ours.norm == pytest.approx(one.norm, rel=1e-3)
            assert ours.progress == replace(one.progress, seconds=ours.progress.seconds)
        assert run.progress == runs[0].progress
        for mine, first in zip(run.drafters, runs[0].drafters, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))
        for a, b in zip(run.drafters[-1], alone.drafters[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert not torch.equal(runs[0].drafters[0][1], runs[0].drafters[-1][1])
    for step, *others in zip(*(run.steps for run in runs), strict=True):
        rows = [step.mask_rows, *(other.mask_rows for other in others)]
        assert max(rows) - min(rows) <= CONFIG.block
    total = sum(report.mask_rows for run in runs for report in run.steps)
    assert total == alone.progress.rows == runs[0].progress.rows


def test_a_crew_decides_by_its_first_clock(tiny, corpus, tmp_path, monkeypatch):
    """Workers whose clocks differ, and what they measure, end with the same account of it."""

    def job(member: Crew) -> Run:
        return train(tiny, corpus, tmp_path, 6, member, replace(CONFIG, patience=2), windows=2 - member.rank)

    runs = together(crew_of_threads(2), job)
    assert runs[0].progress == runs[1].progress
    assert runs[0].bests == runs[1].bests


def test_a_loss_that_is_no_number_stops_all_at_the_same_step(tiny, corpus, tmp_path):
    crew = crew_of_threads(2)

    def job(member: Crew) -> str:
        weights = tiny.base.weights
        if member.rank:
            weights = replace(weights, final_norm=torch.full_like(weights.final_norm, torch.nan))
        harmed = replace(tiny, base=replace(tiny.base, weights=weights))
        with pytest.raises(ConfigError, match="not a number at step 0") as raised:
            train(harmed, corpus, tmp_path, 5, member, CONFIG)
        return str(raised.value)

    assert len(set(together(crew, job))) == 1


def test_a_crew_goes_on_where_one_worker_was_and_the_other_way_round(tiny, corpus, tmp_path):
    def seen(run: Run) -> list[int]:
        return [report.progress.step for report in run.steps]

    train(tiny, corpus, tmp_path, 3, ALONE, CONFIG)
    runs = together(crew_of_threads(2), lambda crew: train(tiny, corpus, tmp_path, 6, crew, CONFIG))
    assert [seen(run) for run in runs] == [[4, 5, 6], [4, 5, 6]]
    assert seen(train(tiny, corpus, tmp_path, 8, ALONE, CONFIG)) == [7, 8]


def test_a_worker_that_sees_another_checkpoint_is_refused(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path / "0", 2, ALONE, CONFIG)
    second = crew_of_threads(2)[1]
    second = replace(second, agree=lambda number: 2.0)
    with pytest.raises(ConfigError, match="is not the same for all workers"):
        train(tiny, corpus, tmp_path / "1", 4, second, CONFIG)


def begin(options: ConvertOptions, rank: int, agree: Callable[[float], float]) -> None:
    """Goes the way of one of two workers up to where it would train."""
    with pytest.MonkeyPatch.context() as patched, suppress(Killed):
        patched.setattr(run_module, "train_drafter", Mock(side_effect=Killed))
        run_module.train_gathered(options, 0.0, Mock(), Crew(rank, 2, agree=agree))


def agreed_by_others(agreed: list[float]) -> Callable[[float], float]:
    left = iter(agreed)
    return lambda _: next(left)


def test_a_worker_that_reads_other_things_than_the_first_is_refused(tiny, tmp_path):
    """As where each node has files of its own, or where another run gathers into the data while the workers start."""
    torch.set_num_threads(1)
    tokenizer = tokenizer_fingerprint(load_tokenizer(find_model(str(tiny.directory))))
    for name, count in (("data", 30), ("fewer", 29)):
        store = open_store(tmp_path / name, HEADER.model_copy(update={"tokenizer": tokenizer}))
        store.append([document(job) for job in range(count)], [], 0.0)
    options = ConvertOptions(
        str(tiny.directory), tmp_path / "out", tmp_path / "data", rank=2, device="cpu", dtype="float32", train=CONFIG
    )
    agreed: list[float] = []
    begin(options, 0, lambda number: agreed.append(number) or number)
    assert len(agreed) > 1
    begin(options, 1, agreed_by_others(agreed))
    other = tiny_checkpoint(tmp_path / "other", seed=1, **SIMPLE)
    for theirs in (replace(options, data=tmp_path / "fewer"), replace(options, model=str(other))):
        with pytest.raises(ConfigError, match="model or --start is not the same for all workers: put it where every"):
            begin(theirs, 1, agreed_by_others(agreed))


def test_too_few_documents_are_told_before_the_weights_are_read(tiny, tmp_path, monkeypatch):
    tokenizer = tokenizer_fingerprint(load_tokenizer(find_model(str(tiny.directory))))
    store = open_store(tmp_path / "data", HEADER.model_copy(update={"tokenizer": tokenizer}))
    store.append([], [1, 2], 5.0)
    monkeypatch.setattr(run_module, "load_base_weights", lambda *given: pytest.fail("the weights were read"))
    options = ConvertOptions(
        str(tiny.directory), tmp_path / "out", tmp_path / "data", rank=2, device="cpu", dtype="float32", train=CONFIG
    )
    with pytest.raises(ConfigError, match="too few documents"):
        run_module.train_gathered(options, 0.0, Mock())


def test_too_few_documents_for_a_crew(tiny, tmp_path):
    few = corpus_of(random_documents(4))
    with pytest.raises(ConfigError, match="too few documents"):
        train(tiny, few, tmp_path, 2, Crew(0, 3), CONFIG)


def test_parts_are_whole_and_even():
    for size in (1, 2, 3, 7):
        parts = [Crew(rank, size).part(100) for rank in range(size)]
        assert parts[0][0] == 0
        assert parts[-1][1] == 100
        assert all(one[1] == two[0] for one, two in pairwise(parts))


def test_a_narrowed_pack_holds_what_its_blocks_need(corpus):
    pack = pack_documents([corpus.document(index) for index in range(6)], torch.device("cpu"))
    blocks = draw_blocks(pack, 3, 4, 1024, np.random.default_rng(0))
    first, last = int(np.flatnonzero(blocks.document == 2)[1]), int(np.flatnonzero(blocks.document == 4)[1])
    part = blocks.part(first, last)
    kept, over = narrowed(pack, part)
    assert len(kept.spans) == 3
    assert len(kept.tokens) == len(kept.own) == len(kept.positions) == sum(length for _, length in pack.spans[2:5])
    assert torch.equal(kept.tokens[over.target_rows], pack.tokens[part.target_rows])
    assert torch.equal(kept.positions[over.target_rows], pack.positions[part.target_rows])
    starts = [start for start, _ in kept.spans]
    assert [int(kept.positions[start]) for start in starts] == [0, 0, 0]
    assert over.document.tolist() == (part.document - 2).tolist()
