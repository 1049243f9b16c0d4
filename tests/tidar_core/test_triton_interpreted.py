"""Runs the interpreted kernel tests, each file in a process of its own: triton must be told before it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["interpreted_kernels.py", "interpreted_engine.py", "interpreted_bench.py"])
def test_interpreted(name):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--durations=5", str(HERE / name)]
    # One thread: the library's own threads cost more than they bring on matrices this small.
    settings = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=HERE.parents[1], capture_output=True, text=True, timeout=540
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
