"""What training runs on a CPU beside its products, bound to `cpu_training.cpp`: the row-wise operations with their
gradients, and of mask rows' attention all but the products with clean keys and values.

Attention goes chunk by chunk: some neighbouring blocks, whose matrices are [kv_heads, queries, block + keys], fp32. The
queries of a slot's group of heads lie beside each other; the first `block` columns are for the slots of a row's own
block. Values are those of `convert/attention.py`, which is the oracle.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.config import Activation, ModelConfig
from tidar_core.kernels.cpu import SUFFIXES, bound, inner_sizes
from tidar_core.kernels.cpu_build import LANES
from tidar_core.kernels.cpu_pass import ACTIVATIONS, address
from tidar_core.kernels.ops import Rotary

pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class MaskHeads(ctypes.Structure):
    """The sizes of mask rows' attention: rows, heads, kv_heads, head_dim, block."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "head_dim", "block"))


@dataclass(frozen=True, slots=True)
class MaskChunk:
    """Blocks first … first + count - 1, beside `keys` clean rows of their document."""

    first: int
    count: int
    keys: int


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


@dataclass(frozen=True, slots=True)
class MaskOps:
    """The parts of mask rows' attention, fp32.

    lay(qkv, turning, heads): q [kv_heads, rows * groups, head_dim], rotated and scaled, k rotated and v
    [kv_heads, rows, head_dim]; turning has the tables of the rows' positions.
    shares(scores, q, k, begins, ends, causal, heads, chunk): scores of clean keys become shares of all that a row sees,
    in place: of the clean rows those from begins[row] (int32; None for 0) to ends[block] (int32).
    add_own(mixed, shares, v, out, heads, chunk): out [rows, heads * head_dim] of what clean values came to, `mixed`,
    and the own block.
    score_slopes(d_shares, shares, d_out, v, heads, chunk): the gradient of shares, known for clean columns, becomes
    that of scores, in place; d_out is laid as q.
    head_slopes(d_queries, d_scores, shares, d_out, q, k, turning, d_qkv, heads, chunk): fills the chunk's rows of
    d_qkv, from what the clean keys gave its queries and from the own block.
    """

    lay: Callable[[Tensor, Rotary, MaskHeads], tuple[Tensor, Tensor, Tensor]]
    shares: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, bool, MaskHeads, MaskChunk], None]
    add_own: Callable[[Tensor, Tensor, Tensor, Tensor, MaskHeads, MaskChunk], None]
    score_slopes: Callable[[Tensor, Tensor, Tensor, Tensor, MaskHeads, MaskChunk], None]
    head_slopes: Callable[..., None]


