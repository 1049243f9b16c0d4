"""The trainer: it learns, resumes to the same loss, survives kills and bad luck, and leaves a folder that serves."""

import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.tidar_core.trained import SIMPLE, TinyBase, corpus_of, random_documents, tiny_base
from tidar_core.bench.drive import answer_all
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert import trainer
from tidar_core.convert.blocks import BlockSizes, block_of_step, blocks_ahead
from tidar_core.convert.checkpoint import Progress, load_checkpoint, save_checkpoint
from tidar_core.convert.drafter import PROJECTIONS, new_drafter, with_slot_head
from tidar_core.convert.held_out import choose_windows
from tidar_core.convert.losses import LossConfig
from tidar_core.convert.sampler import Sampler
from tidar_core.convert.shards import Corpus
from tidar_core.convert.trainer import Budget, StepReport, TrainConfig, Watch, learning_rate, train_drafter
from tidar_core.convert.vocabulary import Vocabulary
from tidar_core.engine import load_engine
from tidar_core.model.weights import named_tensors
from tidar_core.request import SamplingParams

CONFIG = TrainConfig(
    block=4, anchors=16, rows_a_step=128, learning_rate=1e-2, warmup=5, measure_every=10, vocabulary=200
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyBase:
    return tiny_base(tmp_path_factory.mktemp("tiny"), **SIMPLE)


def own_words_of(tiny: TinyBase, count: int) -> Corpus:
    """Greedy answers of the tiny base to random prompts."""
    engine = load_engine(EngineConfig(str(tiny.directory), "none", "float32", "cpu", max_running=64))
    prompts = [tuple(tokens[:8].tolist()) for tokens, _ in random_documents(count)]
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    answers = answer_all(engine, prompts, [params] * count)
    texts = [np.array([*prompt, *answer.tokens], np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    return corpus_of([(text, np.arange(len(text)) >= 8) for text in texts])


@pytest.fixture(scope="module")
def corpus(tiny) -> Corpus:
    return own_words_of(tiny, 160)


def train(
    tiny: TinyBase,
    corpus: Corpus,
    directory: Path,
    steps: int | Budget,
    config: TrainConfig = CONFIG,
    slot_head: int = 0,
    **watch,
) -> tuple[list[StepReport], Progress]:
    start = new_drafter(tiny.identity, tiny.base.weights.embedding, 8, PROJECTIONS, config.block, 0)
    start = with_slot_head(start, tiny.base.weights.embedding, slot_head, 0)
    learnt, held = corpus.split()
    sampler = Sampler(corpus, learnt.tolist(), config.block, tiny.base.config.max_positions, config.seed)
    windows = choose_windows(corpus, held.tolist(), config.block, tiny.base.config.max_positions)
    seen: list[StepReport] = []
    told = Watch(step=lambda r: seen.append(replace(r, progress=replace(r.progress))), **watch)
    vocabulary = Vocabulary(corpus, tiny.base.weights.head, config.vocabulary)
    budget = steps if isinstance(steps, Budget) else Budget(steps=steps)
    return seen, train_drafter(tiny.base, start, sampler, vocabulary, windows, config, budget, directory, told)


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


def test_a_resumed_training_has_the_same_losses(tiny, corpus, tmp_path, monkeypatch):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 24)

    class Stopped(Exception):
        pass

    def stop(result, adapter, progress, best) -> None:
        if progress.step == 10:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(Stopped):
            train(tiny, corpus, tmp_path / "parts", 24, measured=stop)
    lines: list[str] = []
    rest, progress = train(tiny, corpus, tmp_path / "parts", 24, line=lines.append)
    assert lines == ["going on from step 10"]
    assert [report.loss for report in rest] == [report.loss for report in whole[10:]]
    assert progress.step == 24
    assert progress.rows == sum(report.mask_rows for report in whole)


def test_parts_of_a_step_add_up(tiny, corpus, tmp_path):
    whole, _ = train(tiny, corpus, tmp_path / "whole", 4)
    parts, _ = train(tiny, corpus, tmp_path / "parts", 4, replace(CONFIG, rows_a_pass=24))
    for one, other in zip(whole, parts, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)


def test_a_broken_checkpoint_falls_back_to_the_one_before(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 3)
    train(tiny, corpus, tmp_path, 6)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    files[-1].write_bytes(files[-1].read_bytes()[:-100])
    lines: list[str] = []
    seen, _ = train(tiny, corpus, tmp_path, 6, line=lines.append)
    assert "cannot be read" in lines[0]
    assert lines[1] == "going on from step 3"
    assert len(seen) == 3


def test_other_settings_do_not_go_on(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"clip 1\.0, not 0\.5"):
        train(tiny, corpus, tmp_path, 4, replace(CONFIG, clip=0.5))


def test_a_training_goes_on_with_what_a_user_is_told_to_lower(tiny, corpus, tmp_path):
    """Also from a checkpoint of a version that did not let these change."""
    train(tiny, corpus, tmp_path, 2)
    recorded(tmp_path, {"learning_rate": 1e-2, "rows_a_step": 128, "tensors": 13})
    lines: list[str] = []
    lower = replace(CONFIG, learning_rate=1e-3, rows_a_step=64)
    seen, _ = train(tiny, corpus, tmp_path, 4, lower, line=lines.append)
    assert lines == ["going on from step 2"]
    assert [report.mask_rows for report in seen] == [64, 64]
    assert lower.settings().items() >= {"learning_rate": 1e-3, "rows_a_step": 64}.items()


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 4)
    broken = replace(tiny.base.weights, final_norm=torch.full_like(tiny.base.weights.final_norm, torch.nan))
    harmed = replace(tiny, base=replace(tiny.base, weights=broken))
    with pytest.raises(ConfigError, match=r"not a number at step 4: .*kept.*--learning-rate") as raised:
        train(harmed, corpus, tmp_path, 8)
    assert "\n" not in str(raised.value)
    progress, tensors, _ = load_checkpoint(tmp_path, {})
    assert progress.step == 4
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_gradient_that_is_no_number_stops_as_well(tiny, corpus, tmp_path, monkeypatch):
    train(tiny, corpus, tmp_path, 2)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(ConfigError, match="not a number at step 2"):
        train(tiny, corpus, tmp_path, 4)
    assert load_checkpoint(tmp_path, {})[0].step == 2


def test_time_is_counted_and_tells_when_to_measure_and_to_end(tiny, corpus, tmp_path, monkeypatch):
    """By a clock that moves a second at each look, a step takes one, and so do a measurement and a checkpoint."""
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    measured: list[int] = []
    config = replace(CONFIG, rows_a_step=16, measure_every=0)
    _, progress = train(
        tiny, corpus, tmp_path, Budget(steps=1000, seconds=130), config,
        measured=lambda result, adapter, progress, best: measured.append(progress.step),
    )  # fmt: skip
    assert measured == [0, 57, 113, 120]
    assert (progress.step, progress.seconds) == (120, 120 + 4 + 7)


def test_the_time_that_checkpoints_take_counts(tiny, corpus, tmp_path, monkeypatch):
    """By a clock that stands still but while a checkpoint is written."""
    now = 0.0

    def saved(*_) -> None:
        nonlocal now
        now += 30

    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trainer, "save_checkpoint", saved)
    seen, progress = train(tiny, corpus, tmp_path, Budget(steps=50, seconds=100), replace(CONFIG, measure_every=1000))
    assert [report.seconds for report in seen] == [0.0] * 4
    assert progress.seconds == 120 + 30  # the last one belongs to the measurement at the end


