"""`tidar up` whose own Ray ends beside it: an end in seconds, of which nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import psutil
import pytest
from ray import serve
from ray._private import worker

from cluster.operate import deploy, ray_cluster
from cluster.operate.interrupts import Interrupts
from cluster.options import ServeOptions, UpOptions
from tests.servers import Server, end_all, kill_all, launch, start, tiny_model, wait_for_text, words_of
from tidar_core.config import ConfigError

ENDED_SECONDS = 45  # Ray alone would wait for 60, and then end the process where it stands
READS, READY = "reading", "Ctrl-C"  # what is said at the model's start and at its end
LEAVING_SECONDS = 20  # for workers to notice


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Server]:
    model, adapter = tiny_model(tmp_path)
    server = start(tmp_path, "--model", str(model), "--adapter", str(adapter), "--device", "cpu", "--no-playground")
    try:
        yield server
    finally:
        kill_all([psutil.Process(server.process.pid)] if server.process.poll() is None else [])
        end_all(server.mark)


LATE_RAYLET = """
import ray
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import ray_cluster
with Interrupts() as interrupts, ray_cluster(None, print, interrupts):
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process
    raylet.terminate = raylet.kill  # as Ray does a second later
    print("Ray runs", flush=True)
"""


def test_a_raylet_that_is_killed_at_the_end_leaves_none_of_its_parts(tmp_path: Path) -> None:
    """One of its agents, in most of the cases, would stay for a minute."""
    ended = launch(tmp_path, 0, [sys.executable, "-c", LATE_RAYLET])
    try:
        wait_for_text(ended, "Ray runs")
        assert ended.process.wait(ENDED_SECONDS) == 0, ended.log.read_text()
        assert ended.processes() == []
    finally:
        end_all(ended.mark)


def test_what_does_not_end_with_ray_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "LEAVING_SECONDS", 3.0)
    stays, ends = (subprocess.Popen(["sleep", seconds]) for seconds in ("60", "0"))
    ray_cluster.end_left([psutil.Process(stays.pid), psutil.Process(ends.pid)])
    assert (stays.wait(10), ends.wait(10)) == (-signal.SIGKILL, 0)


def left_of(server: Server) -> list[list[str]]:
    """The command lines of its processes, once they have had the time to end."""
    psutil.wait_procs(server.processes(), timeout=LEAVING_SECONDS)
    return [words_of(process)[:3] for process in server.processes()]


def test_sigterm_to_all_of_its_processes_at_once(started: Server) -> None:
    """As systemd stops a service, unless it is told to begin with the main process."""
    wait_for_text(started, READY)
    os.killpg(started.process.pid, signal.SIGTERM)
    assert started.process.wait(ENDED_SECONDS) == 0
    assert started.log.read_text().splitlines()[-2:] == ["stopping", "stopped"], "no word of Ray's comes between"
    assert left_of(started) == []


@pytest.mark.parametrize(("part", "phase"), [("gcs_server", READY), ("raylet", READY), ("gcs_server", READS)])
def test_a_part_of_ray_that_is_killed(started: Server, part: str, phase: str) -> None:
    """As by a system that is short of memory."""
    wait_for_text(started, phase)
    (process,) = (each for each in started.processes() if Path((words_of(each) or [""])[0]).name == part)
    since = time.monotonic()
    process.kill()
    assert started.process.wait(ENDED_SECONDS) == 1, f"after {time.monotonic() - since} s"
    *before, last = started.log.read_text().splitlines()
    assert last == f"tidar: the Ray cluster is gone: its {part} ended"
    rays = [line for line in before if line.startswith("Ray: ")]
    assert len(set(rays)) <= 1, "what it says of its part, without that part's log"
    assert not any("[state-dump]" in line or "(raylet)" in line for line in before)
    assert left_of(started) == []


def test_rays_words_are_told_by_their_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    at_length = worker.print_to_stdstream
    said: list[str] = []
    killed = "Raylet is terminated. Why is not known. Last 20 lines of the Raylet logs:\n    [state-dump] a\n    b\n"
    with ray_cluster.short_words(said.append):
        for text in (killed, killed, "one worker had no memory", killed):
            worker.print_to_stdstream({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)
        monkeypatch.setattr(ray_cluster, "AGAIN_SECONDS", -1.0)
        worker.print_to_stdstream({"lines": [killed], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    first = "Ray: Raylet is terminated. Why is not known."
    assert said == [first, "Ray: one worker had no memory", first, first]
    assert worker.print_to_stdstream is at_length


@pytest.mark.parametrize(
    ("ended", "line"),
    [(["raylet"], "the Ray cluster is gone: its raylet ended"), ([], "the Ray cluster is gone: nobody is there")],
)
def test_a_ray_that_is_gone_is_noticed_wherever_it_is_waited_for(
    ended: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> None:
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(deploy, "states_of_applications", status)
    monkeypatch.setattr(deploy, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(deploy, "start_proxies", lambda *_: Event().wait())
    monkeypatch.setattr(ray_cluster, "ended_parts", lambda: ended)
    interrupts, board = Interrupts(), SimpleNamespace(news=list)
    waits = [
        lambda: deploy.start_serve("127.0.0.1", 1, interrupts),
        lambda: deploy.wait_until_ready(["api"], board, "", print, interrupts),  # type: ignore[arg-type]
        lambda: deploy.watch(print, interrupts),
    ]
    if ended:
        waits.append(lambda: deploy.result_of(Future(), interrupts))
    for wait in waits:
        with pytest.raises(ConfigError, match=f"^{line}"):
            wait()


def stop(ended: Callable[[], list[str]], take_down: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way down of an API that was ready, told that its Ray is gone; what was said. ended: as `ended_parts`."""
    monkeypatch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "")
    monkeypatch.setattr(deploy, "ended_parts", ended)
    monkeypatch.setattr(deploy, "take_down", take_down)
    monkeypatch.setattr(deploy, "put_up_board", lambda: SimpleNamespace(take_down=lambda: None))
    for name in ("check_resources", "start_serve", "result_of", "wait_until_ready", "announce"):
        monkeypatch.setattr(deploy, name, lambda *_: None)
    monkeypatch.setattr(deploy.app, "application", lambda *_, **__: None)
    monkeypatch.setattr(serve, "RunTarget", lambda *_, **__: SimpleNamespace(name="api"))
    monkeypatch.setattr(serve, "run_many", lambda *_, **__: None)
    said: list[str] = []
    options = UpOptions(serve=ServeOptions(playground=False))
    with pytest.raises(ConfigError, match="gone"), deploy.applications(options, False, said.append, Interrupts()):
        raise ConfigError("the Ray cluster is gone")
    return said


