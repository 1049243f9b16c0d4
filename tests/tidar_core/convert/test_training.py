"""The trainer: it learns, with blocks of any size and in any memory, within its budget."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tidar_core.convert.trained import CONFIG, train
from tidar_core.config import ConfigError
from tidar_core.convert import trainer
from tidar_core.convert.blocks import BlockSizes, block_of_step, blocks_ahead
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.drafter import new_drafter
from tidar_core.convert.losses import LossConfig
from tidar_core.convert.pace import SavePace
from tidar_core.convert.sampler import Sampler, anchor_counts
from tidar_core.convert.shards import Corpus
from tidar_core.convert.trainer import Budget, TrainConfig, learning_rate
from tidar_core.model.weights import named_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(0.5, "product")])
def test_tokens_per_step_rise(tiny, corpus, tmp_path, within_block, loss):
    measured = []
    config = replace(CONFIG, within_block=within_block, loss=loss, measure_every=100)
    _, progress = train(
        tiny, corpus, tmp_path, 200, config, measured=lambda result, *_: measured.append(result.tokens_per_step)
    )
    assert measured[-1] > measured[0] + 0.1
    assert progress.best == max(measured)


def full_over(rows: int) -> Callable[..., torch.Tensor]:
    """`run_masks` where memory holds so many rows, and no more."""
    whole = trainer.run_masks

    def run(base, adapter, clean, blocks, within_block):
        if len(blocks.positions) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(base, adapter, clean, blocks, within_block)

    return run


def test_a_training_goes_on_in_smaller_parts_where_memory_is_full(tiny, corpus, tmp_path, monkeypatch):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 6)
    monkeypatch.setattr(trainer, "run_masks", full_over(40))
    lines: list[str] = []
    parts, _ = train(tiny, corpus, tmp_path / "parts", 6, line=lines.append)
    assert [line.split(": ")[1] for line in lines] == [f"{rows} mask rows at once from here on" for rows in (64, 32)]
    assert [step.mask_rows for step in parts] == [step.mask_rows for step in whole]
    assert [step.loss for step in parts] == pytest.approx([step.loss for step in whole], rel=1e-4)
    assert [step.norm for step in parts] == pytest.approx([step.norm for step in whole], rel=1e-3)


def test_memory_that_is_full_midway_counts_no_block_twice(tiny, corpus, tmp_path, monkeypatch):
    config = replace(CONFIG, rows_a_pass=64)  # two parts a step
    whole, _ = train(tiny, corpus, tmp_path / "whole", 1, config)
    run, calls = trainer.run_masks, itertools.count(1)

    def full_once(*given):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*given)

    monkeypatch.setattr(trainer, "run_masks", full_once)
    parts, _ = train(tiny, corpus, tmp_path / "parts", 1, config)
    assert next(calls) > 3
    assert parts[0].loss == pytest.approx(whole[0].loss, rel=1e-4)
    assert parts[0].norm == pytest.approx(whole[0].norm, rel=1e-3)


def test_memory_that_is_too_small_is_told_in_one_line(tiny, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "run_masks", full_over(0))
    with pytest.raises(ConfigError, match="full, even with one block at a time"):
        train(tiny, corpus, tmp_path / "blocks", 3)
    monkeypatch.setattr(trainer, "run_clean", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(ConfigError, match=r"memory is full: .* lower --rows \(now 128\)$"):
        train(tiny, corpus, tmp_path / "reading", 3)
    monkeypatch.setattr(trainer, "measure_held_out", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(ConfigError, match="memory is full: it does not hold the held-out documents"):
        train(tiny, corpus, tmp_path / "measuring", 3)


@pytest.mark.parametrize(("sizes", "seen"), [("mixed", {2, 3, 4}), ("growing", {2, 3, 4})])
def test_blocks_may_be_of_several_sizes(tiny, corpus, tmp_path, monkeypatch, sizes, seen):
    found: list[int] = []

    def noted(*arguments):
        found.append(block_of_step(*arguments))
        return found[-1]

    monkeypatch.setattr(trainer, "block_of_step", noted)
    measured: list[float] = []
    config = replace(CONFIG, block_sizes=sizes, measure_every=100)
    train(tiny, corpus, tmp_path, 200, config, measured=lambda result, *_: measured.append(result.tokens_per_step))
    assert set(found) == seen
    assert sizes == "mixed" or (found == sorted(found) and found[100:] == [4] * 100)
    assert measured[-1] > measured[0] + 0.1


@given(whole=st.integers(2, 16), used=st.floats(0, 1), sizes=st.sampled_from(get_args(BlockSizes)), seed=st.integers(0))
def test_a_block_has_from_two_to_all_slots(whole, used, sizes, seed):
    block = block_of_step(sizes, whole, used, np.random.default_rng(seed))
    assert 2 <= block <= whole
    assert sizes == "mixed" or used < 0.5 or block == whole


@given(
    whole=st.integers(2, 16), sizes=st.sampled_from(get_args(BlockSizes)), used=st.floats(0, 1), more=st.floats(0, 1)
)
def test_no_block_comes_that_was_not_ahead(whole, sizes, used, more):
    ahead = blocks_ahead(sizes, whole, used)
    assert whole in ahead
    assert min(ahead) >= 2
    for seed in range(5):
        assert block_of_step(sizes, whole, max(used, more), np.random.default_rng(seed)) in ahead


@pytest.mark.parametrize(("sizes", "prepared"), [("whole", [4]), ("mixed", [2, 3, 4]), ("growing", [2, 3, 4])])
def test_sizes_are_prepared_before_the_clock_starts(tiny, corpus, tmp_path, monkeypatch, sizes, prepared):
    now = 0.0
    asked: list[list[int]] = []

    def prepare(config, weights, blocks, within_block) -> None:
        nonlocal now
        now += 300
        asked.append(list(blocks))

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now))
    slow = replace(tiny, base=replace(tiny.base, attends=replace(tiny.base.attends, prepare=prepare)))
    _, progress = train(slow, corpus, tmp_path, Budget(steps=2, seconds=100), replace(CONFIG, block_sizes=sizes))
    assert asked == [prepared]
    assert (progress.step, progress.seconds) == (2, 0)


def test_parts_of_a_step_add_up(tiny, corpus, tmp_path):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 4)
    parts, _ = train(tiny, corpus, tmp_path / "parts", 4, replace(CONFIG, rows_a_pass=24))
    for one, other in zip(whole, parts, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)


def test_time_is_counted_and_tells_when_to_measure_and_to_end(tiny, corpus, tmp_path, monkeypatch):
    """By a clock that moves a second at each look, a step takes one, so does a checkpoint, and a measurement that keeps
    what is as good as the best takes three."""
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    measured: list[int] = []
    config = replace(CONFIG, rows_a_step=16, measure_every=0, learning_rate=0.0)
    _, progress = train(
        tiny, corpus, tmp_path, Budget(steps=1000, seconds=130), config,
        measured=lambda result, adapter, progress, best: measured.append(progress.step),
    )  # fmt: skip
    assert measured == [0, 57, 114, 115]
    assert (progress.step, progress.seconds) == (115, 115 + 3 * 4 + 6)


def test_the_time_that_checkpoints_take_counts(tiny, corpus, tmp_path, monkeypatch):
    """By a clock that stands still but while a checkpoint is written. The drafter does too: what is measured at the end
    is no worse than the best, and kept."""
    now = 0.0

    def saved(*_) -> None:
        nonlocal now
        now += 30

    monkeypatch.setattr(SavePace, "due", lambda *_: True)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trainer, "save_training", saved)
    still = replace(CONFIG, measure_every=1000, learning_rate=0.0)
    seen, progress = train(tiny, corpus, tmp_path, Budget(steps=50, seconds=100), still)
    assert [report.seconds for report in seen] == [0.0] * 4
    assert progress.seconds == 120 + 30  # the last one belongs to the measurement at the end


def test_the_slot_head_is_trained_and_faster_than_the_rest(tiny, corpus, tmp_path):
    seen: list[dict[str, torch.Tensor]] = []

    def measured(result, adapter, *_) -> None:
        seen.append({name: tensor.clone() for name, tensor in named_tensors(adapter)})

    train(tiny, corpus, tmp_path, 1, replace(CONFIG, measure_every=1), 16, measured=measured)
    moved = {name: (seen[1][name] - tensor).abs().max().item() for name, tensor in seen[0].items()}
    assert moved["mask_embedding"] > 0
    assert moved["slot_head.out"] / moved["mask_embedding"] == pytest.approx(trainer.SLOT_HEAD_FASTER, rel=0.01)


def test_training_ends_where_nothing_is_gained(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=2, patience=3)
    seen, progress = train(tiny, corpus, tmp_path, 100, config)
    assert len(seen) == 84  # a high learning rate may cost at first what it gains in the end
    assert progress.stale == 3
    assert train(tiny, corpus, tmp_path, 100, config)[0] == []


def test_a_rank_that_does_not_fit_is_one_line(tiny):
    with pytest.raises(ConfigError, match=r"rank 49 does not fit .* choose 1 to 48"):
        new_drafter(tiny.identity, tiny.base.weights.embedding, 49, tiny.identity.projections, 4, 0)


def test_a_new_drafter_adapts_what_was_asked_for_and_changes_nothing_yet(tiny):
    drafter = new_drafter(tiny.identity, tiny.base.weights.embedding, 4, ("qkv", "down"), 4, 0)
    names = {name for name, _ in named_tensors(drafter)}
    assert names == {"mask_embedding"} | {
        f"layers.{i}.{p}.{m}" for i in range(tiny.identity.layers) for p in ("qkv", "down") for m in "AB"
    }
    assert all(tensor.eq(0).all() for name, tensor in named_tensors(drafter) if name.endswith(".B"))


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=10, final_share=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(config, 500, 0.5) == pytest.approx(0.55)
    assert learning_rate(config, 1000, 1.0) == pytest.approx(0.1)


def sampler_of(corpus: Corpus, documents: Iterable[int]) -> Sampler:
    return Sampler(corpus.document, anchor_counts(corpus, documents, 4, 1024), 1024, 0)


def test_the_order_of_an_epoch_is_drawn_once(corpus, monkeypatch):
    drawn, generator = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or generator(seed))
    sampler, progress = sampler_of(corpus, range(len(corpus))), Progress()
    while progress.epoch < 2:
        sampler.next_documents(progress, 1, 64)
    assert [seed[1] for seed in drawn] == [0, 1, 2]


def test_documents_come_once_an_epoch(corpus):
    learnt, _ = corpus.split()
    sampler, progress = sampler_of(corpus, learnt.tolist()), Progress()
    seen: list[bytes] = []
    while progress.epoch == 0:
        seen += [tokens.tobytes() for tokens, _ in sampler.next_documents(progress, 8, 16)]
    assert len(set(seen[: len(sampler)])) == len(sampler) == len(learnt)


def test_other_documents_begin_a_new_epoch(corpus):
    seen: list[int] = []

    def document(index: int) -> tuple[np.ndarray, np.ndarray]:
        seen.append(index)
        return corpus.document(index)

    progress = Progress()
    Sampler(document, dict.fromkeys(range(12), 1), 1024, 0).next_documents(progress, 5)
    assert (progress.epoch, len(seen)) == (0, 5)
    seen.clear()
    Sampler(document, dict.fromkeys(range(3), 1), 1024, 0).next_documents(progress, 3)
    assert progress.epoch == 1
    assert sorted(seen) == [0, 1, 2]


def test_as_many_documents_come_as_bring_what_is_wanted(corpus):
    sampler = Sampler(corpus.document, {0: 10, 1: 10, 2: 10, 3: 0}, 7, 0)
    assert [len(sampler.next_documents(Progress(), 20, most)) for most in (None, 9, 1)] == [2, 3, 12]
    assert all(len(tokens) == len(own) == 7 for tokens, own in sampler.next_documents(Progress(), 30))