def test_the_slot_head_is_trained_and_faster_than_the_rest(tiny, corpus, tmp_path):
    seen: list[dict[str, torch.Tensor]] = []

    def told(result, adapter, *_) -> None:
        seen.append({name: tensor.clone() for name, tensor in named_tensors(adapter)})

    train(tiny, corpus, tmp_path, 1, replace(CONFIG, measure_every=1), 16, measured=told)
    moved = {name: (seen[1][name] - tensor).abs().max().item() for name, tensor in seen[0].items()}
    assert moved["mask_embedding"] > 0
    assert moved["slot_head.out"] / moved["mask_embedding"] == pytest.approx(trainer.SLOT_HEAD_FASTER, rel=0.01)


def test_training_ends_where_nothing_is_gained(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=2, patience=3)
    seen, progress = train(tiny, corpus, tmp_path, 100, config)
    assert len(seen) == 84  # a high learning rate may cost at first what it gains in the end
    assert progress.stale == 3
    assert train(tiny, corpus, tmp_path, 100, config)[0] == []


def test_a_training_that_ended_early_goes_on_with_more_budget(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=2, patience=3)
    train(tiny, corpus, tmp_path, 20, config)
    seen, progress = train(tiny, corpus, tmp_path, 60, config)
    assert len(seen) == 32
    assert progress.step == 52


def test_new_starts_are_no_reason_to_end(tiny, corpus, tmp_path):
    config = replace(CONFIG, learning_rate=0.0, measure_every=1000, patience=3)
    for _ in range(5):
        _, progress = train(tiny, corpus, tmp_path, 4, config)
        assert progress.stale == 1


