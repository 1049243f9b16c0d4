"""8-bit floating point (e4m3: 4 bits of exponent, 3 of mantissa) with a scale a row: of base matrices and of K/V.

Scales are powers of two, so that a rounded number is one that bfloat16 has as well: what a GPU keeps in 8 bits and what
a CPU keeps in 16 are the same numbers.
"""

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


def packed(weight: Tensor) -> Tensor:
    """The 8-bit values [..., out, in] of a matrix or of experts; their fp32 scales [..., out] lie behind all of them in
    the same memory."""
    values, scales = to_float8(weight)
    memory = torch.cat((values.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()))
    return memory[: values.numel()].view(FLOAT8).view(values.shape)
