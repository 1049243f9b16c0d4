"""What replicas that start tell the terminal: on a Ray of our own, and who else stands there."""

import json
import os
import subprocess
import sys
import uuid

import pytest

from cluster.replica import progress
from cluster.replica.progress import ProgressLine
from tests.servers import MARK, REPOSITORY, end_all

# Three workers speak: one while there is a board, one after it was taken down, one that another driver's board hears.
SPEAK = """
import json, sys
import ray
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import ray_cluster
from cluster.replica.progress import BOARD, NAMESPACE, ProgressLine, put_up_board
from ray.experimental import internal_kv

@ray.remote(num_cpus=0)
def speak(replica):
    line = ProgressLine(replica)
    line.report("reads")
    line.fail("broke")

def heard(board):
    return [(line.replica, line.text, line.fatal) for line in board.news()]

with Interrupts() as interrupts, ray_cluster(None, lambda line: None, interrupts):
    board = put_up_board()
    ray.get(speak.remote("first"))
    told = [heard(board), heard(board)]
    board.take_down()
    ray.get(speak.remote("second"))
    left = len(internal_kv._internal_kv_list(BOARD, namespace=NAMESPACE))
    put_up_board()
    ray.get(speak.remote("of a driver that was killed"))
    board = put_up_board()
    ray.get(speak.remote("third"))
    print(json.dumps([*told, left, heard(board)]))
"""


def test_lines_are_told_once_and_kept_no_longer_than_somebody_reads_them() -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", SPEAK], env=environment, capture_output=True, text=True, timeout=240)
    assert not end_all(mark)
    assert done.returncode == 0, done.stderr
    first, again, left, third = json.loads(done.stdout)
    assert first == [["first", "reads", False], ["first", "broke", True]]
    assert again == []
    assert left == 0
    assert third == [["third", "reads", False], ["third", "broke", True]]


def test_a_stage_that_lasts_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reading of many gigabytes."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr(progress.internal_kv, "_internal_kv_exists", lambda *_, **__: False)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.log, "info", said.append)
    line = ProgressLine("engine")
    said.clear()
    line.begin("reading model")
    for done in range(1, 11):
        now[0] += 4
        line.advance(done, 10)
    line.begin("checking")
    assert said == ["reading model", "reading model: 30%", "reading model: 60%", "reading model: 90%", "checking"]
