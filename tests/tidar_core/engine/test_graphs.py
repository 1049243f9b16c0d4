"""Steps over captured sizes: buckets hold what they must, and padding and static buffers change nothing."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tidar_core.engines import tiny_engine
from tidar_core.bench.decode import measure_decode
from tidar_core.bench.drive import EngineAnswer, answer_all
from tidar_core.engine import Engine, drafting
from tidar_core.engine.batch import Batch, BatchSize
from tidar_core.engine.drafting import pick_drafts
from tidar_core.engine.flight import Flight, launch
from tidar_core.engine.graphs import (
    CAPTURE_AT,
    NARROWEST,
    REMEMBERED,
    Graphs,
    Reach,
    Replay,
    bucket,
    narrow_buckets,
)
from tidar_core.engine.runner import Runner
from tidar_core.engine.warmup import rows_are_exact
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.request import SamplingParams
from tidar_core.sampling.token_rule import TokenRule

CPU = torch.device("cpu")
REACH = Reach(sequences=12, pages=128)
SIZES = st.builds(BatchSize, st.integers(1, 600), st.integers(0, 600), st.integers(2, 300), st.integers(1, 3000))


REACHES = st.builds(Reach, st.integers(1, 300), st.integers(1, 3000))


@given(SIZES, REACHES)
def test_a_bucket_holds_its_batch(size: BatchSize, reach: Reach) -> None:
    size = replace(size, sequences=min(size.sequences, size.verify + 1))  # the trash page has a row too
    found = bucket(size, reach)
    if found is None:
        assert size.verify > 512 or size.mask > 512
        return
    assert found.verify >= size.verify
    assert found.mask >= size.mask
    assert found.pages >= size.pages
    assert found.sequences >= size.sequences
    assert found.pages <= reach.pages or size.pages > reach.pages
    assert bucket(found, reach) == found


@given(st.data(), REACHES, st.sampled_from((0, 4, 8, 16)))
def test_steps_behind_texts_that_are_not_very_long_have_a_bucket_that_is_captured_beforehand(data, reach, block):
    """Sequences that decode, with or without proposals for all that may come of drafts, beside a prompt or not."""
    decoding = data.draw(
        st.lists(st.tuples(st.integers(1, max(1, block)), st.booleans()), min_size=1, max_size=reach.sequences)
    )
    verify = sum(rows for rows, _ in decoding)
    mask = block * sum(rows for rows, drafts in decoding if drafts)
    reads = len(decoding) < reach.sequences and data.draw(st.booleans())
    if reads:
        verify += data.draw(st.integers(1, 512))
        mask += block * data.draw(st.integers(0, 1))  # the end of a prompt drafts what comes behind it
    pages = data.draw(st.integers(1, min(NARROWEST, reach.pages)))
    found = bucket(BatchSize(verify, mask, len(decoding) + reads + 1, pages), reach)
    assert (found is None) == (verify > 512 or mask > 512)
    assert found is None or found in narrow_buckets(reach, block)


def repeat(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """What a capture gives, without a GPU: the work done again over the same buffers, its result in the same place."""
    result = work()

    def replay() -> None:
        result.copy_(work())

    return replay, result


class Spoiling:
    """A capture whose every replay spoils what all other keys gave before."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        result = work().clone()
        self.results.append(result)

        def replay() -> None:
            anew = work()
            for each in self.results:
                each.fill_(torch.nan if each.is_floating_point() else 1 << 30)
            result.copy_(anew)

        return replay, result


def decoded(engine: Engine, graphs: Graphs | None, params: list[SamplingParams]) -> list[EngineAnswer]:
    """Answers to prompts of all lengths. Without the CPU's one call for a proposal, a graph drafts it."""
    plain = engine._runner
    draw = random.Random(3)
    prompts = [tuple(draw.randrange(3, 500) for _ in range(draw.choice((2, 9, 40)))) for _ in params]
    engine._runner = replace(plain, graphs=graphs, ops=replace(plain.ops, draft_slots=None))
    try:
        return answer_all(engine, prompts, params, cache_salt="" if graphs is None else "graphs")
    finally:
        engine._runner = plain


