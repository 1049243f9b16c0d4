"""A mixture of experts in one call: the record that `cpu_experts.cpp` reads."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import Activation
from tidar_core.kernels.cpu_pass import ACTIVATIONS
from tidar_core.kernels.experts import Routed

pointer, integer = ctypes.c_void_p, ctypes.c_int32


class _Mixture(ctypes.Structure):
    _fields_ = (
        ("x", pointer), ("experts", pointer), ("shares", pointer), ("gate_up", pointer), ("down", pointer),
        ("gate_up_bytes", ctypes.c_int64), ("down_bytes", ctypes.c_int64), ("out", pointer), ("rows", integer),
        ("hidden", integer), ("inner", integer), ("count", integer), ("chosen", integer), ("activation", integer),
        ("threads", integer),
    )  # fmt: skip


def bind_mix_experts(run: Any, inner: int) -> Callable[[Tensor, Routed, Tensor, Tensor, Activation], Tensor]:
    """`Ops.mix_experts` over packed weights. inner: the experts' intermediate size."""
    run.argtypes, run.restype = [ctypes.POINTER(_Mixture)], None

    def mix_experts(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, activation: Activation) -> Tensor:
        x, chosen, shares = x.contiguous(), routed.experts.contiguous(), routed.shares.contiguous()
        out = torch.empty_like(x)
        run(
            _Mixture(
                x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), gate_up.data_ptr(), down.data_ptr(),
                gate_up[0].nbytes, down[0].nbytes, out.data_ptr(), *x.shape, inner, len(gate_up), chosen.shape[1],
                ACTIVATIONS[activation], torch.get_num_threads(),
            )
        )  # fmt: skip
        return out

    return mix_experts
