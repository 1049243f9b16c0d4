"""All layers of a model in one call: the records that `cpu_pass.cpp` reads."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.kernels.cpu_calls import ACTIVATIONS, address
from tidar_core.kernels.ops import KVCache, Layers, Rotary, StepRows, layer_windows
from tidar_core.model.decoder import BASE_ALONE
from tidar_core.model.weights import (
    AdapterWeights,
    LayerAdapter,
    LayerWeights,
    LowRank,
    ModelWeights,
    has_experts,
    norms_before,
)

pointer, integer = ctypes.c_void_p, ctypes.c_int32


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", pointer), ("bias", pointer), ("a", pointer), ("b", pointer),
        ("outs", integer), ("ins", integer), ("rank", integer),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", pointer), ("post_norm", pointer), ("q_norm", pointer), ("k_norm", pointer),
        ("cos", pointer), ("sin", pointer),
        ("qkv", _Matrix), ("o", _Matrix), ("gate_up", _Matrix), ("down", _Matrix), ("window", integer),
    )  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)), ("final_norm", pointer), ("keys", pointer), ("values", pointer),
        ("positions", pointer), ("sequence", pointer), ("context_end", pointer), ("tail_start", pointer),
        ("tail_end", pointer), ("page_table", pointer), ("write_slots", pointer), ("layer_keys", ctypes.c_int64),
        ("count", integer), ("rows", integer), ("verify", integer), ("heads", integer), ("kv_heads", integer),
        ("head_dim", integer), ("table_width", integer), ("activation", integer), ("threads", integer),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float),
    )  # fmt: skip


def bind_layers(
    run: Any, config: ModelConfig, weights: ModelWeights, adapter: AdapterWeights | None, rotary: Rotary
) -> Layers | None:
    """The layers of packed weights as one call of `run`; None where the adapter's rank could not be packed, where mask
    rows have attention of their own, where there are experts, and where norms stand elsewhere than in Llama."""
    run.argtypes, run.restype = [ctypes.POINTER(_Pass), pointer], None
    extras = (BASE_ALONE,) * config.layers if adapter is None else adapter.layers
    own_attention = adapter is not None and adapter.attention is not None
    if (
        has_experts(weights, extras)
        or own_attention
        or norms_before(weights) is None
        or not all(_packed(extra) for extra in extras)
    ):
        return None
    pairs = zip(weights.layers, extras, strict=True)
    windows = layer_windows(config) or (0,) * config.layers
    layers = (_Layer * config.layers)(
        *(_layer(config, layer, extra, rotary.of(index), windows[index]) for index, (layer, extra) in enumerate(pairs))
    )
    held = (weights, adapter, rotary)  # the records have addresses alone

    def run_layers(x: Tensor, rows: StepRows, cache: KVCache) -> Tensor:
        x = x.contiguous()
        made = _Pass(
            layers, held[0].final_norm.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(),
            rows.positions.data_ptr(), rows.sequence.data_ptr(), rows.context_end.data_ptr(),
            rows.tail_start.data_ptr(), rows.tail_end.data_ptr(), rows.page_table.data_ptr(),
            rows.write_slots.data_ptr(), cache.keys[0].numel(), config.layers, x.shape[0], rows.verify,
            config.heads, config.kv_heads, config.head_dim, rows.page_table.shape[1], ACTIVATIONS[config.activation],
            torch.get_num_threads(), config.norm_eps, config.head_dim**-0.5,
        )  # fmt: skip
        run(made, x.data_ptr())
        return x

    return run_layers


def _packed(extra: LayerAdapter) -> bool:
    matrices = [m for low_rank in _low_ranks(extra) if low_rank is not None for m in (low_rank.a, low_rank.b)]
    return all(matrix.dim() == 4 for matrix in matrices)


def _low_ranks(extra: LayerAdapter) -> tuple[LowRank | None, ...]:
    return extra.qkv, extra.o, extra.gate_up, extra.down


def _layer(config: ModelConfig, layer: LayerWeights, extra: LayerAdapter, rotary: Rotary, window: int) -> _Layer:
    mixed = config.heads * config.head_dim
    fused = mixed + 2 * config.kv_heads * config.head_dim
    shapes = (
        (layer.qkv, layer.qkv_bias, fused, config.hidden_size),
        (layer.o, layer.o_bias, config.hidden_size, mixed),
        (layer.gate_up, layer.gate_up_bias, 2 * config.intermediate_size, config.hidden_size),
        (layer.down, layer.down_bias, config.hidden_size, config.intermediate_size),
    )
    matrices = (_matrix(*shape, low_rank) for shape, low_rank in zip(shapes, _low_ranks(extra), strict=True))
    vectors = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm, rotary.cos, rotary.sin)
    return _Layer(*map(address, vectors), *matrices, window)


def _matrix(weight: Tensor, bias: Tensor | None, outs: int, ins: int, low_rank: LowRank | None) -> _Matrix:
    a, b = (None, None) if low_rank is None else (low_rank.a, low_rank.b)
    rank = 0 if a is None else a.shape[0] * a.shape[2]
    return _Matrix(weight.data_ptr(), address(bias), address(a), address(b), outs, ins, rank)
