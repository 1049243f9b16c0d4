"""The processes that Ray starts before anybody asks for one."""

import os
import subprocess
import sys
import uuid

from cluster.operate.deploy import LEAN
from tests.servers import MARK, REPOSITORY, end_all

PROCESSORS = 12
# A Ray of our own on a machine of many processors, as Ray counts them: how many processes wait once all have started,
# and how many are left when some have ended, or do not for minutes.
WAIT = """
import multiprocessing, sys, time
import psutil
from cluster.operate import ray_cluster
from cluster.operate.deploy import LEAN
from cluster.operate.interrupts import Interrupts

processors, most = map(int, sys.argv[1:])
multiprocessing.cpu_count = lambda: processors
ray_cluster.OWN_RAY["num_cpus"] = processors

def is_idle(process):
    try:
        return "IDLE" in process.name()
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False

def waiting(enough):
    end = time.monotonic() + 240
    while True:
        seen = sum(is_idle(process) for process in psutil.Process().children(recursive=True))
        if enough(seen) or time.monotonic() > end:
            return seen
        time.sleep(0.1)

with Interrupts() as interrupts, ray_cluster.ray_cluster(None, lambda line: None, interrupts, LEAN):
    print(waiting(lambda seen: seen > most), waiting(lambda seen: seen <= most))
"""


def test_no_more_of_them_stay_than_a_server_takes_however_many_processors_there_are() -> None:
    mark, most = uuid.uuid4().hex, int(LEAN["RAY_num_workers_soft_limit"])
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", WAIT, str(PROCESSORS), str(most)]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=480)
    finally:
        left_behind = end_all(mark)
    assert not left_behind
    assert done.returncode == 0, done.stderr
    started, left = map(int, done.stdout.split())
    assert started > most >= left
