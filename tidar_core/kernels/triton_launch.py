"""Launches that overlap: a kernel begins while the one before it still runs.

A step of a small model is hundreds of kernels of a few microseconds, and what lies between two of them counts as much
as they do. Hopper can start a kernel before the one in front is through (programmatic dependent launch): its programs
find their places, prefetch what no other kernel writes, then wait. Every kernel here waits before it reads or
writes anything else, so that whatever a kernel sees is what it would see behind a full stop.
"""

# mypy: allow-untyped-defs

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 9, 0
HOPPER_PROCESSORS = 132  # of an H100 or H200
MOST_OVERLAPPING_ROWS = 64  # of a step; with more the kernels are so long that it was measured to cost time (H100)
LINE = tl.constexpr(128)  # bytes that one prefetch brings


def launch_options(device: torch.device, rows: int, overlap_launches: bool) -> dict[str, Any]:
    """The options for launching a kernel with a parameter OVERLAP in a step of `rows` rows. overlap_launches: whether
    launches are to overlap, where the device and the rows allow it. The meta device counts as Hopper."""
    hopper = device.type == "meta" or (device.type == "cuda" and capability(device) >= HOPPER)
    can = hopper and rows <= MOST_OVERLAPPING_ROWS
    return {"OVERLAP": True, "launch_pdl": True} if overlap_launches and can else {"OVERLAP": False}


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """How many multiprocessors a device has; Hopper's number where it is none of CUDA's."""
    if device.type != "cuda":
        return HOPPER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_kernel_before(OVERLAP: tl.constexpr):
    """Waits until the kernel before has written all that it writes."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Lets the next kernel begin once all programs of this one have come here or ended. A kernel that fills the GPU
    calls it late: programs that begin while it runs would crowd together where there is room, instead of spreading."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Fetches the cache lines that pointers lie in into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
