"""How quantized checkpoints store a matrix, layout by layout.

Weights alone are read. What a checkpoint says of rounding activations (W8A8, static or dynamic scales) is passed over:
they stay in the engine's dtype, more precise than in the runtimes that such a checkpoint was made for. So are scales
for K/V. Which matrices are quantized is told by the tensors that are there, not by the lists of a configuration.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from tidar_core.model.quantization import Quantization
from tidar_core.model.quantized import (
    PLAIN,
    QuantizedMatrix,
    Shared,
    StoredLinear,
    affine,
    bits_of,
    column_order,
    shared,
    unpacked,
    words_for,
)

PACKED = ("qweight", "weight_packed")  # what a matrix is called that is not called weight

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, by its bits
_FLOAT4_BLOCK = (1, 16)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word hold the first, second, … of its eight numbers


def quantized_matrix(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix | None:
    """The layer's matrix, of a checkpoint that is quantized so; None where it is an ordinary tensor.

    Raises ConfigError where tensors that belong to it are not there, or are not what the layout asks for.
    """
    weight = linear.find("weight")
    if weight is not None and weight.dtype in PLAIN and linear.find("weight.absmax") is None:
        return None
    return _LAYOUTS[quantization.method](linear, quantization)


def _scaled(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    """8 bits a weight, floating point or integer, with a scale for the matrix, each row or each block."""
    weight = linear.tensor("weight", *_FLOAT8, torch.int8)
    shape = weight.shape[0], weight.shape[1]
    part = "weight_scale" if linear.find("weight_scale_inv") is None else "weight_scale_inv"
    scale = shared(linear, part, linear.scale(part), shape, quantization.blocks)
    zeros = linear.find("weight_zero_point")
    zero = None if zeros is None else shared(linear, "weight_zero_point", zeros, shape, quantization.blocks)
    return affine(shape, lambda start, stop: weight[start:stop], scale, zero)


def _float4(linear: StoredLinear, part: str, scale: Tensor) -> QuantizedMatrix:
    """Two weights a byte, the first in its lower half."""
    packed, table = linear.tensor(part, torch.uint8), torch.tensor(_FLOAT4)
    shape = packed.shape[0], 2 * packed.shape[1]

    def values(start: int, stop: int) -> Tensor:
        pairs = packed[start:stop].int()
        return table[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)]

    return affine(shape, values, shared(linear, "weight_scale", scale, shape, (_FLOAT4_BLOCK,)))


def _one_scale(linear: StoredLinear, part: str) -> Tensor:
    found = linear.scale(part)
    linear.require(part, found, 1, 1)
    return found


def _modelopt(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    weight = linear.find("weight")
    if weight is None or weight.dtype != torch.uint8:
        return _scaled(linear, quantization)
    return _float4(linear, "weight", linear.scale("weight_scale") * _one_scale(linear, "weight_scale_2"))


def _compressed(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    packed = linear.find("weight_packed")
    if packed is None:
        return _scaled(linear, quantization)
    if packed.dtype == torch.uint8:
        scale = linear.scale("weight_scale") / _one_scale(linear, "weight_global_scale")
        return _float4(linear, "weight_packed", scale)
    return _packed_integers(linear, quantization)


def _packed_integers(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    """Signed integers, the least one stored as 0, in words along each row."""
    packed, scales = linear.tensor("weight_packed", torch.int32), linear.scale("weight_scale")
    stated = linear.tensor("weight_shape", torch.int64, torch.int32, dims=1)
    linear.require("weight_shape", stated, 2)
    shape = rows, columns = int(stated[0]), int(stated[1])
    linear.require("weight_packed", packed, rows, packed.shape[1])
    bits = bits_of(linear, "weight_packed", packed.shape[1], columns, quantization.bits)
    least = 1 << (bits - 1)
    order = column_order(linear, "weight_g_idx", columns, scales.shape[1])

    def spread(part: str, numbers: Tensor) -> Shared:
        if order is None:
            return shared(linear, part, numbers, shape, quantization.blocks)
        linear.require(part, numbers, rows, scales.shape[1])
        return Shared(numbers, (1, 1), order)

    zeros = linear.find("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:  # packed too, along the rows
        linear.require("weight_zero_point", zeros, words_for(rows, bits), *scales.shape[1:])
        zeros = unpacked(zeros.T, bits, rows).T - least
    return affine(
        shape,
        lambda start, stop: unpacked(packed[start:stop], bits, columns) - least,
        spread("weight_scale", scales),
        None if zeros is None else spread("weight_zero_point", zeros),
    )


def _gptq(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    """Transposed: words along the inputs, those of the zero points along the outputs."""
    weight, zeros = linear.tensor("qweight", torch.int32), linear.tensor("qzeros", torch.int32)
    scales = linear.tensor("scales", *PLAIN).T
    rows, groups = scales.shape
    bits = bits_of(linear, "qzeros", zeros.shape[1], rows, quantization.bits)
    shape = rows, weight.shape[0] * 32 // bits
    linear.require("qweight", weight, weight.shape[0], rows)
    linear.require("qzeros", zeros, groups, zeros.shape[1])
    zeros = unpacked(zeros, bits, rows).T + quantization.zero_offset & (1 << bits) - 1
    order = column_order(linear, "g_idx", shape[1], groups)
    if order is None:
        scale = shared(linear, "scales", scales, shape, quantization.blocks)
    else:
        scale = Shared(scales, (1, 1), order)
    return affine(
        shape,
        lambda start, stop: unpacked(weight[:, start:stop].T, bits, shape[1]),
        scale,
        Shared(zeros, scale.block, order),
    )


def _awq(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    """Transposed: all words along the outputs, eight in each, in an order of their own."""
    weight, zeros = linear.tensor("qweight", torch.int32), linear.tensor("qzeros", torch.int32)
    scales = linear.tensor("scales", *PLAIN).T
    shape = 8 * weight.shape[1], weight.shape[0]
    scale = shared(linear, "scales", scales, shape, quantization.blocks)
    linear.require("qzeros", zeros, scales.shape[1], weight.shape[1])

    def outputs(words: Tensor) -> Tensor:
        """[inputs, words] to [8 * words, inputs]."""
        columns = words.T.contiguous()
        return torch.stack([columns >> 4 * place & 15 for place in _AWQ_PLACES], dim=1).flatten(0, 1)

    def values(start: int, stop: int) -> Tensor:
        first = start // 8
        return outputs(weight[:, first : -(-stop // 8)])[start - 8 * first : stop - 8 * first]

    return affine(shape, values, scale, Shared(outputs(zeros), scale.block))


def _bitsandbytes(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    if linear.find("weight.absmax") is not None:
        return _bitsandbytes_4bit(linear)
    weight = linear.tensor("weight", torch.int8)
    shape = weight.shape[0], weight.shape[1]
    largest = linear.scale("SCB")
    linear.require("SCB", largest, shape[0], 1)
    return affine(shape, lambda start, stop: weight[start:stop], Shared(largest / 127, (1, shape[1])))


def _bitsandbytes_4bit(linear: StoredLinear) -> QuantizedMatrix:
    """Two weights a byte, the first in its upper half, as places in a table; blocks run on from row to row."""
    shape, size, nested_size, offset = _bitsandbytes_state(linear)
    stored, blocks = linear.find("weight"), -(-shape[0] * shape[1] // size)
    packed = torch.empty(0) if stored is None else stored.reshape(-1).view(torch.uint8)  # stored as any dtype
    if packed.numel() != -(-shape[0] * shape[1] // 2):
        raise linear.error(f"weight holds {2 * packed.numel()} numbers, which are not {list(shape)}")
    table = linear.tensor("weight.quant_map", *PLAIN, dims=1).float()
    linear.require("weight.quant_map", table, 16)
    largest = linear.tensor("weight.absmax", *PLAIN, torch.uint8, dims=1)
    linear.require("weight.absmax", largest, blocks)
    if largest.dtype == torch.uint8:
        codes = linear.tensor("weight.nested_quant_map", *PLAIN, dims=1).float()
        linear.require("weight.nested_quant_map", codes, 256)
        nested = linear.tensor("weight.nested_absmax", *PLAIN, dims=1).float()
        linear.require("weight.nested_absmax", nested, -(-blocks // nested_size))
        largest = codes[largest.int()] * nested[torch.arange(blocks) // nested_size] + offset

    def rows(start: int, stop: int) -> Tensor:
        first, last = start * shape[1], stop * shape[1]
        pairs = packed[first // 2 : -(-last // 2)].int()
        values = table[torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()][first % 2 :][: last - first]
        scale = largest[first // size : -(-last // size), None].float().expand(-1, size).flatten()
        return (values * scale[first % size :][: last - first]).unflatten(0, (-1, shape[1]))

    return QuantizedMatrix(shape, rows)


def _bitsandbytes_state(linear: StoredLinear) -> tuple[tuple[int, int], int, int, float]:
    """The shape, the weights of a block, the blocks that share a nested scale, and what is added to what they give."""
    kinds = [f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    part = next((each for each in kinds if linear.find(each) is not None), kinds[0])
    stored = linear.tensor(part, torch.uint8, dims=1)
    try:
        state = json.loads(bytes(stored.tolist()))
        rows, columns = map(int, state["shape"])
        size, nested_size = int(state["blocksize"]), int(state.get("nested_blocksize") or 1)
        if min(rows, columns, size, nested_size) < 1:
            raise ValueError("a size is not positive")
        return (rows, columns), size, nested_size, float(state.get("nested_offset") or 0)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise linear.error(f"{part} says nothing valid") from None


def _mlx(linear: StoredLinear, quantization: Quantization) -> QuantizedMatrix:
    """Words along each row; values * scale + bias, groups of columns sharing both."""
    stored = linear.tensor("weight", torch.uint32)
    (bits,) = quantization.bits
    packed, shape = stored.view(torch.int32), (stored.shape[0], stored.shape[1] * 32 // bits)
    scales, biases = linear.tensor("scales", *PLAIN), linear.tensor("biases", *PLAIN)
    scale = shared(linear, "scales", scales, shape, quantization.blocks)
    linear.require("biases", biases, *scales.shape)
    bias = Shared(biases, scale.block)
    matrix = affine(shape, lambda start, stop: unpacked(packed[start:stop], bits, shape[1]), scale)
    return QuantizedMatrix(shape, lambda start, stop: matrix.rows(start, stop) + bias.rows(start, stop, shape[1]))


_LAYOUTS: dict[str, Callable[[StoredLinear, Quantization], QuantizedMatrix]] = {
    "fp8": _scaled,
    "fbgemm_fp8": _scaled,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mlx": _mlx,
}
