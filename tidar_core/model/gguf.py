"""GGUF files: the header as a `ModelConfig`, the tensors under transformers' names.

Only the header is parsed; tensors are memory-mapped and dequantized a few rows at a time, so that a large embedding
never stands in memory in fp32. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from math import isfinite, log, prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tidar_core.config import Architecture, ConfigError, Experts, ModelConfig, RopeScaling
from tidar_core.model.gguf_names import SHARED_GATE, gguf_name, name_of_one_expert
from tidar_core.model.mixtures import check_experts
from tidar_core.model.rope import read_scaling, scaled_positions

GgufValue = int | float | bool | str | tuple[float, ...]

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "olmoe": "olmoe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3
_ROPE_DIVISORS = "rope_freqs.weight"
_CHUNK_WEIGHTS = 1 << 19  # so few that numpy's intermediate results stay in the processor's cache


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
        size_of, position = struct.Struct("<Q").unpack_from, self.position
        for _ in range(length):  # a hundred thousand of them, at every start
            position += 8 + size_of(self.buffer, position)[0]
        self.take(position - self.position)
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
    except (OSError, ValueError, OverflowError, struct.error) as error:
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

    def own(key: str, default: float | None = None) -> float:
        return _number(header, f"{stated}.{key}", default)

    def require(condition: bool, what: str) -> None:
        _require(header, condition, what)

    heads, hidden_size = int(own("attention.head_count")), int(own("embedding_length"))
    head_dim = int(own("attention.key_length", hidden_size // max(1, heads)))
    context_length = int(own("context_length"))
    require(metadata.get("general.type", "model") == "model", f"a file of type {metadata.get('general.type')!r}")
    require(_number(header, "split.count", 1) <= 1, "a model split into several files (gguf-split --merge joins them)")
    require(own("rope.dimension_count", head_dim) == head_dim, "rope on a part of each head")
    require(own("attention.value_length", head_dim) == head_dim, "another head size for values than for keys")
    require(own("attention.sliding_window", 0) == 0, "sliding window attention")
    require(not any(name.endswith(".scale") for name in tensors), "a matrix with a scale beside it (NVFP4)")
    if len(tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()) != 2:
        raise ConfigError(f"{file}: tensor token_embd.weight is missing or no matrix")
    scaling = _rope_scaling(header, stated, context_length, head_dim)
    layers, intermediate_size = int(own("block_count")), int(own("feed_forward_length"))
    if architecture == "llama" and own("expert_count", 0) > 0:
        architecture = "mixtral"
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
        kv_heads=int(own("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=float(own("attention.layer_norm_rms_epsilon")),
        rope_theta=float(own("rope.freq_base", 10000.0)),
        max_positions=scaled_positions(context_length, scaling),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        eos_ids=_eos_ids(metadata),
        rope_scaling=scaling,
        wide_qk_norm=architecture == "olmoe",
        experts=_experts(header, stated, architecture, layers, intermediate_size),
    )


def _experts(
    header: GgufHeader, stated: str, architecture: Architecture, layers: int, intermediate_size: int
) -> Experts | None:
    """The experts as llama.cpp has them: in all layers, and renormalised by the architecture, which no key says."""
    if architecture not in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        return None
    count, chosen = (int(_number(header, f"{stated}.{key}")) for key in ("expert_count", "expert_used_count"))
    inner, shared = intermediate_size, 0
    if architecture in ("qwen2_moe", "qwen3_moe"):  # the first files of Qwen's leave both sizes to be known
        inner = int(_number(header, f"{stated}.expert_feed_forward_length", 0)) or intermediate_size // max(1, chosen)
    if architecture == "qwen2_moe":
        shared = int(_number(header, f"{stated}.expert_shared_feed_forward_length", 0)) or intermediate_size
    experts = Experts(
        count, chosen, inner,
        tuple(range(min(layers, len(header.tensors)))),  # a broken header may state billions
        renormalised=architecture in ("mixtral", "qwen3_moe"), shared_inner=shared, shared_gated=shared > 0,
    )  # fmt: skip
    check_experts(experts, header.path.name)
    return experts


def _number(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.metadata.get(key, default)
    if not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(f"{header.path.name}: metadata {key} is missing or not one number")
    return value


def _require(header: GgufHeader, condition: bool, what: str) -> None:
    if not condition:
        raise ConfigError(f"{header.path.name}: {what} is not supported")


def _rope_scaling(header: GgufHeader, architecture: str, context_length: int, head_dim: int) -> RopeScaling | None:
    """Rope scaling with the meaning that llama.cpp and its converter give to the keys and to rope_freqs.weight.

    No type is linear, no factor or 0 is 1. yarn_attn_factor is transformers' attention_factor; attn_factor comes on
    top of it, or of yarn's own factor.
    """
    prefix = f"{architecture}.rope.scaling."
    kind = header.metadata.get(f"{prefix}type", "linear")
    older_factor = _number(header, f"{architecture}.rope.scale_linear", 0)
    factor = (_number(header, f"{prefix}factor", older_factor) or 1.0) if kind != "none" else 1.0
    on_top = _number(header, f"{prefix}attn_factor", 1)
    unscaled = kind == "none" or (kind == "linear" and factor == 1)
    for length in ("long", "short"):
        _require(header, f"rope_factors_{length}.weight" not in header.tensors, "rope scaling 'longrope'")
    _require(header, kind != "longrope", "rope scaling 'longrope'")
    if kind == "yarn":
        for key, unused in (("yarn_ext_factor", (-1, 1)), ("yarn_log_multiplier", (0,))):
            _require(header, _number(header, prefix + key, unused[-1]) in unused, f"rope scaling 'yarn' with {key}")
    _require(header, on_top == 1 or (kind == "yarn" and on_top > 0), f"rope scaling {kind!r} with attn_factor {on_top}")
    if _ROPE_DIVISORS in header.tensors:
        _require(header, unscaled, f"rope scaling {kind!r} together with {_ROPE_DIVISORS}")
        return RopeScaling("divisors", divisors=_rope_divisors(header, head_dim))
    if unscaled:
        return None
    stated = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": header.metadata.get(f"{prefix}original_context_length", context_length),
        "attention_factor": header.metadata.get(f"{prefix}yarn_attn_factor"),
        "beta_fast": header.metadata.get(f"{prefix}yarn_beta_fast"),
        "beta_slow": header.metadata.get(f"{prefix}yarn_beta_slow"),
    }
    scaling = read_scaling(stated, context_length, header.path.name)
    if scaling is None or on_top == 1:
        return scaling
    yarns_own = 0.1 * log(max(1.0, scaling.factor)) + 1.0
    return replace(scaling, attention_factor=on_top * (scaling.attention_factor or yarns_own))


def _rope_divisors(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    """What each rotary frequency is divided by, [head_dim / 2]."""
    raw, kind = _stored_rows(header, np.memmap(header.path, mode="r", dtype=np.uint8), _ROPE_DIVISORS)
    divisors = tuple(_dequantized(header, raw, kind, _ROPE_DIVISORS).flatten().tolist())
    if len(divisors) != head_dim // 2 or not all(isfinite(each) and each > 0 for each in divisors):
        raise ConfigError(f"{header.path.name}: tensor {_ROPE_DIVISORS} is not {head_dim // 2} positive numbers")
    return divisors


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


def _stored_rows(header: GgufHeader, stored: np.ndarray, name: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """The bytes of the file's tensor `name`, [rows, bytes a row]; a vector has rows of one value."""
    tensor = header.tensors[name]
    shape = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
    where = f"{header.path.name}: tensor {name}"
    try:
        kind = GGMLQuantizationType(tensor.type_number)
    except ValueError:
        raise ConfigError(f"{where} has the unknown type {tensor.type_number}: update the package gguf") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ConfigError(f"{where} has rows of {shape[-1]} values, not a multiple of {kind.name}'s {block}")
    row_bytes = shape[-1] // block * block_bytes
    found = stored[tensor.start : tensor.start + prod(shape[:-1]) * row_bytes]
    if found.size != prod(shape[:-1]) * row_bytes:
        raise ConfigError(f"{where} runs past the end of the file: download it again")
    return found.reshape(-1, row_bytes), kind


