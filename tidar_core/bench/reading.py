"""A kernel that reads memory and does as little else as can be: the ceiling of everything that is bound by reading."""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 32768  # integers that one program reads


@triton.jit
def _add_up(data, sums, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds up STRETCH int32, a multiple of BLOCK, in int64."""
    first = tl.program_id(0).to(tl.int64) * STRETCH
    total = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, STRETCH, BLOCK):
        total += tl.load(data + first + start + tl.arange(0, BLOCK)).to(tl.int64)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_all(data: Tensor) -> Tensor:
    """Partial sums, int64, of int32 `data` of a multiple of STRETCH elements."""
    programs = data.numel() // STRETCH
    sums = torch.empty(programs, dtype=torch.int64, device=data.device)
    _add_up[(programs,)](data, sums, STRETCH=STRETCH, BLOCK=4096, num_warps=4, enable_fp_fusion=True)
    return sums
