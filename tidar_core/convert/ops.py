"""The decoder's operations for training: the reference's values, with gradients written out.

Only the adapter learns, so the base's weights get no gradient, and what autograd would keep or compute for them is
left out. `rotate_and_store` and `attend` are absent: the trainer has its own attention (`attention.py`, `flex.py`,
`fused.py`, `cpu_blocks.py`), without pages.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Activation
from tidar_core.kernels.cpu_training import RowOps
from tidar_core.kernels.experts import mix_by_turns
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class _Linear(torch.autograd.Function):
    """x weightᵀ + bias + (x aᵀ) bᵀ with gradients for x, a and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        narrow = F.linear(x, a)
        ctx.save_for_backward(x, weight, a, b, narrow)
        return F.linear(x, weight, bias).addmm_(narrow, b.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, narrow = ctx.saved_tensors
        d_narrow = dy @ b
        return (dy @ weight).addmm_(d_narrow, a), None, None, d_narrow.t() @ x, dy.t() @ narrow


def _norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    unit, _ = _unit(total, eps)
    return weight * unit.to(total.dtype)


def _norm_slope(total: Tensor, weight: Tensor, eps: float, d_normed: Tensor, d_total: Tensor | None) -> Tensor:
    unit, inverse = _unit(total, eps)
    slope = (d_normed * weight).float()
    along = (slope * unit).mean(-1, keepdim=True)
    slope.sub_(unit.mul_(along)).mul_(inverse)
    return (slope if d_total is None else slope.add_(d_total)).to(total.dtype)


def _unit(total: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = total.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _gate(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate).mul_(up)


def _gate_slope(gate_up: Tensor, d_gated: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    d_gate, d_up = out.chunk(2, dim=-1)
    torch.mul(d_gated, _ACTIVATIONS[activation](gate), out=d_up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(d_gated * up, gate, grad_input=d_gate)
    else:
        torch.ops.aten.gelu_backward.grad_input(d_gated * up, gate, approximate="tanh", grad_input=d_gate)
    return out


PLAIN_ROWS = RowOps(_norm, _norm_slope, _gate, _gate_slope)


class _AddNorm(torch.autograd.Function):
    """RMSNorm of residual + x, and the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: RowOps
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total = x.clone() if residual is None else residual + x
        ctx.save_for_backward(total, weight)
        ctx.rows, ctx.eps, ctx.has_residual = rows, eps, residual is not None
        return rows.norm(total, weight, eps), total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_normed: Tensor | None, d_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        out = d_total if d_normed is None else ctx.rows.norm_slope(total, weight, ctx.eps, d_normed, d_total)
        return out, out if ctx.has_residual else None, None, None, None


class _Gate(torch.autograd.Function):
    """activation(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation, rows: RowOps) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.rows = activation, rows
        return rows.gate(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return ctx.rows.gate_slope(gate_up, dy, ctx.activation), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
    """As in `Ops`; with an adapter, all rows must be mask rows."""
    if low_rank is None:
        return F.linear(x, weight, bias)
    if first_mask_row:
        raise ValueError("the trainer's adapter runs on mask rows alone")
    return _Linear.apply(x, weight, bias, low_rank.a, low_rank.b)


def add_norm(rows: RowOps, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _AddNorm.apply(x, residual, weight, eps, rows)


def gate(rows: RowOps, gate_up: Tensor, activation: Activation) -> Tensor:
    return _Gate.apply(gate_up, activation, rows)


def _not_here(*arguments: Any) -> Tensor:
    raise NotImplementedError("the trainer has an attention of its own and no pages")


def training_ops(device: torch.device, report: Callable[[str], None], rows: RowOps = PLAIN_ROWS) -> Ops:
    """The operations that mask rows are trained with; on a GPU the elementwise ones are compiled, elsewhere they are
    `rows`."""
    norm: Callable[..., tuple[Tensor, Tensor]] = partial(add_norm, rows)
    gated: Callable[..., Tensor] = partial(gate, rows)
    if device.type == "cuda":
        norm = compiled(REFERENCE_OPS.add_norm, report)
        gated = compiled(REFERENCE_OPS.gate, report)
    return replace(
        REFERENCE_OPS, name="training", linear=linear, add_norm=norm, gate=gated,
        rotate_and_store=_not_here, attend=_not_here, mix_experts=mix_by_turns(F.linear, gated, 1),
    )  # fmt: skip


def compiled(function: Callable[..., Any], report: Callable[[str], None]) -> Callable[..., Any]:
    """torch.compile of `function`; where the compiler fails here, one line to `report` and the function as it is."""
    chosen: list[Callable[..., Any]] = [torch.compile(function, dynamic=True)]

    def run(*arguments: Any) -> Any:
        try:
            return chosen[0](*arguments)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the one passes with fewer rows, with the other nothing goes on
        except Exception as error:  # a missing or broken compiler shows itself in many ways
            if chosen[0] is function:
                raise
            chosen[0] = function
            report(f"running without torch.compile, which is slower: {type(error).__name__}")
            return function(*arguments)

    return run
