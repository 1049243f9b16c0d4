"""How many replicas the load wants, and a server that follows it: up, down, to sleep and awake."""

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.app import replica_count
from cluster.autoscaling import FULL, LONG_WAIT_SECONDS, START_SECONDS, LoadPolicy, Reading, read, replicas_wanted
from cluster.options import FurtherModel, ServeOptions
from tests.cluster.scale_run import PROMPTS, follow, replicas_there, verdict
from tests.servers import STOP_SECONDS, Server, running, start_with, tiny_model
from tests.tiny import tiny_checkpoint

READINGS = st.lists(
    st.builds(
        Reading,
        answers=st.floats(0, 500),
        batch=st.integers(1, 256).map(float),
        pages=st.floats(0, 1),
        wait=st.floats(0, 10),
    ),
    min_size=1,
    max_size=8,
)


@given(READINGS, st.integers(1, 8), st.none() | st.floats(0.5, 100))
def test_more_load_never_wants_fewer(readings: list[Reading], target: int, each: float | None) -> None:
    wanted = replicas_wanted(readings, target, each)
    more = [Reading(2 * one.answers + 1, one.batch, one.pages, one.wait + 1) for one in readings]
    assert 0 <= wanted <= replicas_wanted(more, target, each)


@given(READINGS, st.integers(1, 20), st.none() | st.floats(0.5, 100))
def test_what_is_wanted_is_wanted_again(readings: list[Reading], target: int, each: float | None) -> None:
    """The same load does not ask for a change of what it asked for, as long as nobody waits."""
    calm = [Reading(one.answers, one.batch, one.pages, 0.0) for one in readings]
    wanted = replicas_wanted(calm, target, each)
    assert replicas_wanted(calm, wanted, each) == wanted


@pytest.mark.parametrize(
    ("readings", "target", "each", "wanted"),
    [
        ([Reading(0, 32, 0, 0)], 1, None, 0),
        ([Reading(1, 32, 0.01, 0)], 1, None, 1),
        ([Reading(32 * FULL, 32, 0.1, 0)], 1, None, 1),
        ([Reading(32, 32, 0.1, 0)], 1, None, 2),
        ([Reading(128, 32, 0.1, 0)], 1, None, 5),
        ([Reading(4, 32, 1.0, 0)], 1, None, 2),
        ([Reading(4, 32, 0.1, 2 * LONG_WAIT_SECONDS)], 1, None, 2),
        ([Reading(4, 32, 0.1, 2 * LONG_WAIT_SECONDS), Reading(0, 32, 0, 0), Reading(0, 32, 0, 0)], 3, None, 1),
        ([Reading(20, 32, 0, 0), Reading(20, 32, 0, 0)], 3, None, 3),  # two would do, but nearly full
        ([Reading(10, 32, 0, 0), Reading(10, 32, 0, 0)], 3, None, 2),
        ([Reading(10, 32, 0.9, 9), Reading(10, 32, 0.9, 9)], 2, 4.0, 5),
        ([Reading(0, 32, 0, 0), Reading(0, 32, 0, 0)], 2, 4.0, 0),
    ],
)
def test_what_limits_a_replica_decides(readings: list[Reading], target: int, each: float | None, wanted: int) -> None:
    assert replicas_wanted(readings, target, each) == wanted


def context(
    metrics: dict[str, dict[str, float]], current: int, target: int, since_up: float | None = None, calls: float = 0.1
) -> Any:
    return SimpleNamespace(
        total_num_requests=calls,
        aggregated_metrics=metrics,
        current_num_replicas=current,
        target_num_replicas=target,
        current_time=1000.0,
        last_scale_up_time=None if since_up is None else 1000.0 - since_up,
    )


def metrics_of(**replicas: Reading) -> dict[str, dict[str, float]]:
    fields = ("answers", "batch", "pages", "wait")
    told = {name: {replica: getattr(reading, name) for replica, reading in replicas.items()} for name in fields}
    return {**told, "running_requests": dict.fromkeys(replicas, 3.0)}


def test_a_replica_counts_once_it_told_everything() -> None:
    metrics = metrics_of(a=Reading(1, 2, 3, 4), b=Reading(5, 6, 7, 8))
    del metrics["wait"]["a"]
    assert read(metrics) == [Reading(5, 6, 7, 8)]
    assert LoadPolicy()(context({}, 0, 3)) == (3, {})
    assert LoadPolicy()(context({"answers": {"a": 9}}, 1, 1)) == (1, {})


def test_nobody_sleeps_while_an_ingress_has_calls_under_way() -> None:
    idle = metrics_of(a=Reading(0, 32, 0, 0))
    assert LoadPolicy()(context(idle, 1, 1)) == (0, {})
    assert LoadPolicy()(context(idle, 1, 1, calls=1.0)) == (1, {})


