"""What a quantized checkpoint says of how its matrices are stored. Nothing here needs torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidar_core.config import ConfigError
from tidar_core.model.sources import read_json

STATED_UNDER = ("quantization_config", "compression_config", "quantization")  # keys of config.json

# Where quantizers write when they leave config.json as it was: file, method, key that holds it.
_FILES_BESIDE = (
    ("hf_quant_config.json", "modelopt", "quantization"),
    ("quantize_config.json", "gptq", None),
    ("quant_config.json", "awq", None),
)
_COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
# AutoRound's packings, by name without the kernel that was meant to read them: whose layout, what its zero points lack,
# the bits that a number may have.
_AUTO_ROUND_PACKINGS = {
    "auto_round:auto_gptq": ("gptq", 1, (2, 3, 4, 5, 6, 7, 8)),
    "auto_round:gptq": ("gptq", 1, (2, 3, 4, 5, 6, 7, 8)),
    "auto_round:gptqmodel": ("gptq", 0, (2, 3, 4, 5, 6, 7, 8)),
    "auto_round": ("gptq", 0, (2, 3, 4, 5, 6, 7, 8)),
    "auto_round:auto_awq": ("awq", 0, (4,)),
    "auto_round:awq": ("awq", 0, (4,)),
}
_AUTO_ROUND_KERNELS = re.compile(":(exllamav2|tritonv2)$")
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")

Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantized matrices of a checkpoint are stored, as far as their own tensors do not say it.

    method: whose layout, a name of `quant_method`, or "mlx". blocks: the (rows, columns) that may share a scale, over
    what a whole row or the whole matrix may share. bits: what a packed number may have. zero_offset: what stored zero
    points lack (gptq's first format). own: what is said of single modules, by name.
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    bits: tuple[int, ...] = ()
    zero_offset: int = 0
    own: Mapping[str, "Quantization"] = field(default_factory=dict)

    def of(self, module: str) -> "Quantization":
        """What holds for a module of the file."""
        return self.own.get(module, self)


class _Unread(Exception):
    """What of a method is not read."""


def read_quantization(directory: Path) -> Quantization | None:
    """How the checkpoint in `directory` is quantized, None where it says nothing of it.

    Raises ConfigError for what is not read, naming the method.
    """
    found = _stated(directory)
    if found is None:
        return None
    method, details = found
    try:
        if method not in _METHODS:
            raise _Unread(method)
        return _METHODS[method](details)
    except _Unread as unread:
        raise ConfigError(
            f"{directory.name} is quantized in a way that is not read, {unread}: "
            "give the original checkpoint or a GGUF file of it"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{directory.name}: its quantization_config is no valid one of {method}: download it again"
        ) from None


def _stated(directory: Path) -> tuple[str, Details] | None:
    """The method's name and its settings."""
    stated = read_json(directory / "config.json")
    for key in STATED_UNDER:
        details = stated.get(key)
        if isinstance(details, dict) and details:
            unnamed = "mlx" if "group_size" in details and "bits" in details else "of no name"
            return str(details.get("quant_method") or details.get("quant_library") or unnamed).lower(), details
    for file, method, part in _FILES_BESIDE:
        if (directory / file).is_file():
            content = read_json(directory / file)
            return method, content if part is None else content[part] if isinstance(content.get(part), dict) else {}
    return None


def _groups(details: Details, key: str = "group_size") -> tuple[tuple[int, int], ...]:
    """Blocks of one row; one group a row (-1 or none) goes without saying."""
    size = int(details.get(key) or -1)
    return ((1, size),) if size > 0 else ()


def _block(stated: Any) -> tuple[int, int]:
    rows, columns = map(int, stated)
    if min(rows, columns) < 1:
        raise ValueError("a block is empty")
    return rows, columns


def _fp8(details: Details) -> Quantization:
    block = details.get("weight_block_size")
    return Quantization("fp8", () if block is None else (_block(block),))


def _modelopt(details: Details) -> Quantization:
    algorithm = details.get("quant_algo")
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise _Unread(f"modelopt's {algorithm}")
    return Quantization("modelopt")


def _compressed(details: Details) -> Quantization:
    groups = (details.get("config_groups") or {}).values()
    formats = [details.get("format"), *(group.get("format") for group in groups)]
    formats.append((details.get("sparsity_config") or {}).get("format"))
    for unread in (each for each in formats if each and each not in _COMPRESSED_FORMATS):
        raise _Unread(f"compressed-tensors' {unread}")
    if (details.get("transform_config") or {}).get("config_groups"):
        raise _Unread("compressed-tensors with a transform_config")  # activations would have to be turned too
    blocks: list[tuple[int, int]] = []
    bits: list[int] = []
    for group in groups:
        weights = group.get("weights") or {}
        bits.append(int(weights.get("num_bits") or 8))
        blocks += _groups(weights)
        if weights.get("block_structure"):
            blocks.append(_block(weights["block_structure"]))
    return Quantization("compressed-tensors", tuple(blocks), tuple(dict.fromkeys(bits)))


def _gptq(details: Details) -> Quantization:
    layout = details.get("checkpoint_format") or details.get("format") or "gptq"
    if details.get("is_marlin_format") or layout not in ("gptq", "gptq_v2"):
        raise _Unread(f"gptq's {'marlin' if details.get('is_marlin_format') else layout}")
    return Quantization("gptq", _groups(details), (2, 3, 4, 8), zero_offset=int(layout == "gptq"))


def _awq(details: Details) -> Quantization:
    version = str(details.get("version") or details.get("checkpoint_format") or "gemm").lower()
    bits = int(details.get("bits") or details.get("w_bit") or 4)
    if version != "gemm" or bits != 4:
        raise _Unread(f"awq's {version} with {bits} bits")
    return Quantization("awq", _groups(details) or _groups(details, "q_group_size"), (bits,))


def _auto_round(details: Details) -> Quantization:
    """AutoRound's own checkpoints, whose integers are packed as GPTQ or AWQ has them. Its early versions named the
    packing `backend`."""
    named = str(details.get("packing_format") or details.get("backend") or "auto_round:auto_gptq")
    packing = _AUTO_ROUND_PACKINGS.get(_AUTO_ROUND_KERNELS.sub("", named))
    if packing is None:
        raise _Unread(f"auto-round's {named} of {details.get('data_type', 'int')}")
    if details.get("rotation_config") or details.get("spinquant_config"):
        raise _Unread("auto-round with rotations")  # activations would have to be turned too
    method, zero_offset, possible = packing
    modules = [details, *({**details, **own} for own in (details.get("extra_config") or {}).values())]
    packed = [module for module in modules if int(module["bits"]) < 16]
    for module in packed:
        kind, bits, activations = module.get("data_type", "int"), int(module["bits"]), module.get("act_bits") or 16
        if kind != "int" or bits not in possible or int(activations) < 16:
            raise _Unread(f"auto-round's {named} of {kind} with {bits} bits, activations with {activations}")
    return Quantization(method, tuple(block for module in packed for block in _groups(module)), possible, zero_offset)


def _mlx(details: Details) -> Quantization:
    def read(stated: Details) -> Quantization:
        if stated.get("mode", "affine") != "affine":
            raise _Unread(f"mlx's {stated['mode']}")
        return Quantization("mlx", _groups(stated), (int(stated["bits"]),))

    own = {module: read({**details, **stated}) for module, stated in details.items() if isinstance(stated, dict)}
    return replace(read(details), own=own)


_METHODS: dict[str, Callable[[Details], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda details: Quantization("fbgemm_fp8"),
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": lambda details: Quantization("bitsandbytes"),
    "mlx": _mlx,
}
