"""Runs the interpreted kernel tests, each file in a process of its own: triton must be told before it is imported.

Each computes in one thread, so that as many as there are processors run at once.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(3600),  # of what tests of servers leave idle
]
HERE = Path(__file__).parent
NAMES = ("bench", "blocks", "engine", "kernels", "picks")
FILES = tuple(f"interpreted_{name}.py" for name in NAMES)
# The library's own threads cost more than they bring on matrices this small.
SETTINGS = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Done = subprocess.CompletedProcess[str]


def run(name: str) -> Done:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--durations=5", str(HERE / name)]
    return subprocess.run(
        command, env={**os.environ, **SETTINGS}, cwd=HERE.parents[1], capture_output=True, text=True, timeout=3500
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Done]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run, name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_interpreted(runs: dict[str, Future[Done]], name: str) -> None:
    done = runs[name].result()
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
