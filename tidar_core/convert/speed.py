"""How much of the device training uses: what a step computes, against what a large matrix product reaches here."""

import time
from dataclasses import dataclass

import torch

from tidar_core.convert.forward import FrozenBase
from tidar_core.model.weights import AdapterWeights, named_tensors, numbers_a_row

PROBE_SECONDS = 0.2
MUCH_FASTER = 1.5


@dataclass(frozen=True, slots=True)
class WorkPerRow:
    """Floating-point operations of one clean row and of one mask row, attention left out.

    A mask row goes forward through base and adapter, back through both for its input, back once more for the
    adapter's tensors, and through the head both ways, with its target's scores beside.
    """

    clean: float
    mask: float

    def fraction(self, clean_rows: int, mask_rows: int, seconds: float, peak: float) -> float:
        """The share of `peak` (operations per second) that these rows reached in these seconds."""
        return (clean_rows * self.clean + mask_rows * self.mask) / seconds / peak


def work_per_row(base: FrozenBase, adapter: AdapterWeights, columns: int) -> WorkPerRow:
    """Counted from the shapes of the matrices. columns: rows of the head that are computed with."""
    weights = base.weights
    trunk = sum(numbers_a_row(base.config, layer) for layer in weights.layers)
    extra = sum(tensor.numel() for name, tensor in named_tensors(adapter) if name.endswith((".A", ".B")))
    head = columns * weights.head.shape[1]
    return WorkPerRow(clean=2.0 * trunk, mask=4.0 * trunk + 6.0 * extra + 5.0 * head)


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product on this device."""
    size = 8192 if device.type == "cuda" else 1024
    x = torch.randn(size, size, device=device, dtype=dtype)
    best, until = float("inf"), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < until or best == float("inf"):
        _wait(device)
        began = time.perf_counter()
        torch.mm(x, x)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What to compute in where the weights are of `dtype`: fp32 where matrix products are much faster in it, as on
    processors without products in bf16, which torch emulates."""
    if dtype is torch.float32 or device.type == "cuda":
        return dtype
    faster = measure_peak(device, torch.float32) > MUCH_FASTER * measure_peak(device, dtype)
    return torch.float32 if faster else dtype


def device_name(device: torch.device, workers: int) -> str:
    """What a model card calls the device."""
    threads = torch.get_num_threads()
    cpu = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return name if workers == 1 else f"{workers} workers with {name} each"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
