"""Quantized checkpoints written from the definition of each format, with the numbers that they stand for.

Scales have few bits, so that what a matrix stands for is the same in fp64 and in fp32.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import edit_json

Stored = dict[str, Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of each four bits of a word, from the lowest on
FLOAT4 = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)]


@dataclass(frozen=True, slots=True)
class Format:
    """config: what is added to config.json; pack: what replaces a layer's weight, and its numbers; beside: another
    file; everything: whether the embedding is quantized as well."""

    config: dict[str, Any]
    pack: Packer
    beside: dict[str, Any] = field(default_factory=dict)
    everything: bool = False


def quantize(path: Path, form: Format, seed: int = 0, left: str = "layers.1.mlp.down_proj") -> dict[str, Tensor]:
    """Quantize the checkpoint in `path`, but for the layer `left`; what it stands for, by ordinary names, in fp32."""
    rng = np.random.default_rng(seed)
    plain = load_file(path / "model.safetensors")
    stored: Stored = {}
    for name, tensor in plain.items():
        layer, _, kind = name.rpartition(".")
        linear = layer.endswith(LINEARS) or (form.everything and layer.endswith(("embed_tokens", "lm_head")))
        if kind == "weight" and linear and not layer.endswith(left):
            parts, matrix = form.pack(rng, *tensor.shape)
            stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
            plain[name] = torch.from_numpy(np.ascontiguousarray(matrix)).float()
            assert torch.equal(plain[name].double(), torch.from_numpy(matrix))
        else:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", **form.config)
    for file, content in form.beside.items():
        (path / file).write_text(json.dumps(content))
    return plain


def scales(rng: np.random.Generator, *shape: int, least: int = -8) -> np.ndarray:
    return (8 + rng.integers(0, 8, shape)) / 8 * 2.0 ** rng.integers(least, least + 3, shape)


def spread(numbers: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Each number for a block of a matrix, those at the edges cut."""
    return numbers.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def words(numbers: np.ndarray, bits: int) -> Tensor:
    """Each row as one long number of `bits` bits a place, cut into int32 words."""
    rows = []
    for row in numbers.tolist():
        whole = sum(value << (bits * place) for place, value in enumerate(row))
        length = -(-len(row) * bits // 32)
        rows.append(np.frombuffer(whole.to_bytes(4 * length, "little"), dtype="<i4"))
    return torch.from_numpy(np.array(rows).reshape(len(numbers), -1))


def half(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers).half()


def pack_fp8(
    rng: np.random.Generator, rows: int, columns: int, *, block: tuple[int, int] | None, part: str, dims: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Stored, np.ndarray]:  # fmt: skip
    weight = torch.from_numpy(rng.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
    block = block or (rows, columns)
    block = (block[0], block[1] if block[1] > 0 else columns)
    scale = scales(rng, *blocks((rows, columns), block), least=-4)
    shape = scale.shape[:dims]
    stored = {"weight": weight, part: torch.from_numpy(scale.reshape(shape)).to(dtype)}
    return stored, weight.double().numpy() * spread(scale, block, (rows, columns))


def pack_int8(rng: np.random.Generator, rows: int, columns: int, *, zero: bool) -> tuple[Stored, np.ndarray]:
    weight, scale = rng.integers(-128, 128, (rows, columns)), scales(rng, rows, 1, least=-11)
    zeros = rng.integers(-128, 128, (rows, 1)) if zero else np.zeros((rows, 1), dtype=int)
    stored = {"weight": torch.from_numpy(weight).to(torch.int8), "weight_scale": torch.from_numpy(scale).bfloat16()}
    if zero:
        stored["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    return stored, (weight - zeros) * scale


def pack_integers(
    rng: np.random.Generator, rows: int, columns: int, *, bits: int, group: int, zero: str = "", ordered: bool = False
) -> tuple[Stored, np.ndarray]:
    group = columns if group < 0 else group
    least, groups = 2 ** (bits - 1), columns // group
    weight, scale = rng.integers(-least, least, (rows, columns)), scales(rng, rows, groups, least=-4 - bits)
    zeros = rng.integers(-least, least, (rows, groups)) if zero else np.zeros((rows, groups), dtype=int)
    order = rng.permutation(columns) // group if ordered else np.arange(columns) // group
    stored = {
        "weight_packed": words(weight + least, bits),
        "weight_scale": half(scale),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero == "packed":
        stored["weight_zero_point"] = words((zeros + least).T, bits).T
    elif zero:
        stored["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    if ordered:
        stored["weight_g_idx"] = torch.from_numpy(order).int()
    return stored, (weight - zeros[:, order]) * scale[:, order]


def pack_float4(
    rng: np.random.Generator, rows: int, columns: int, *, names: Sequence[str]
) -> tuple[Stored, np.ndarray]:
    """names: of the weights, the scales and the global scale. That of compressed-tensors divides."""
    codes = rng.integers(0, 16, (rows, columns))
    scale = torch.from_numpy(scales(rng, rows, columns // 16, least=-2)).to(torch.float8_e4m3fn)
    divides = names[2] == "weight_global_scale"
    stored = {
        names[0]: torch.from_numpy(codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8),
        names[1]: scale,
        names[2]: torch.tensor([16.0]) if divides else torch.tensor(0.0625),
    }
    return stored, np.array(FLOAT4)[codes] * spread(scale.double().numpy() / 16, (1, 16), (rows, columns))


def pack_gptq(
    rng: np.random.Generator, rows: int, columns: int, *, bits: int, group: int, missing: int = 1, order: str = "rising"
) -> tuple[Stored, np.ndarray]:
    """missing: what stored zero points lack. order: of the groups of columns, "" if it is not stored."""
    group = columns if group < 0 else group
    groups = columns // group
    index = rng.permutation(columns) // group if order == "shuffled" else np.arange(columns) // group
    weight, scale = rng.integers(0, 2**bits, (columns, rows)), scales(rng, groups, rows, least=-4 - bits)
    zeros = rng.integers(missing, 2**bits, (groups, rows))
    stored = {
        "qweight": words(weight.T, bits).T,
        "qzeros": words(zeros - missing, bits),
        "scales": half(scale),
        "g_idx": torch.from_numpy(index).int(),
    }
    if not order:
        del stored["g_idx"]
    return stored, ((weight - zeros[index]) * scale[index]).T


def awq_words(numbers: np.ndarray) -> Tensor:
    eights = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_COLUMNS]
    return words(eights.reshape(len(numbers), -1), 4)


def pack_awq(rng: np.random.Generator, rows: int, columns: int, *, group: int) -> tuple[Stored, np.ndarray]:
    groups = columns // group
    weight, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (groups, rows))
    scale = scales(rng, groups, rows)
    stored = {"qweight": awq_words(weight), "qzeros": awq_words(zeros), "scales": half(scale)}
    index = np.arange(columns) // group
    return stored, ((weight - zeros[index]) * scale[index]).T


def pack_4bit(
    rng: np.random.Generator, rows: int, columns: int, *, kind: str, nested: bool, stored_as: torch.dtype = torch.uint8
) -> tuple[Stored, np.ndarray]:
    codes, table = rng.integers(0, 16, rows * columns), rng.permutation(np.arange(-8, 8)) / 8
    count = -(-rows * columns // 64)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    stored = {
        "weight": torch.from_numpy(16 * codes[0::2] + codes[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": torch.from_numpy(table).float(),
    }
    if stored_as != torch.uint8:
        stored["weight"] = stored["weight"].flatten().view(stored_as)[:, None]
    if nested:
        places, values = rng.integers(0, 256, count), rng.permutation(np.arange(256)) / 2048
        largest = scales(rng, -(-count // 16), least=-1)
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        stored |= {
            "weight.absmax": torch.from_numpy(places).to(torch.uint8),
            "weight.nested_absmax": torch.from_numpy(largest).float(),
            "weight.nested_quant_map": torch.from_numpy(values).float(),
        }
        absmax = values[places] * largest.repeat(16)[:count] + 0.25
    else:
        absmax = scales(rng, count, least=-3)
        stored["weight.absmax"] = torch.from_numpy(absmax).float()
    text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
    return stored, (table[codes] * absmax.repeat(64)[: rows * columns]).reshape(rows, columns)


def pack_scb(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    weight, scale = rng.integers(-127, 128, (rows, columns)), scales(rng, rows, 1, least=-11)
    stored = {
        "weight": torch.from_numpy(weight).to(torch.int8),
        "SCB": torch.from_numpy(127 * scale[:, 0]).float(),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, weight * scale


def pack_mlx(rng: np.random.Generator, rows: int, columns: int, *, bits: int, group: int) -> tuple[Stored, np.ndarray]:
    weight, shape = rng.integers(0, 2**bits, (rows, columns)), (rows, columns // group)
    scale, bias = scales(rng, *shape, least=-4 - bits), -scales(rng, *shape, least=-4)
    stored = {"weight": words(weight, bits).view(torch.uint32), "scales": half(scale), "biases": half(bias)}
    return stored, weight * spread(scale, (1, group), weight.shape) + spread(bias, (1, group), weight.shape)


def stated(method: str, **details: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **details}}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return stated("compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"])


FORMATS: dict[str, Format] = {
    "fp8, blocks": Format(
        stated("fp8", weight_block_size=[64, 128], activation_scheme="dynamic", fmt="e4m3"),
        partial(pack_fp8, block=(64, 128), part="weight_scale_inv"),
    ),
    "fp8, one scale": Format(
        stated("fp8", activation_scheme="static"), partial(pack_fp8, block=None, part="weight_scale", dims=0)
    ),
    "fp8, a scale a row": Format(stated("fp8"), partial(pack_fp8, block=(1, -1), part="weight_scale_inv", dims=1)),
    "compressed-tensors, fp8 rows": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        partial(pack_fp8, block=(1, -1), part="weight_scale", dtype=torch.bfloat16),
    ),
    "compressed-tensors, fp8 one scale": Format(
        compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
        partial(pack_fp8, block=None, part="weight_scale", dims=1),
    ),
    "compressed-tensors, fp8 blocks": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64]),
        partial(pack_fp8, block=(64, 64), part="weight_scale"),
    ),
    "compressed-tensors, int8": Format(
        {"compression_config": compressed("int-quantized", num_bits=8, type="int")["quantization_config"]},
        partial(pack_int8, zero=False),
    ),
    "compressed-tensors, int8 and zero points": Format(
        compressed("int-quantized", num_bits=8, type="int", symmetric=False), partial(pack_int8, zero=True)
    ),
    "compressed-tensors, 4 bits": Format(
        compressed("pack-quantized", num_bits=4, group_size=32), partial(pack_integers, bits=4, group=32)
    ),
    "compressed-tensors, 4 bits and zero points": Format(
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        partial(pack_integers, bits=4, group=32, zero="packed"),
    ),
    "compressed-tensors, 4 bits, zero points as they are": Format(
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        partial(pack_integers, bits=4, group=32, zero="plain"),
    ),
    "compressed-tensors, 4 bits, shuffled": Format(
        compressed("pack-quantized", num_bits=4, group_size=16, actorder="group", symmetric=False),
        partial(pack_integers, bits=4, group=16, zero="packed", ordered=True),
    ),
    "compressed-tensors, 8 bits": Format(
        compressed("pack-quantized", num_bits=8, group_size=None, strategy="channel"),
        partial(pack_integers, bits=8, group=-1),
    ),
    "compressed-tensors, 3 bits": Format(
        compressed("pack-quantized", num_bits=3, group_size=16),
        partial(pack_integers, bits=3, group=16, zero="packed"),
    ),
    "compressed-tensors, nvfp4": Format(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        partial(pack_float4, names=("weight_packed", "weight_scale", "weight_global_scale")),
    ),
    "gptq": Format(stated("gptq", bits=4, group_size=32, sym=False), partial(pack_gptq, bits=4, group=32)),
    "gptq, v2": Format(
        stated("gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"),
        partial(pack_gptq, bits=4, group=32, missing=0),
    ),
    "gptq, shuffled": Format(
        stated("gptq", bits=4, group_size=16, desc_act=True, checkpoint_format="gptq"),
        partial(pack_gptq, bits=4, group=16, order="shuffled"),
    ),
    "gptq, 8 bits, one group, no index": Format(
        stated("gptq", bits=8, group_size=-1), partial(pack_gptq, bits=8, group=-1, order="")
    ),
    "gptq, 3 bits": Format(stated("gptq", bits=3, group_size=32), partial(pack_gptq, bits=3, group=32)),
    "gptq, 2 bits, no index": Format(
        stated("gptq", bits=2, group_size=16), partial(pack_gptq, bits=2, group=16, order="")
    ),
    "gptq, said beside": Format(
        {}, partial(pack_gptq, bits=4, group=32), {"quantize_config.json": {"bits": 4, "group_size": 32}}
    ),
    "awq": Format(stated("awq", bits=4, group_size=32, version="gemm"), partial(pack_awq, group=32)),
    "awq, said beside": Format(
        {}, partial(pack_awq, group=16), {"quant_config.json": {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}}
    ),
    "auto-round": Format(
        stated("auto-round", bits=4, group_size=32, sym=True, data_type="int", packing_format="auto_round:auto_gptq"),
        partial(pack_gptq, bits=4, group=32, order=""),
    ),
    "auto-round, 3 bits, zero points as they are": Format(
        stated("auto-round", bits=3, group_size=16, sym=False, data_type="int", packing_format="auto_round"),
        partial(pack_gptq, bits=3, group=16, missing=0, order=""),
    ),
    "auto-round, 5 bits, one group": Format(
        stated("auto-round", bits=5, group_size=-1, sym=True), partial(pack_gptq, bits=5, group=-1, order="")
    ),
    "auto-round, as awq": Format(
        stated("auto-round", bits=4, group_size=32, sym=False, packing_format="auto_round:auto_awq"),
        partial(pack_awq, group=32),
    ),
    "auto-round, of its first years": Format(
        stated("intel/auto-round", bits=2, group_size=32, sym=False, backend="auto_round:exllamav2"),
        partial(pack_gptq, bits=2, group=32, missing=0, order=""),
    ),
    "auto-round, of its first years, as gptq": Format(
        stated("intel/auto-round", bits=8, group_size=32, sym=True, backend="auto_round:gptq:exllamav2"),
        partial(pack_gptq, bits=8, group=32),
    ),
    "bitsandbytes, nf4": Format(
        stated("bitsandbytes", load_in_4bit=True, bnb_4bit_use_double_quant=True),
        partial(pack_4bit, kind="nf4", nested=True),
    ),
    "bitsandbytes, fp4": Format(
        stated("bitsandbytes", load_in_4bit=True), partial(pack_4bit, kind="fp4", nested=False)
    ),
    "bitsandbytes, nf4 as bf16": Format(
        stated("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"),
        partial(pack_4bit, kind="nf4", nested=True, stored_as=torch.bfloat16),
    ),
    "bitsandbytes, int8": Format(stated("bitsandbytes", load_in_8bit=True), pack_scb),
    "fbgemm_fp8": Format(stated("fbgemm_fp8"), partial(pack_fp8, block=(1, -1), part="weight_scale")),
    "modelopt": Format(
        {"quantization_config": {"quant_library": "modelopt", "quant_algo": "FP8"}},
        partial(pack_fp8, block=None, part="weight_scale", dims=0),
    ),
    "modelopt, said beside": Format(
        {},
        partial(pack_fp8, block=None, part="weight_scale", dims=0),
        {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}},
    ),
    "modelopt, nvfp4": Format(
        stated("modelopt", quant_algo="NVFP4"),
        partial(pack_float4, names=("weight", "weight_scale", "weight_scale_2")),
    ),
    "mlx": Format(
        {"quantization": {"group_size": 32, "bits": 4}, "quantization_config": {"group_size": 32, "bits": 4}},
        partial(pack_mlx, bits=4, group=32),
        everything=True,
    ),
    "mlx, 6 bits": Format({"quantization": {"group_size": 16, "bits": 6}}, partial(pack_mlx, bits=6, group=16)),
    "mlx, 3 bits": Format({"quantization": {"group_size": 32, "bits": 3}}, partial(pack_mlx, bits=3, group=32)),
}
