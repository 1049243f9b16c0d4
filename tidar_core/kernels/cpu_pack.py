"""Matrices laid out as the CPU's products read them, whole or rounded to fewer bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidar_core.kernels.cpu_build import LANES

INT4_GROUP = 32  # inputs that share a scale and a minimum
SLICE_WEIGHTS = 1 << 20  # that are packed at a time


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, in / S, 16, S], as `cpu_gemm.cpp` reads it; as it is where the sizes do not divide."""
    rows, columns = weight.shape
    if rows % LANES or columns % LANES:
        return weight
    step = 2 if weight.dtype is torch.bfloat16 else 1
    return weight.view(rows // LANES, LANES, columns // step, step).permute(0, 2, 1, 3).contiguous()


def pack_int8(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, 16 in + 64] bytes, as `cpu_gemm_int8.cpp` reads it: one scale an output."""
    return _in_slices(_int8_blocks, weight, LANES * (weight.shape[1] + 4))


def pack_int4(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, 10 in] bytes, as `cpu_gemm_int4.cpp` reads it: a scale and a minimum for 32 inputs.

    The smallest weight of a group becomes 0 and the largest 15, so that weights from a GGUF file's Q4_1 come out with
    the whole numbers that they had there.
    """
    return _in_slices(_int4_blocks, weight, 10 * weight.shape[1])


def of_each(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`pack` of a matrix, or of each expert's."""

    def packed(weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return pack(weight)
        first = pack(weight[0])
        together = first.new_empty(len(weight), *first.shape)
        for matrix, to in zip(weight, together, strict=True):
            to.copy_(pack(matrix))
        return together

    return packed


def _in_slices(blocks_of: Callable[[Tensor], Tensor], weight: Tensor, block_bytes: int) -> Tensor:
    """Blocks of 16 outputs, made of some rows at a time: of a whole matrix the numbers between would take several times
    its memory."""
    rows, columns = weight.shape
    packed = weight.new_empty(rows // LANES, block_bytes, dtype=torch.uint8)
    blocks = max(1, SLICE_WEIGHTS // (LANES * columns))
    for part, to in zip(weight.split(blocks * LANES), packed.split(blocks), strict=True):
        to.copy_(blocks_of(part))
    return packed


def _int8_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    whole = (wide * inverse[:, None]).round().clamp(-127, 127) + 128
    blocks = whole.to(torch.uint8).view(rows // LANES, LANES, columns // 4, 4).permute(0, 2, 1, 3)
    return torch.cat((blocks.reshape(rows // LANES, -1), scales.view(rows // LANES, LANES).view(torch.uint8)), dim=1)


def _int4_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    groups = columns // INT4_GROUP
    wide = weight.float().view(rows, groups, INT4_GROUP)
    minima = wide.amin(dim=2).half()
    scales = ((wide.amax(dim=2) - minima.float()) / 15).half()
    above = (wide - minima.float()[..., None]) / scales.float()[..., None]
    whole = above.nan_to_num(0.0).round().clamp(0, 15).to(torch.uint8)  # (a scale of zero divides zero)
    quads = whole.view(rows // LANES, LANES, groups, INT4_GROUP // 8, 2, 4).permute(0, 2, 3, 1, 5, 4)
    numbers = (quads[..., 0] | quads[..., 1] << 4).reshape(rows // LANES, groups, -1)
    behind = [each.view(rows // LANES, LANES, groups).mT.contiguous().view(torch.uint8) for each in (scales, minima)]
    return torch.cat((numbers, *behind), dim=2).flatten(1)