def _dequantized(header: GgufHeader, rows: np.ndarray, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    try:
        # As one row: of many, gguf takes 16 at a time, in steps so short that threads wait for each other between them.
        return dequantize(rows.reshape(1, -1), kind).reshape(len(rows), -1)
    except NotImplementedError:
        message = f"{header.path.name}: tensor {name} is stored as {kind.name}, not supported"
        raise ConfigError(message) from None


class GgufCheckpoint:
    """Tensors of a GGUF file under transformers' names and in its layout, dequantized by the `workers` threads of
    `pool`."""

    def __init__(self, header: GgufHeader, config: ModelConfig, pool: Executor, workers: int):
        self.header = header
        self.config = config
        self.pool = pool
        self.workers = workers
        self.bytes = np.memmap(header.path, mode="r", dtype=np.uint8)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor `name`, None where there is none. One of an expert has the shape of all experts' where
        these are not as many as the header says."""
        stored, expert = self._find(name)
        tensor = self.header.tensors.get(stored)
        if tensor is None:
            return None
        experts = self.config.experts
        if expert is not None and experts is not None:
            return tensor.shape[1:] if tensor.shape[:1] == (experts.count,) else tensor.shape
        if SHARED_GATE in stored:  # which some files have as a vector
            return (1, *tensor.shape)[-2:]
        return tensor.shape

    def copy_into(self, name: str, out: Tensor) -> None:
        """Dequantize the tensor `name` into `out` (its shape, any float dtype and device). Raises ConfigError."""
        stored, expert = self._find(name)
        raw, kind = _stored_rows(self.header, self.bytes, stored)
        if expert is not None:
            raw = raw.reshape(self.header.tensors[stored].shape[0], -1, raw.shape[1])[expert]
        order = self._row_order(name, len(raw))
        rows = out.view(len(raw), -1)
        chunk = max(1, _CHUNK_WEIGHTS // rows.shape[1])

        def part(start: int) -> np.ndarray:
            lying = raw[start : start + chunk] if order is None else raw[order[start : start + chunk]]
            return _dequantized(self.header, np.array(lying), kind, stored)

        def copy_first() -> None:
            start, found = waiting.popleft()
            rows[start : start + chunk].copy_(torch.from_numpy(found.result()))

        waiting: deque[tuple[int, Future[np.ndarray]]] = deque()
        for start in range(0, len(raw), chunk):
            if len(waiting) == self.workers:  # no more of them are in memory at a time
                copy_first()
            waiting.append((start, self.pool.submit(part, start)))
        while waiting:
            copy_first()

    def _find(self, name: str) -> tuple[str, int | None]:
        """The file's tensor that is or holds the tensor `name`, and which expert's part of it that is."""
        stored, expert = gguf_name(name, self.config)
        if expert is None or stored in self.header.tensors:
            return stored, expert
        return name_of_one_expert(stored, expert), None

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Stored row of each row that transformers has: llama's q and k lie with rotary pairs side by side."""
        if self.config.architecture not in ("llama", "mixtral") or ("q_proj" not in name and "k_proj" not in name):
            return None
        half = self.config.head_dim // 2
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)