def supports_rows(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `row_ops` fits a model's sizes."""
    sizes = (config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim)
    return dtype in SUFFIXES and all(size % LANES == 0 for size in (*sizes, *inner_sizes(config)))


def supports_masks(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `mask_ops` fits a model's heads."""
    return dtype is torch.float32 and config.head_dim % LANES == 0


def row_ops(library: ctypes.CDLL, dtype: torch.dtype) -> RowOps:
    """In bf16 or fp32, for rows and weights of that dtype alone."""
    suffix = SUFFIXES[dtype]
    run_norm = bound(library, f"add_norm_{suffix}", *[pointer] * 4, integer, integer, real, integer, integer)
    run_norm_slope = bound(library, f"norm_slope_{suffix}", *[pointer] * 5, integer, integer, real, integer)
    run_gate = bound(library, f"gate_{suffix}", *[pointer] * 2, *[integer] * 4)
    run_gate_slope = bound(library, f"gate_slope_{suffix}", *[pointer] * 3, *[integer] * 4)

    def norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
        total = _rows_of(dtype, total)
        # The kernel keeps the sum where it is told to; here that is where it found it.
        out, at = torch.empty_like(total), total.data_ptr()
        run_norm(at, at, weight.data_ptr(), out.data_ptr(), *total.shape, eps, False, torch.get_num_threads())
        return out

    def norm_slope(total: Tensor, weight: Tensor, eps: float, d_normed: Tensor, d_total: Tensor | None) -> Tensor:
        total, d_normed = _rows_of(dtype, total), _rows_of(dtype, d_normed)
        d_total = None if d_total is None else _rows_of(dtype, d_total)
        out = torch.empty_like(total)
        run_norm_slope(
            total.data_ptr(), weight.data_ptr(), d_normed.data_ptr(), address(d_total), out.data_ptr(), *total.shape,
            eps, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gate(gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up, rows, width = _rows_of(dtype, gate_up), gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        code = ACTIVATIONS[activation]
        run_gate(gate_up.data_ptr(), out.data_ptr(), rows, width, code, torch.get_num_threads())
        return out

    def gate_slope(gate_up: Tensor, d_gated: Tensor, activation: Activation) -> Tensor:
        gate_up, d_gated, code = _rows_of(dtype, gate_up), _rows_of(dtype, d_gated), ACTIVATIONS[activation]
        out = torch.empty_like(gate_up)
        run_gate_slope(
            gate_up.data_ptr(), d_gated.data_ptr(), out.data_ptr(), *d_gated.shape, code, torch.get_num_threads()
        )
        return out

    return RowOps(norm, norm_slope, gate, gate_slope)


def mask_ops(library: ctypes.CDLL) -> MaskOps:
    chunk_types = [MaskHeads, *[integer] * 3]
    run_lay = bound(library, "mask_lay", pointer, MaskHeads, *[pointer] * 2, real, *[pointer] * 3, integer)
    run_shares = bound(library, "mask_shares", *[pointer] * 3, *chunk_types, *[pointer] * 2, integer, integer)
    run_add_own = bound(library, "mask_add_own", *[pointer] * 3, *chunk_types, pointer, integer)
    run_score_slopes = bound(library, "mask_score_slopes", *[pointer] * 4, *chunk_types, integer)
    run_head_slopes = bound(
        library, "mask_head_slopes", *[pointer] * 6, *chunk_types, *[pointer] * 2, real, pointer, integer
    )

    def lay(qkv: Tensor, turning: Rotary, heads: MaskHeads) -> tuple[Tensor, Tensor, Tensor]:
        qkv, rows, size = _rows_of(torch.float32, qkv), heads.rows, heads.head_dim
        q = qkv.new_empty(heads.kv_heads, rows * (heads.heads // heads.kv_heads), size)
        k, v = qkv.new_empty(2, heads.kv_heads, rows, size)
        run_lay(
            qkv.data_ptr(), heads, turning.cos.data_ptr(), turning.sin.data_ptr(), size**-0.5,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return q, k, v

    def shares(
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        begins: Tensor | None,
        ends: Tensor,
        causal: bool,
        heads: MaskHeads,
        chunk: MaskChunk,
    ) -> None:
        run_shares(
            scores.data_ptr(), q.data_ptr(), k.data_ptr(), heads, *_sizes(heads, chunk),
            address(begins), ends.data_ptr(), causal, torch.get_num_threads(),
        )  # fmt: skip

    def add_own(mixed: Tensor, shares: Tensor, v: Tensor, out: Tensor, heads: MaskHeads, chunk: MaskChunk) -> None:
        run_add_own(
            mixed.data_ptr(), shares.data_ptr(), v.data_ptr(), heads, *_sizes(heads, chunk),
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def score_slopes(
        d_shares: Tensor, shares: Tensor, d_out: Tensor, v: Tensor, heads: MaskHeads, chunk: MaskChunk
    ) -> None:
        run_score_slopes(
            d_shares.data_ptr(), shares.data_ptr(), d_out.data_ptr(), v.data_ptr(), heads,
            *_sizes(heads, chunk), torch.get_num_threads(),
        )  # fmt: skip

    def head_slopes(
        d_queries: Tensor,
        d_scores: Tensor,
        shares: Tensor,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        turning: Rotary,
        d_qkv: Tensor,
        heads: MaskHeads,
        chunk: MaskChunk,
    ) -> None:
        given = (each.data_ptr() for each in (d_queries, d_scores, shares, d_out, q, k))
        run_head_slopes(
            *given, heads, *_sizes(heads, chunk), turning.cos.data_ptr(), turning.sin.data_ptr(),
            heads.head_dim**-0.5, d_qkv.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    return MaskOps(lay, shares, add_own, score_slopes, head_slopes)


def _rows_of(dtype: torch.dtype, x: Tensor) -> Tensor:
    """As the library reads rows, which is given an address alone."""
    if x.dtype is not dtype:
        raise TypeError(f"rows of {x.dtype} for kernels of {dtype}")
    return x.contiguous()


def _sizes(heads: MaskHeads, chunk: MaskChunk) -> tuple[int, int, int]:
    return chunk.first, chunk.count, heads.block + chunk.keys