def test_replicas_that_start_are_let_come() -> None:
    idle = metrics_of(a=Reading(0, 32, 0, 0))
    assert LoadPolicy()(context(idle, 1, 3, since_up=5)) == (3, {})
    assert LoadPolicy()(context(idle, 3, 3, since_up=5)) == (0, {})
    assert LoadPolicy()(context(idle, 1, 3, since_up=START_SECONDS + 1)) == (0, {}), "they never came"
    busy = metrics_of(a=Reading(40, 32, 0, 0))
    assert LoadPolicy(answers_each=4.0)(context(busy, 1, 3, since_up=5)) == (10, {})


def test_requests_that_wait_while_one_starts_do_not_start_another() -> None:
    waiting = metrics_of(a=Reading(5, 32, 0.1, 2 * LONG_WAIT_SECONDS))
    assert LoadPolicy()(context(waiting, 1, 1)) == (2, {})
    assert LoadPolicy()(context(waiting, 1, 2, since_up=5)) == (2, {})
    one_of_many = metrics_of(a=Reading(5, 32, 0.1, 60), **{name: Reading(1, 32, 0, 0) for name in "bcd"})
    assert LoadPolicy()(context(one_of_many, 4, 4)) == (1, {}), "a router that finds the others is what it wants"
    half = metrics_of(**dict.fromkeys("ab", Reading(5, 32, 0.1, 60)), **dict.fromkeys("cd", Reading(1, 32, 0, 0)))
    assert LoadPolicy()(context(half, 4, 4)) == (5, {})


@pytest.mark.parametrize(("least", "initial"), [(0, 1), (2, None)])
def test_only_a_model_that_may_sleep_states_how_many_engines_begin(least: int, initial: int | None) -> None:
    options = ServeOptions(model="tiny", min_replicas=least, max_replicas=8)
    (served,) = options.served.values()
    stated = replica_count(options, served)["autoscaling_config"].initial_replicas
    assert stated == initial, "Serve would shrink a fleet to it at each change of the options"


def asleep(server: Server) -> bool:
    with suppress(httpx.HTTPError):  # a replica that is there, and busy
        return replicas_there(server) == 0
    return False


def wait_until_asleep(server: Server) -> None:
    deadline = time.monotonic() + 240
    while not asleep(server):
        assert time.monotonic() < deadline, "nobody asks, and it does not go to sleep"
        time.sleep(0.2)


def test_replicas_come_go_sleep_and_wake_without_cutting_a_stream(tmp_path: Path) -> None:
    model, adapter = tiny_model(tmp_path)
    options = ServeOptions(
        model=str(model),
        adapter=str(adapter),
        models={"beside": FurtherModel(model=str(tiny_checkpoint(tmp_path / "qwen", "qwen3")), drafts="off")},
        dtype="float32",
        device="cpu",
        threads=1,
        min_replicas=0,
        max_replicas=2,
        target_ongoing_requests=4,
        upscale_delay_s=0,
        downscale_delay_s=1,
        downscale_to_zero_delay_s=2,
    )
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_files,  # Ray's sockets need a short path
        running(start_with(tmp_path, options, cpus=options.most_engines, more={"RAY_TMPDIR": ray_files})) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        course = follow(
            server,
            [
                (1, lambda seen: len(seen.streams) > 0, 0.0),
                (12, lambda seen: seen.replicas[-1][1] == 2, 0.0),
                (1, lambda seen: seen.replicas[-1][1] == 1, 0.0),
            ],
            tokens=300,
            model="tiny",
        )
        assert verdict(course) == ([], 0)
        assert len(course.streams) > 12
        print(f"{len(course.streams)} streams while replicas came and went")

        wait_until_asleep(server)
        assert client.get("/health").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "beside"]
        assert client.post("/tokenize", json={"prompt": "The quick"}).status_code == 200
        time.sleep(2)
        assert asleep(server), "being looked at wakes nobody"

        began = time.monotonic()
        body = {"prompt": PROMPTS[0], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        print(f"awake after {time.monotonic() - began:.1f} s")
        known = {one.text for one in course.streams if one.prompt == PROMPTS[0]}
        assert {answer.json()["choices"][0]["text"]} == known
        assert replicas_there(server) == 1, "who asks for one wakes no other"
        other = client.post("/v1/completions", json=body | {"model": "beside"})
        assert (other.status_code, other.json().get("model")) == (200, "beside"), other.text
        drafts = {name: client.get(f"/v1/models/{name}").json()["tidar"]["drafts"] for name in ("tiny", "beside")}
        assert drafts == {"tiny": "auto", "beside": "off"}

        server.process.terminate()
        server.process.wait(STOP_SECONDS)
        assert len(list(Path(ray_files).glob("ray/session_2*"))) == 1, "no second cluster for its last moments"
