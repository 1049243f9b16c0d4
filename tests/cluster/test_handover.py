"""Replicas die, hang and lose their machine under streams, which lose no token."""

import time
from collections.abc import Iterator

import pytest

from cluster.options import ServeOptions
from tests.cluster.kills import Blow, judge, kill, slow_model, stop_for, streams_under_blows, wait_for_replicas
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


@pytest.mark.parametrize(
    ("seconds", "every", "blow"), [(20, 5, kill), (10, 3, stop_for(6.0))], ids=["killed", "stopped"]
)
def test_no_token_is_lost_or_repeated(
    three: Server, options: ServeOptions, seconds: float, every: float, blow: Blow
) -> None:
    wait_for_replicas(three, 3)
    before = three.metric("tidar:stream_handovers_total")
    told, blows = streams_under_blows(three, STREAMS, seconds, 400, every, blow)
    handovers = three.metric("tidar:stream_handovers_total") - before
    verdict = judge(told, options)
    print(verdict.line(blows))
    assert blows >= 2
    assert 0 < verdict.moved <= handovers
    assert verdict.errors == ()
    assert (verdict.different, verdict.lost, verdict.repeated) == (0, 0, 0)
    assert verdict.gap < 30
    # A replica that was stopped has let go of what it was left with.
    wait_until_idle(three)


def wait_until_idle(server: Server) -> None:
    for _ in range(150):
        if server.metric("vllm:num_requests_running") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("a request that was handed over runs on where it was")
