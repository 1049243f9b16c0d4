"""GGUF files: the header as a `ModelConfig`, the tensors under transformers' names.

Only the header is parsed; tensors are memory-mapped and dequantized a few rows at a time, so that a large embedding
never stands in memory in fp32. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tidar_core.config import Architecture, ConfigError, ModelConfig

GgufValue = int | float | bool | str | tuple[float, ...]

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3
_CHUNK_WEIGHTS = 4 << 20

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file: shape in torch's order, ggml type number, first byte in the file."""

    shape: tuple[int, ...]
    type_number: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the file says about itself. Arrays of texts (the vocabulary, above all) are passed over."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values one after the other out of a buffer."""

    def __init__(self, buffer: mmap.mmap, position: int):
        self.buffer = buffer
        self.position = position

    def take(self, length: int) -> int:
        """Step over `length` bytes; where they start."""
        start, self.position = self.position, self.position + length
        if self.position > len(self.buffer):
            raise ValueError("it ends too early")
        return start

    def scalar(self, layout: str) -> int | float | bool:
        (value,) = struct.unpack_from(layout, self.buffer, self.take(struct.calcsize(layout)))
        return value

    def count(self, layout: str = "<Q") -> int:
        return int(self.scalar(layout))

    def string(self) -> str:
        length = self.count()
        start = self.take(length)
        return self.buffer[start : start + length].decode("utf-8", errors="replace")

    def array(self) -> tuple[float, ...] | None:
        """The numbers of an array; None for texts, which are stepped over."""
        kind, length = self.count("<I"), self.count()
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            start = self.take(length * struct.calcsize(layout))
            return struct.unpack_from(f"<{length}{layout[1]}", self.buffer, start)
        if kind != _STRING:
            raise ValueError(f"array of unknown type {kind}")
        for _ in range(length):
            self.take(self.count())
        return None

    def value(self) -> GgufValue | None:
        kind = self.count("<I")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"value of unknown type {kind}")


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor table of a GGUF file, version 2 or 3, little-endian. Raises ConfigError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse_header(path, buffer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file ({error}): download it again") from None


def _parse_header(path: Path, buffer: mmap.mmap) -> GgufHeader:
    if buffer[:4] != b"GGUF":
        raise ValueError("the first bytes are not GGUF")
    cursor = _Cursor(buffer, 4)
    version = cursor.count("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known, only 2 and 3 are")
    tensor_count, entry_count = cursor.count(), cursor.count()
    metadata: dict[str, GgufValue] = {}
    for _ in range(entry_count):
        key, value = cursor.string(), cursor.value()
        if value is not None:
            metadata[key] = value
    table: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(cursor.count() for _ in range(cursor.count("<I")))
        table[name] = GgufTensor(shape[::-1], cursor.count("<I"), cursor.count())
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(tensor.shape, tensor.type_number, data_start + tensor.start) for name, tensor in table.items()
    }
    return GgufHeader(path, metadata, tensors)