@pytest.mark.parametrize(
    ("within_block", "overlap_steps", "capture_at"),
    [("bidirectional", False, 1), ("causal", False, 1), ("causal", True, 1), ("causal", True, CAPTURE_AT)],
)
def test_captured_steps_give_the_same_answers(tmp_path, within_block, overlap_steps, capture_at):
    """Mixed traffic, all kinds of drafts, greedy and sampled; results are used before the next replay."""
    engine = tiny_engine(tmp_path, within_block=within_block, overlap_steps=overlap_steps)
    graphs = Graphs(Spoiling(), REACH, capture_at)
    params = [
        SamplingParams(max_tokens=14, temperature=index % 2, seed=index, ignore_eos=True, drafts=mode)
        for index, mode in enumerate(("off", "auto", "full") * 3)
    ]
    expected, found = decoded(engine, None, params), decoded(engine, graphs, params)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert sum(step.accepted for answer in found for step in answer.steps) > 0
    assert len(graphs) > (3 if capture_at == 1 else 1)


WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
"""Operations that a GPU's host cannot go on from before the GPU is through."""


class NothingIsWaitedFor(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITING, name
        assert name != "repeat_interleave" or (kwargs or {}).get("output_size") is not None
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "bool index"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "picked",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": ((7, 3.0),)},
    ],
    ids=str,
)
def test_a_launch_waits_for_nothing(tmp_path, monkeypatch, picked):
    """Between two steps that overlap the host asks for no number that the device is still to compute."""
    engine, launches = tiny_engine(tmp_path, overlap_steps=True), []

    def refused(*arguments: object) -> None:
        raise AssertionError("the host asks for numbers")

    def watched(*arguments: object) -> Flight:
        launches.append(arguments)
        with NothingIsWaitedFor(), monkeypatch.context() as patched:
            for question in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
                patched.setattr(Tensor, question, refused)
            return launch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("tidar_core.engine.engine.launch", watched)
    params = [
        SamplingParams(max_tokens=14, seed=5, ignore_eos=True, drafts=mode, block=block, **picked)
        for mode, block in (("full", None), ("off", None), ("full", 2), ("auto", None))
    ]
    decoded(engine, Graphs(repeat, REACH, 1), params)
    assert len(launches) > 12


