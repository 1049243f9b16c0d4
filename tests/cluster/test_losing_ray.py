"""`tidar up` whose own Ray ends beside it: an end in seconds, of which nothing is left."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers import Server, end_all, kill_all, start, tiny_model, wait_for_text, words_of

ENDED_SECONDS = 45  # Ray alone would wait for 60, and then end the process where it stands
LEAVING_SECONDS = 20  # for workers to notice


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Server]:
    model, adapter = tiny_model(tmp_path)
    server = start(tmp_path, "--model", str(model), "--adapter", str(adapter), "--device", "cpu", "--no-playground")
    try:
        wait_for_text(server, "Ctrl-C")
        yield server
    finally:
        kill_all([psutil.Process(server.process.pid)] if server.process.poll() is None else [])
        end_all(server.mark)


def left_of(server: Server) -> list[list[str]]:
    """The command lines of its processes, once they have had the time to end."""
    psutil.wait_procs(server.processes(), timeout=LEAVING_SECONDS)
    return [words_of(process)[:3] for process in server.processes()]


def test_sigterm_to_all_of_its_processes_at_once(ready: Server) -> None:
    """As systemd stops a service, unless it is told to begin with the main process."""
    os.killpg(ready.process.pid, signal.SIGTERM)
    assert ready.process.wait(ENDED_SECONDS) == 0
    assert ready.log.read_text().splitlines()[-1] == "stopped"
    assert left_of(ready) == []


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_part_of_ray_that_is_killed(ready: Server, part: str) -> None:
    """As by a system that is short of memory."""
    (process,) = (each for each in ready.processes() if Path((words_of(each) or [""])[0]).name == part)
    since = time.monotonic()
    process.kill()
    assert ready.process.wait(ENDED_SECONDS) == 1, f"after {time.monotonic() - since} s"
    assert ready.log.read_text().splitlines()[-1] == f"tidar: the Ray cluster is gone: its {part} ended"
    assert left_of(ready) == []