def config_from_gguf(header: GgufHeader) -> ModelConfig:
    """The model's shape out of metadata and tensor table. Raises ConfigError for what the decoder cannot run."""
    file, metadata, tensors = header.path.name, header.metadata, header.tensors
    stated = str(metadata.get("general.architecture", "none"))
    architecture = _ARCHITECTURES.get(stated)
    if architecture is None:
        raise ConfigError(f"{file}: architecture {stated!r} is not supported, only {', '.join(_ARCHITECTURES)}")

    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(key, default)
        if not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(f"{file}: metadata {key} is missing or not one number")
        return value

    def own(key: str, default: float | None = None) -> float:
        return number(f"{stated}.{key}", default)

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ConfigError(f"{file}: {what} is not supported")

    heads, hidden_size = int(own("attention.head_count")), int(own("embedding_length"))
    head_dim = int(own("attention.key_length", hidden_size // max(1, heads)))
    scaling = metadata.get(f"{stated}.rope.scaling.type", "none")
    require(metadata.get("general.type", "model") == "model", f"a file of type {metadata.get('general.type')!r}")
    require(number("split.count", 1) <= 1, "a model split into several files (merge them with gguf-split --merge)")
    require(scaling == "none", f"rope scaling {scaling!r}")
    require(own("rope.scaling.factor", 1) in (0, 1) and own("rope.scale_linear", 1) in (0, 1), "rope scaling 'linear'")
    require("rope_freqs.weight" not in tensors, "rope scaling by the tensor rope_freqs.weight")
    require(own("rope.dimension_count", head_dim) == head_dim, "rope on a part of each head")
    require(own("attention.value_length", head_dim) == head_dim, "another head size for values than for keys")
    require(own("attention.sliding_window", 0) == 0, "sliding window attention")
    require(own("expert_count", 0) == 0, "a mixture of experts")
    if len(tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()) != 2:
        raise ConfigError(f"{file}: tensor token_embd.weight is missing or no matrix")
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=int(own("feed_forward_length")),
        layers=int(own("block_count")),
        heads=heads,
        kv_heads=int(own("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=float(own("attention.layer_norm_rms_epsilon")),
        rope_theta=float(own("rope.freq_base", 10000.0)),
        max_positions=int(own("context_length")),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
        eos_ids=_eos_ids(metadata),
    )


def _eos_ids(metadata: dict[str, GgufValue]) -> tuple[int, ...]:
    """What ends an answer: end of text, end of turn, and padding where that is a control token.

    Qwen's chat files name the end of the turn as their eos and the end of the text, which the model's
    generation_config names too, as padding alone.
    """
    eos, eot, padding = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "padding"))
    types = metadata.get("tokenizer.ggml.token_type")
    ids = [each for each in (eos, eot) if isinstance(each, int)]
    if isinstance(padding, int) and isinstance(types, tuple) and types[padding : padding + 1] == (_CONTROL_TOKEN,):
        ids.append(padding)
    return tuple(dict.fromkeys(ids))


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor that transformers calls `name`."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


class GgufCheckpoint:
    """Tensors of a GGUF file under transformers' names and in its layout."""

    def __init__(self, header: GgufHeader, config: ModelConfig):
        self.header = header
        self.config = config
        self.bytes = np.memmap(header.path, mode="r", dtype=np.uint8)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor `name`, None where there is none."""
        tensor = self.header.tensors.get(gguf_name(name))
        return None if tensor is None else tensor.shape

    def copy_into(self, name: str, out: Tensor) -> None:
        """Dequantize the tensor `name` into `out` (its shape, any float dtype and device). Raises ConfigError."""
        raw, kind = self._rows(name)
        order = self._row_order(name, len(raw))
        rows = out.view(len(raw), -1)
        chunk = max(1, _CHUNK_WEIGHTS // rows.shape[1])
        for start in range(0, len(raw), chunk):
            part = np.array(raw[start : start + chunk] if order is None else raw[order[start : start + chunk]])
            try:
                values = dequantize(part, kind)
            except NotImplementedError:
                message = f"{self.header.path.name}: tensor {gguf_name(name)} is stored as {kind.name}, not supported"
                raise ConfigError(message) from None
            rows[start : start + chunk].copy_(torch.from_numpy(values))

    def _rows(self, name: str) -> tuple[np.ndarray, GGMLQuantizationType]:
        """The stored bytes of a tensor, [rows, bytes a row]; a vector has rows of one value."""
        tensor = self.header.tensors[gguf_name(name)]
        shape = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
        where = f"{self.header.path.name}: tensor {gguf_name(name)}"
        try:
            kind = GGMLQuantizationType(tensor.type_number)
        except ValueError:
            raise ConfigError(f"{where} has the unknown type {tensor.type_number}: update the package gguf") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ConfigError(f"{where} has rows of {shape[-1]} values, not a multiple of {kind.name}'s {block}")
        row_bytes = shape[-1] // block * block_bytes
        stored = self.bytes[tensor.start : tensor.start + prod(shape[:-1]) * row_bytes]
        if stored.size != prod(shape[:-1]) * row_bytes:
            raise ConfigError(f"{where} runs past the end of the file: download it again")
        return stored.reshape(-1, row_bytes), kind

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Stored row of each row that transformers has: llama's q and k lie with rotary pairs side by side."""
        if self.config.architecture != "llama" or ("q_proj" not in name and "k_proj" not in name):
            return None
        half = self.config.head_dim // 2
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)