def test_captured_proposals_draft_the_same(tmp_path):
    """Proposals of several lengths at once, and of numbers that graphs are not made for."""
    engine = tiny_engine(tmp_path)
    graphs = Graphs(repeat, REACH, 1)
    params = [
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, drafts="full", block=block)
        for block in (None, 3, 2, None, None)
    ]
    expected, found = decoded(engine, None, params), decoded(engine, graphs, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert [step.drafted for step in ours.steps] == [step.drafted for step in theirs.steps]
    assert any(isinstance(key, tuple) and key[0] == "slots" for key in graphs._captured)


def test_many_proposals_are_one_graph_and_what_they_are_told_of_slots_is_kept(tmp_path):
    engine, graphs = tiny_engine(tmp_path), Graphs(Spoiling(), REACH, 1)
    runner = replace(engine._runner, graphs=graphs, ops=replace(engine._runner.ops, draft_slots=None))
    draw = torch.Generator().manual_seed(2)
    drafting._filled_up.cache_clear()
    for counts in ([3] * 70, [3] * 70, [3, 1, 2] * 25):
        slots, width = sum(counts), runner.config.hidden_size
        hidden, logits = (torch.randn(slots, size, generator=draw) for size in (width, runner.config.vocab_size))
        anchors = torch.arange(len(counts))
        rules = [TokenRule(SamplingParams(max_tokens=9, temperature=1.0, seed=slot), slot) for slot in range(slots)]
        guessed = GuessedSlots(hidden, logits, rules, anchors, counts)
        found, expected = (pick_drafts(replace(runner, graphs=some), guessed) for some in (graphs, None))
        assert found.equal(expected)
    assert list(graphs._captured) == [("slots", 96, 3)]
    assert drafting._filled_up.cache_info().misses == 4  # filled up for the graph, and as they are


def test_captured_passes_prove_exactness_without_a_drafter_too(tmp_path):
    runner = tiny_engine(tmp_path, adapter="none")._runner
    assert rows_are_exact(replace(runner, graphs=Graphs(repeat, REACH, 1)))


@pytest.mark.parametrize("few", [True, False])
def test_steps_of_few_rows_and_of_many_are_proved_with_mask_rows_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Kernels may have other tiles, and other bits, for either."""
    runner, forward, spoiled = tiny_engine(tmp_path)._runner, Runner.forward, []

    def spoiling(runner: Runner, batch: Batch) -> Tensor:
        hidden = forward(runner, batch)
        if batch.size.mask and (len(batch.layout.answer_rows) <= 4) == few:
            spoiled.append(batch.size)
            hidden = hidden.nextafter(torch.full_like(hidden, torch.inf))
        return hidden

    assert rows_are_exact(runner)
    monkeypatch.setattr(Runner, "forward", spoiling)
    assert not rows_are_exact(runner)
    assert len(spoiled) == 1


def test_no_round_counts_in_which_steps_were_captured(tmp_path):
    """Of sizes that come once a round the third round captures some."""
    engine = tiny_engine(tmp_path)
    graphs = Graphs(repeat, REACH)
    engine._runner = replace(engine._runner, graphs=graphs)
    (off, full) = measure_decode(
        engine, [(5,), (6, 7)], batches=[2], modes=["off", "full"], rounds=2, at_least=2,
        params=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
    )  # fmt: skip
    assert len(graphs) > 3
    assert [one.captured for one in (off, full)] == [(0, 0)] * 2
    assert (off.tokens_per_step, off.ratio) == (1.0, 1.0)
    assert full.tokens_per_step >= 1
    assert all(len(one.rounds) == 2 and min(one.rounds) > 0 for one in (off, full))


def test_a_step_that_cannot_be_captured_runs_without() -> None:
    def unfit(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Graphs(unfit, REACH, 1)
    for number in range(3):
        assert graphs.run("key", CPU, lambda x: x + 1, torch.tensor(number)).item() == number + 1
    assert list(graphs._captured.values()) == [None]


def test_what_comes_seldom_is_not_captured() -> None:
    graphs = Graphs(Spoiling(), REACH)

    def run(key: object, number: int) -> Tensor:
        return graphs.run(key, CPU, lambda x: x + 1, torch.tensor(number))

    found = [run("common", number) for number in range(CAPTURE_AT - 1)]
    assert len(graphs) == 0
    for number in range(REMEMBERED - 1):
        run(number, 0)
    assert run("common", 7).item() == 8
    assert [run("common", number).item() for number in (8, 9)] == [9, 10]
    assert [each.item() for each in found] == [1, 2]  # no replay touches what came without a graph
    assert len(graphs) == 1
    assert graphs.untypical == CAPTURE_AT + REMEMBERED - 1
    for number in range(REMEMBERED):
        run(-1 - number, 0)
    assert len(graphs._came) == REMEMBERED


def test_warm_up_captures_at_once() -> None:
    graphs = Graphs(repeat, REACH)
    graphs.at_once().run("key", CPU, lambda x: x, torch.tensor(0))
    assert len(graphs) == 1
    own = graphs.fresh()
    assert len(own) == 0
    own.run("key", CPU, lambda x: x, torch.tensor(0))
    assert (len(own), len(graphs)) == (1, 1)


def test_passes_before_a_capture_teach_nothing_of_costs(tmp_path, monkeypatch):
    engine, taught = tiny_engine(tmp_path), []
    monkeypatch.setattr(type(engine._scheduler.policy), "took", lambda self, size, seconds: taught.append(size))
    engine._runner = replace(engine._runner, graphs=Graphs(repeat, REACH))
    answer_all(engine, [(5,)], [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, drafts="off")])
    assert engine.captured == 1
    assert len(taught) == 9 - CAPTURE_AT


def test_a_replay_reads_new_inputs() -> None:
    graphs = Graphs(repeat, REACH, 1)
    found = [graphs.run("key", CPU, lambda x, y: x * y, torch.tensor(a), torch.tensor(3)).item() for a in (2, 5, 7)]
    assert found == [6, 15, 21]
    assert len(graphs) == 1
