"""8-bit floating point (e4m3: 4 bits of exponent, 3 of mantissa) with a scale a row: of base matrices and of K/V.

Scales are powers of two, so that a rounded number is one that bfloat16 has as well: what a GPU keeps in 8 bits and what
a CPU keeps in 16 are the same numbers.
"""

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
LEAST_EXPONENT = -126


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., width] as 8-bit values and fp32 scales [...], the least powers of two that nothing overflows with.

    What is not a number stays so; a row with an infinite one has NaN as its scale."""
    largest = rows.abs().float().nan_to_num(nan=0.0, posinf=inf).amax(dim=-1)
    fraction, exponent = torch.frexp(torch.where(largest > 0, largest / LARGEST, 1.0))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp_min(LEAST_EXPONENT)
    powers = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)  # exact: a GPU's pow need not be
    scales = torch.where(largest < inf, powers, torch.nan)
    return (rows.float() / scales[..., None]).to(FLOAT8), scales


def rounded(rows: Tensor) -> Tensor:
    """Rows with every number rounded to what `to_float8` keeps of it, in their own dtype."""
    values, scales = to_float8(rows)
    return (values.float() * scales[..., None]).to(rows.dtype)


def matrices(weight: Tensor) -> Iterable[Tensor]:
    """A matrix, or the experts' matrices one by one: all at once, intermediate results would take several times their
    memory."""
    return (weight,) if weight.dim() == 2 else weight


def packed(weight: Tensor) -> Tensor:
    """The 8-bit values [..., out, in] of a matrix or of experts; their fp32 scales [..., out] lie behind all of them in
    the same memory."""
    size, scale_bytes = weight.numel(), 4 * weight.shape[:-1].numel()
    memory = torch.empty(size + scale_bytes, dtype=torch.uint8, device=weight.device)
    kept, behind = memory[:size].view(FLOAT8).view(weight.shape), memory[size:].view(*weight.shape[:-2], -1)
    for matrix, to, scales_to in zip(
        matrices(weight), matrices(kept), behind.view(-1, 4 * weight.shape[-2]), strict=True
    ):
        values, scales = to_float8(matrix)
        to.copy_(values)
        scales_to.copy_(scales.view(torch.uint8))
    return kept