def test_the_checkpoint_of_the_best_drafter_is_there_before_it_is_kept(tiny, corpus, tmp_path):
    """A run that is killed while it keeps its best knows afterwards how good that was."""
    with pytest.raises(InterruptedError):
        train(tiny, corpus, tmp_path, 100, replace(CONFIG, measure_every=40), measured=interrupted_at(80))
    saved, _, _ = load_checkpoint(tmp_path, {})
    assert saved.step == 80
    kept: list[tuple[int, bool]] = []
    train(
        tiny, corpus, tmp_path, 81, replace(CONFIG, measure_every=40),
        measured=lambda result, adapter, progress, best: kept.append((progress.step, best)),
    )  # fmt: skip
    assert kept[0] == (80, True)


def recorded(directory: Path, more: Mapping[str, object] = MappingProxyType({}), **progress: object) -> None:
    """Lets the last checkpoint tell this of its progress, and more settings."""
    path = sorted(directory.glob("*.safetensors"))[-1]
    with safe_open(path, framework="pt") as file:
        settings = json.loads(file.metadata()["about"])["settings"]
    saved, tensors, _ = load_checkpoint(directory, {})
    save_checkpoint(directory, settings | more, replace(saved, **progress), tensors)


def test_with_other_held_out_documents_the_drafter_is_judged_anew(tiny, corpus, tmp_path):
    """What an easier set gave keeps nothing away, and what a harder one gave lets nothing worse through."""
    train(tiny, corpus, tmp_path, 4)
    recorded(tmp_path, best=3.9, stale=5)
    kept: list[tuple[float, bool, int]] = []

    def told(result, adapter, progress, best) -> None:
        kept.append((result.tokens_per_step, best, progress.stale))

    _, progress = train(tiny, corpus, tmp_path, 4, measured=told)
    assert kept[0][1:] == (False, 5)
    assert progress.best == 3.9
    grown = corpus_of([corpus.document(index) for index in range(len(corpus))] + random_documents(200, seed=9))
    _, progress = train(tiny, grown, tmp_path, 4, measured=told)
    assert kept[1][1:] == (True, 0)
    assert progress.best == kept[1][0] < 3.9
    train(tiny, grown, tmp_path, 4, measured=told)
    assert kept[2] == kept[1]


def test_where_the_best_is_gone_the_next_best_is_kept(tiny, corpus, tmp_path):
    train(tiny, corpus, tmp_path, 4)
    for there in (3.95, 0.0):
        recorded(tmp_path, best=3.9, stale=5)
        bests: list[bool] = []
        _, progress = train(
            tiny, corpus, tmp_path, 4, measured=lambda *found, bests=bests: bests.append(found[-1]),
            kept=lambda best, there=there: there,
        )  # fmt: skip
        assert bests == [not there]
        assert (progress.best == 3.95) == bool(there)


def interrupted_at(step: int) -> Callable[..., None]:
    """As a kill while a measurement is told, once the checkpoint's time has come."""

    def told(result: object, adapter: object, progress: Progress, best: bool) -> None:
        if progress.step == step:
            raise InterruptedError

    return told


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(tiny, corpus, tmp_path, monkeypatch):
    train(tiny, corpus, tmp_path, 2)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            train(tiny, corpus, tmp_path, 4)
    assert load_checkpoint(tmp_path, {})[0].step == 2


def test_a_rank_that_does_not_fit_is_one_line(tiny):
    with pytest.raises(ConfigError, match=r"rank 49 does not fit .* choose 1 to 48"):
        new_drafter(tiny.identity, tiny.base.weights.embedding, 49, PROJECTIONS, 4, 0)


def test_a_new_drafter_adapts_what_was_asked_for_and_changes_nothing_yet(tiny):
    drafter = new_drafter(tiny.identity, tiny.base.weights.embedding, 4, ("qkv", "down"), 4, 0)
    names = {name for name, _ in named_tensors(drafter)}
    assert names == {"mask_embedding"} | {
        f"layers.{i}.{p}.{m}" for i in range(tiny.identity.layers) for p in ("qkv", "down") for m in "AB"
    }
    assert all(tensor.eq(0).all() for name, tensor in named_tensors(drafter) if name.endswith(".B"))


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup=10, final_rate=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(config, 500, 0.5) == pytest.approx(0.55)
    assert learning_rate(config, 1000, 1.0) == pytest.approx(0.1)


def test_documents_come_once_an_epoch(corpus):
    learnt, _ = corpus.split()
    sampler, progress = Sampler(corpus, learnt.tolist(), 4, 1024, 0), Progress()
    seen: list[bytes] = []
    while progress.epoch == 0:
        seen += [tokens.tobytes() for tokens, _ in sampler.next_documents(progress, 8, 16)]
    assert len(set(seen[: len(sampler)])) == len(sampler) == len(learnt)
