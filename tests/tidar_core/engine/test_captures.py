"""What is captured before an engine serves, and what becomes of it where memory is short or CUDA refuses."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from tests.tidar_core.engine.test_graphs import CPU, REACH, decoded, repeat
from tests.tidar_core.engines import tiny_engine
from tidar_core.engine.graphs import (
    AGAIN_AFTER,
    CAPTURE_AT,
    WARM_UP,
    Graphs,
    Replay,
    cuda_capture,
    narrow_buckets,
)
from tidar_core.engine.warmup import capture_graphs
from tidar_core.request import SamplingParams


def test_what_was_captured_beforehand_is_not_captured_again(tmp_path):
    engine = tiny_engine(tmp_path)
    graphs, told = Graphs(repeat, REACH), []
    runner = replace(engine._runner, graphs=graphs, ops=replace(engine._runner.ops, draft_slots=None))
    capture_graphs(runner, lambda done, total: told.append((done, total)), refuse)
    assert told[-1][0] == told[-1][1] == len(told)
    before = len(graphs)
    assert before > 10
    assert runner.cache.keys[:, 1:].eq(0).all()  # only the trash page was written
    params = [
        SamplingParams(max_tokens=14, seed=index, ignore_eos=True, drafts=mode, block=block)
        for index, (mode, block) in enumerate(product(("off", "auto", "full"), (None, 2, 3, None)))
    ]
    decoded(engine, graphs, params)
    assert len(graphs) == before
    assert graphs.untypical == 0


def refuse(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("room", [0, 1, 7])
def test_an_engine_starts_with_the_graphs_that_memory_holds(tmp_path: Path, room: int) -> None:
    """Once there are so many no further one is captured; what it would compute is not computed without one."""
    engine, reports = tiny_engine(tmp_path), []

    def narrow(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if len(graphs) >= room:
            raise torch.OutOfMemoryError("no room")
        return repeat(work)

    graphs = Graphs(narrow, REACH)
    capture_graphs(replace(engine._runner, graphs=graphs), lambda done, total: None, reports.append)
    assert len(graphs) == room
    (line,) = reports
    assert line.startswith(f"{room} of ")
    assert "no room" in line
    params = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, drafts="full")] * 2
    expected, found = decoded(engine, None, params), decoded(engine, graphs, params)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_a_start_tells_where_memory_does_not_hold_the_graphs_of_drafts(tmp_path: Path) -> None:
    engine, reports, steps = tiny_engine(tmp_path), [], len(narrow_buckets(REACH, 4))

    def narrow(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if len(graphs) >= steps + 2:
            raise torch.OutOfMemoryError("no room")
        return repeat(work)

    graphs = Graphs(narrow, REACH)
    runner = replace(engine._runner, graphs=graphs, ops=replace(engine._runner.ops, draft_slots=None))
    capture_graphs(runner, lambda done, total: None, reports.append)
    (line,) = reports
    assert line.startswith(f"{steps + 2} of ")
    assert len(graphs) == steps + 2


def test_a_size_for_which_there_was_no_memory_is_tried_again_later() -> None:
    """While it waits it runs without a graph, and is typical of what such steps cost."""
    memory: list[str] = []

    def scarce(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if not memory:
            raise torch.OutOfMemoryError("no room")
        return repeat(work)

    graphs, ones = Graphs(scarce, REACH), torch.ones(3)
    for _ in range(CAPTURE_AT + AGAIN_AFTER // 2):
        assert graphs.run("key", CPU, torch.negative, ones).equal(-ones)
    assert (len(graphs), graphs.untypical) == (0, CAPTURE_AT)
    memory.append("some")
    for _ in range(AGAIN_AFTER // 2 + CAPTURE_AT):
        assert graphs.run("key", CPU, torch.negative, ones).equal(-ones)
    assert len(graphs) == 1
    assert graphs.untypical <= 2 * CAPTURE_AT


class Recording:
    """In the place of torch.cuda.graph: a capture that ends well, or by an error that hides what it failed of."""

    def __init__(self, graph: object, pool: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is RuntimeError:
            raise RuntimeError("the capture was invalidated")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as `cuda_capture` uses it, without a GPU."""
    named = {name: MagicMock() for name in ("CUDAGraph", "Stream", "stream", "current_stream", "graph_pool_handle")}
    for name, double in (named | {"mem_get_info": lambda device: (1 << 40, 1 << 40), "graph": Recording}).items():
        monkeypatch.setattr(torch.cuda, name, double)


def test_once_a_capture_was_refused_none_is_tried_and_the_first_cause_is_told(recording: None) -> None:
    def refused_in_a_capture() -> Tensor:
        tries.append(1)
        if len(tries) % (WARM_UP + 1) == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    tries: list[int] = []
    capture = cuda_capture(CPU, 0)
    assert capture(lambda: torch.ones(1))[1].equal(torch.ones(1))
    for line in ("^operation not permitted", "^an earlier capture failed: operation not permitted"):
        with pytest.raises(RuntimeError, match=line):
            capture(refused_in_a_capture)
    assert len(tries) == WARM_UP + 1


def test_a_capture_without_memory_ends_no_other(recording: None) -> None:
    def large() -> Tensor:
        raise torch.OutOfMemoryError("no room")

    capture = cuda_capture(CPU, 0)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            capture(large)
    assert capture(lambda: torch.ones(1))[1].equal(torch.ones(1))


def test_what_cuda_refuses_first_is_told(tmp_path: Path) -> None:
    def never(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        raise RuntimeError("invalidated")

    told: list[str] = []
    engine = tiny_engine(tmp_path)
    capture_graphs(replace(engine._runner, graphs=Graphs(never, REACH)), lambda done, total: None, told.append)
    (line,) = told
    assert re.match(r"0 of \d+ CUDA graphs are there, .*: invalidated$", line)


def test_the_largest_step_may_be_too_large_for_a_graph(tmp_path: Path) -> None:
    engine, graphs = tiny_engine(tmp_path), Graphs(Largest(), REACH)
    capture_graphs(replace(engine._runner, graphs=graphs), lambda done, total: None, refuse)
    assert len(graphs) == len(narrow_buckets(REACH, engine.info.block_length)) - 1


class Largest:
    """A capture for which the first work is too large."""

    def __init__(self) -> None:
        self.refused = False

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if not self.refused:
            self.refused = True
            raise torch.OutOfMemoryError("no room")
        return repeat(work)


@pytest.mark.parametrize("drafter", [True, False])
def test_without_a_slot_head_no_drafts_are_computed_beforehand(tmp_path: Path, monkeypatch, drafter: bool) -> None:
    runner = tiny_engine(tmp_path)._runner
    adapter = replace(runner.adapter, slot_head=None) if drafter else None  # type: ignore[type-var]
    monkeypatch.setattr("tidar_core.engine.warmup.pick_drafts", refuse)
    graphs = Graphs(repeat, REACH)
    capture_graphs(replace(runner, adapter=adapter, graphs=graphs), lambda done, total: None, refuse)
    assert len(graphs) == len(narrow_buckets(REACH, 4 if drafter else 0))
