"""Runs the interpreted kernel tests in processes of their own: triton must be told before it is imported.

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
PARTS = (
    ("engine", "bench"),
    ("kernels", "picks", "blocks", "experts"),
)  # as long as each other; a process is seconds of imports
# The library's own threads cost more than they bring on matrices this small.
SETTINGS = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Done = subprocess.CompletedProcess[str]


def run(names: tuple[str, ...]) -> Done:
    files = [str(HERE / f"interpreted_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--durations=5", *files]
    return subprocess.run(
        command, env={**os.environ, **SETTINGS}, cwd=HERE.parents[2], capture_output=True, text=True, timeout=3500
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, ...], Future[Done]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {names: pool.submit(run, names) for names in PARTS}


@pytest.mark.parametrize("names", PARTS, ids=" ".join)
def test_interpreted(runs: dict[tuple[str, ...], Future[Done]], names: tuple[str, ...]) -> None:
    done = runs[names].result()
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