def test_a_process_that_the_system_ended_is_told_in_few_words() -> None:
    """As an engine for which there was not memory enough."""
    said = (
        "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the "
        "problem, check the logs for the dead worker. Lease ID: 03 Worker ID: e679 Worker IP address: 192.0.2.2 "
        "Worker port: 41493 Worker PID: 3238 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
        "exits with a connection error code 2. Some common causes include: (1) the process was killed by the OOM killer"
    )
    told: list[str] = []
    with ray_cluster.short_words(told.append):
        worker.print_to_stdstream({"lines": [said], "pid": "raylet", "is_err": True}, ignore_prefix=False)
    (line,) = told
    assert line.startswith("Ray: process 3238 was ended; where no memory is left the system does that")
    assert len(line) < 120


@pytest.mark.parametrize(("ended", "asked"), [(["raylet"], False), ([], True)])
def test_a_ray_that_is_gone_is_asked_for_nothing_more(
    ended: list[str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end the process in the midst of it, with words of its own behind the last of ours."""
    took: list[object] = []
    assert stop(lambda: ended, lambda *_: took.append(_), monkeypatch) == ["stopping"]
    assert bool(took) is asked


@pytest.mark.parametrize("looks", [3, 10**9])
def test_a_ray_that_fails_before_it_is_gone(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head listens for a moment after it was told to end, as all of Serve was. looks: at it, until it is gone."""
    asked = iter(range(looks))
    monkeypatch.setattr(deploy, "HEAD_GOES_SECONDS", 0.5)

    def fails(*_: object) -> None:
        raise RuntimeError("the controller died")

    said = stop(lambda: [] if next(asked, None) is not None else ["gcs_server"], fails, monkeypatch)
    assert said[1:] == ([] if looks == 3 else ["Serve did not end by itself: the controller died"])
