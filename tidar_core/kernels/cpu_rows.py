"""What the CPU does to rows beside the products: norm, positions and pages, attention, and the MLP's gate."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.config import Activation
from tidar_core.kernels.cpu_calls import ACTIVATIONS, Suffix, address, bound
from tidar_core.kernels.ops import KVCache, QKNorm, Rotary, StepRows


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The `Ops` of the same names, in the dtype that they were bound for."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[[Tensor, StepRows, Rotary, KVCache, int, QKNorm | None], Tensor]
    attend: Callable[[Tensor, StepRows, KVCache, int], Tensor]
    gate: Callable[[Tensor, Activation], Tensor]


def bind_rows(library: ctypes.CDLL, suffix: Suffix) -> RowKernels:
    """The kernels of a compiled library for one dtype."""
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float

    row_shape = [integer] * 5
    run_norm = bound(library, f"add_norm_{suffix}", *[pointer] * 4, integer, integer, real, integer, integer)
    run_gate = bound(library, f"gate_{suffix}", pointer, pointer, integer, integer, integer, integer)
    run_rotate = bound(
        library, f"rotate_and_store_{suffix}", pointer, *row_shape, *[pointer] * 5, real, *[pointer] * 3, integer
    )
    run_attend = bound(
        library, f"attend_{suffix}", pointer, *row_shape, *[pointer] * 6, integer, integer, pointer, pointer, real,
        pointer, integer,
    )  # fmt: skip

    def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x) if residual is None else residual
        out = torch.empty_like(x)
        rows, width = x.shape
        threads = torch.get_num_threads()
        run_norm(
            x.data_ptr(), total.data_ptr(), weight.data_ptr(), out.data_ptr(),
            rows, width, eps, residual is not None, threads,
        )  # fmt: skip
        return out, total

    def rotate_and_store(
        qkv: Tensor, rows: StepRows, rotary: Rotary, cache: KVCache, layer: int, qk_norm: QKNorm | None
    ) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _, kv_heads, head_dim, _ = keys.shape
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q_norm, k_norm, eps = (qk_norm.q, qk_norm.k, qk_norm.eps) if qk_norm is not None else (None, None, 0.0)
        run_rotate(
            qkv.data_ptr(), qkv.shape[0], heads, kv_heads, head_dim, rows.verify, rows.positions.data_ptr(),
            rotary.cos.data_ptr(), rotary.sin.data_ptr(), address(q_norm), address(k_norm), eps,
            keys.data_ptr(), values.data_ptr(), rows.write_slots.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return qkv

    def attend(qkv: Tensor, rows: StepRows, cache: KVCache, layer: int) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _, kv_heads, head_dim, _ = keys.shape
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        out = qkv.new_empty(qkv.shape[0], heads * head_dim)
        run_attend(
            qkv.data_ptr(), qkv.shape[0], heads, kv_heads, head_dim, rows.verify, rows.positions.data_ptr(),
            rows.sequence.data_ptr(), rows.context_end.data_ptr(), rows.tail_start.data_ptr(),
            rows.tail_end.data_ptr(), rows.page_table.data_ptr(), rows.page_table.shape[1], cache.window(layer),
            keys.data_ptr(), values.data_ptr(), head_dim**-0.5, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gate(gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        run_gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, ACTIVATIONS[activation], torch.get_num_threads())
        return out

    return RowKernels(add_norm, rotate_and_store, attend, gate)
