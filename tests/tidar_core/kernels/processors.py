"""The CPU's kernels as compiled for this processor and for lesser ones, which it can run too."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tidar_core.config import ModelConfig, RoundedDType
from tidar_core.kernels import cpu, cpu_build
from tidar_core.kernels.ops import Ops

AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}


def _processors() -> list[str]:
    """As the compiler's -march names them; registers of 32 bytes, where this processor has them, and of 16."""
    if platform.machine() != "x86_64":
        return ["native"]
    has_avx2 = set(Path("/proc/cpuinfo").read_text().split()) >= AVX2
    return ["native", *["x86-64-v3"] * has_avx2, "x86-64"]


PROCESSORS = _processors()
KINDS_OF_X86 = ["x86-64", "x86-64-v3", "x86-64-v4", "cascadelake", "sapphirerapids"]


def flags_for(processor: str) -> tuple[str, ...]:
    return tuple(f"-march={processor}" if flag == "-march=native" else flag for flag in cpu_build.FLAGS)


def ops_for(processor: str, config: ModelConfig, dtype: torch.dtype, rounded: RoundedDType | None = None) -> Ops:
    """Skips the test where there is no compiler."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler here")
    with patch.object(cpu_build, "FLAGS", flags_for(processor)):
        made = cpu.cpu_ops(config, dtype, rounded)
    return replace(made, name=f"{made.name} {processor}")
