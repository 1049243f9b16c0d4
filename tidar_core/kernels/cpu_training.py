"""The row-wise operations that training runs on a CPU, with their gradients, bound to `cpu_training.cpp`. Values are
those of `convert/ops.py`, which is the oracle."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.config import Activation, ModelConfig
from tidar_core.kernels.cpu import inner_sizes
from tidar_core.kernels.cpu_build import LANES
from tidar_core.kernels.cpu_calls import ACTIVATIONS, SUFFIXES, address, bound

pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True, slots=True)
class RowOps:
    """RMSNorm of rows [rows, width] and activation(gate) * up of gate_up [rows, 2 * width], with their gradients.

    norm(total, weight, eps). norm_slope(total, weight, eps, d_normed, d_total): the gradient with respect to `total`,
    of which d_total reaches it from elsewhere. gate(gate_up, activation). gate_slope(gate_up, d_gated, activation).
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    norm_slope: Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
    gate: Callable[[Tensor, Activation], Tensor]
    gate_slope: Callable[[Tensor, Tensor, Activation], Tensor]


def supports_rows(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `row_ops` fits a model's sizes."""
    sizes = (config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim)
    return dtype in SUFFIXES and all(size % LANES == 0 for size in (*sizes, *inner_sizes(config)))


def row_ops(library: ctypes.CDLL, dtype: torch.dtype) -> RowOps:
    """In bf16 or fp32, for rows and weights of that dtype alone."""
    suffix = SUFFIXES[dtype]
    run_norm = bound(library, f"add_norm_{suffix}", *[pointer] * 4, integer, integer, real, integer, integer)
    run_norm_slope = bound(library, f"norm_slope_{suffix}", *[pointer] * 5, integer, integer, real, integer)
    run_gate = bound(library, f"gate_{suffix}", *[pointer] * 2, *[integer] * 4)
    run_gate_slope = bound(library, f"gate_slope_{suffix}", *[pointer] * 3, *[integer] * 4)

    def norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
        total = rows_of(dtype, total)
        # The kernel keeps the sum where it is told to; here that is where it found it.
        out, at = torch.empty_like(total), total.data_ptr()
        run_norm(at, at, weight.data_ptr(), out.data_ptr(), *total.shape, eps, False, torch.get_num_threads())
        return out

    def norm_slope(total: Tensor, weight: Tensor, eps: float, d_normed: Tensor, d_total: Tensor | None) -> Tensor:
        total, d_normed = rows_of(dtype, total), rows_of(dtype, d_normed)
        d_total = None if d_total is None else rows_of(dtype, d_total)
        out = torch.empty_like(total)
        run_norm_slope(
            total.data_ptr(), weight.data_ptr(), d_normed.data_ptr(), address(d_total), out.data_ptr(), *total.shape,
            eps, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gate(gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up, rows, width = rows_of(dtype, gate_up), gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        code = ACTIVATIONS[activation]
        run_gate(gate_up.data_ptr(), out.data_ptr(), rows, width, code, torch.get_num_threads())
        return out

    def gate_slope(gate_up: Tensor, d_gated: Tensor, activation: Activation) -> Tensor:
        gate_up, d_gated, code = rows_of(dtype, gate_up), rows_of(dtype, d_gated), ACTIVATIONS[activation]
        out = torch.empty_like(gate_up)
        run_gate_slope(
            gate_up.data_ptr(), d_gated.data_ptr(), out.data_ptr(), *d_gated.shape, code, torch.get_num_threads()
        )
        return out

    return RowOps(norm, norm_slope, gate, gate_slope)


def rows_of(dtype: torch.dtype, x: Tensor) -> Tensor:
    """As the library reads rows, which is given an address alone."""
    if x.dtype is not dtype:
        raise TypeError(f"rows of {x.dtype} for kernels of {dtype}")
    return x.contiguous()
