"""Replicas die, hang and lose their machine under streams, which lose no token; who has a prefix gets its prompts."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.options import ServeOptions
from tests.cluster.affinity_run import ask_all, prompts_of
from tests.cluster.kills import (
    Blow,
    Struck,
    Told,
    draw_ask,
    judge,
    kill,
    longest_gaps,
    slow_model,
    stop_for,
    streams_under_blows,
    wait_for_replicas,
)
from tests.cluster.nodes import lose_node, start_nodes
from tests.servers import Server, running, start_with

STREAMS = 32


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ServeOptions:
    """Three replicas of a checkpoint of two layers, in bf16."""
    model, adapter = slow_model(tmp_path_factory.mktemp("slow"))
    return ServeOptions(model=str(model), adapter=str(adapter), device="cpu", replicas=3, threads=1)


@pytest.fixture(scope="module")
def three(options: ServeOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(start_with(tmp_path_factory.mktemp("three"), options, cpus=4)) as server:
        yield server


def test_prompts_that_begin_alike_meet_at_one_replica(three: Server) -> None:
    wait_for_replicas(three, 3)
    got = ask_all(three, prompts_of(requests=32, prefixes=8, tokens=300, seed=1), at_once=8)
    print(f"{got.cached} of {got.prompt} prompt tokens were cached")
    # All but the first of each prefix at best. Chance alone would give 12.7 of these 24, on average.
    assert got.cached >= 0.85 * 24 * 288


@pytest.mark.parametrize(
    ("seconds", "every", "blow"), [(20, 5, kill), (10, 2, stop_for(5.0))], ids=["killed", "stopped"]
)
def test_no_token_is_lost_or_repeated(
    three: Server, options: ServeOptions, seconds: float, every: float, blow: Blow
) -> None:
    wait_for_replicas(three, 3)
    before = three.metric("tidar:stream_handovers_total")
    told, blows = streams_under_blows(three, STREAMS, seconds, 700, every, blow)
    handovers = three.metric("tidar:stream_handovers_total") - before
    assert blows
    assert 0 < check(told, options, blows) <= handovers
    wait_until_idle(three)  # a replica that was stopped has let go of what it was left with


def test_a_node_may_be_lost(options: ServeOptions, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_directory,
        running(start_nodes(tmp_path, Path(ray_directory), options)) as server,
    ):
        wait_for_replicas(server, 3)
        told, blows = streams_under_blows(server, STREAMS, 6, 800, 1, lose_node, spared=1)
    assert blows
    assert check(told, options, blows) > 0


def test_gaps_are_told_apart_by_what_the_blows_left() -> None:
    told = [Told(draw_ask(0, 0, 9), moments=[0.0, 1.0, 5.0, 6.5]), Told(draw_ask(1, 0, 9), moments=[9.0, 9.2])]
    warm, cold = Struck(5.2, warm=True), Struck(1.2, warm=False)
    assert longest_gaps(told, []) == (4.0, 4.0)
    assert longest_gaps(told, [warm]) == (4.0, 4.0)
    assert longest_gaps(told, [warm, cold]) == (4.0, 1.5)
    assert longest_gaps([], [cold]) == (0.0, 0.0)


def check(told: list[Told], options: ServeOptions, blows: list[Struck]) -> int:
    """Every stream is what it would have been; gives how many moved."""
    verdict = judge(told, options, blows)
    print(verdict.line())
    assert verdict.errors == ()
    assert (verdict.different, verdict.lost, verdict.repeated) == (0, 0, 0)
    assert verdict.gap < 30
    return verdict.moved


def wait_until_idle(server: Server) -> None:
    for _ in range(150):
        if server.metric("vllm:num_requests_running") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("a request that was handed over runs on where it was")
