"""Replicas die and hang under streams, which lose no token; who has a prefix gets its prompts."""

import time
from collections.abc import Iterator

import pytest

from cluster.options import ServeOptions
from tests.cluster.affinity_run import ask_all, prompts_of
from tests.cluster.kills import (
    Blow,
    Recording,
    Struck,
    Told,
    check,
    draw_ask,
    kill,
    longest_gaps,
    slow_model,
    stop_for,
    streams_under_blows,
    wait_for_replicas,
)
from tests.servers import Server, running, start_with

STREAMS, TOKENS = 32, 250
FEW_AT_ONCE = (1, 7, 19)  # orders in which hardly a prompt comes within three of the first that begins like it


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
    for seed in FEW_AT_ONCE:
        # As many at once as one replica may have while another is idle (`affinity.SPARE`): no more, lest what a busy
        # machine holds up goes elsewhere for that reason.
        got = ask_all(three, prompts_of(requests=32, prefixes=8, tokens=300, seed=seed), at_once=4)
        print(f"{got.cached} of {got.prompt} prompt tokens were cached")
        # All but the first of each prefix at best. Chance alone would give 12.7 of these 24, on average.
        if got.cached >= 0.9 * 24 * 288:
            return
    raise AssertionError("prompts that begin alike go to replicas that have not read the beginning")


@pytest.mark.parametrize(
    ("seconds", "every", "blow"), [(16, 4, kill), (14, 2, stop_for(5.0))], ids=["killed", "stopped"]
)
def test_no_token_is_lost_or_repeated(
    three: Server, options: ServeOptions, seconds: float, every: float, blow: Blow
) -> None:
    wait_for_replicas(three, 3)
    before = three.metric("tidar:stream_handovers_total")
    told, blows = streams_under_blows(three, STREAMS, seconds, TOKENS, every, blow)
    handovers = three.metric("tidar:stream_handovers_total") - before
    assert blows
    assert 0 < check(told, options, blows) <= handovers
    wait_until_idle(three)  # a replica that was stopped has let go of what it was left with


def test_gaps_are_told_apart_by_what_the_blows_left() -> None:
    told = [Told(draw_ask(0, 0, 9), moments=[0.0, 1.0, 5.0, 6.5]), Told(draw_ask(1, 0, 9), moments=[9.0, 9.2])]
    warm, cold = Struck(5.2, warm=True), Struck(1.2, warm=False)
    assert longest_gaps(told, []) == (4.0, 4.0)
    assert longest_gaps(told, [warm]) == (4.0, 4.0)
    assert longest_gaps(told, [warm, cold]) == (4.0, 1.5)
    assert longest_gaps([], [cold]) == (0.0, 0.0)


def test_a_stream_is_read_whatever_it_was_cut_into() -> None:
    chunks = [b'data: {"choices": [{"text": "a"}]}\n\nda', b'ta: {"choices": [{"te', b'xt": "b"}]}\n\ndata: [DONE]\n\n']
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    for size in (1, 7, len(raw)):
        parts = [(float(end), raw[end - size : end]) for end in range(size, len(raw) + size, size)]
        told = Recording(draw_ask(0, 0, 9), parts).told()
        assert (told.text, told.error) == ("ab", None)
        assert told.moments == sorted(told.moments)
        ended = raw.index(b"}]}") + len(b"}]}\n")
        assert told.moments[0] == -(-ended // size) * size
    assert Recording(draw_ask(0, 0, 9), [(0.0, raw[:-40])]).told().error == "the stream broke off"


def wait_until_idle(server: Server) -> None:
    for _ in range(600):
        if server.metric("vllm:num_requests_running") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("a request that was handed over runs on where it was")
