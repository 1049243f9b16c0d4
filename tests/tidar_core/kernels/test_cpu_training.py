"""Training's row-wise kernels on a CPU, and what runs where kernels of our own do not fit."""

import shutil
from dataclasses import replace
from typing import get_args

import pytest
import torch

from tests.tidar_core.convert.trained import tiny_base
from tidar_core.config import Activation
from tidar_core.convert import forward
from tidar_core.convert.forward import PLAIN, cpu_ways
from tidar_core.convert.ops import PLAIN_ROWS
from tidar_core.kernels.cpu_blocks import supports_blocks
from tidar_core.kernels.cpu_build import CompileError, compiled_library
from tidar_core.kernels.cpu_training import row_ops, supports_rows

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@needs_compiler
def test_far_gates_are_plain_torchs() -> None:
    """What overflows on the way to a share of 0 or 1 is such a share; only the cube's own overflow is none."""
    rows = row_ops(compiled_library("training"), torch.float32)
    far = torch.tensor([[-3e38, -1e4, -100.0, -88.0, 88.0, 100.0, 1e4, 3e38] * 2 + [1.0] * 16])
    for activation in get_args(Activation):
        for ours, theirs in (
            (rows.gate(far, activation), PLAIN_ROWS.gate(far, activation)),
            (rows.gate_slope(far, far[:, 16:], activation), PLAIN_ROWS.gate_slope(far, far[:, 16:], activation)),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)


@needs_compiler
def test_rows_of_another_dtype_are_refused() -> None:
    rows = row_ops(compiled_library("training"), torch.float32)
    with pytest.raises(TypeError, match=r"rows of torch\.bfloat16 for kernels of torch\.float32"):
        rows.norm(torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(16), 1e-5)


@needs_compiler
def test_what_does_not_fit_is_plain(tmp_path) -> None:
    config = tiny_base(tmp_path).base.config
    assert supports_rows(config, torch.bfloat16)
    assert supports_blocks(config, torch.float32)
    assert not supports_rows(replace(config, intermediate_size=40), torch.float32)
    assert not supports_rows(config, torch.float16)
    assert not supports_blocks(replace(config, head_dim=24), torch.float32)
    attends, rows = cpu_ways(config, torch.bfloat16, print)
    assert attends == PLAIN
    assert rows is not PLAIN_ROWS


def test_without_a_compiler_training_goes_on_in_plain_torch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*given: object) -> None:
        raise CompileError("no C++ compiler (g++ or clang++) on PATH")

    monkeypatch.setattr(forward, "compiled_library", no_compiler)
    said: list[str] = []
    assert cpu_ways(tiny_base(tmp_path).base.config, torch.float32, said.append) == (PLAIN, PLAIN_ROWS)
    assert said == ["training without compiled kernels, which is slower: no C++ compiler (g++ or clang++) on PATH"]
