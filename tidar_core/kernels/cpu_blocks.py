"""Attention of blocks of neighbouring rows in training, with its gradient, on a CPU: bound to `cpu_blocks.cpp`.

A row sees rows of its document that were laid before, and those of its own block. A block's shares are
[kv_heads, queries, LANES + keys], fp32: a slot's group of heads beside each other, columns for the slots of the block,
then the document's rows that it sees, filled up to whole lanes. Values are those of `convert/attention.py`, which is
the oracle.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.kernels.cpu_build import LANES
from tidar_core.kernels.cpu_calls import address, bound
from tidar_core.kernels.cpu_training import integer, pointer, real, rows_of
from tidar_core.kernels.ops import Rotary

MOST_SLOTS = LANES
wide = ctypes.c_int64


class _Heads(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "head_dim"))


class _LaidRows(ctypes.Structure):
    _fields_ = (("rows", pointer), ("step", wide), ("across", pointer), ("wide", wide))


@dataclass(frozen=True, slots=True)
class SeenBlocks:
    """What blocks of rows see.

    table: int64 [blocks, 5], for each block its first row, its slots, its document's first row among those laid before,
    how many of these it sees, and where its shares begin. shares: the number of all shares. begins: int32 [rows], the
    first of the document's rows in reach, None where all are. causal: whether a row sees only itself and earlier rows
    of its block.
    """

    table: Tensor
    shares: int
    begins: Tensor | None
    causal: bool


def seen_blocks(
    config: ModelConfig,
    rows: np.ndarray,
    slots: np.ndarray,
    firsts: np.ndarray,
    seen: np.ndarray,
    *,
    causal: bool,
) -> SeenBlocks:
    """What blocks see with all their documents in reach, of each ([blocks]) what `SeenBlocks.table` says. Raises
    ValueError where a block has too many slots."""
    if len(slots) and slots.max() > MOST_SLOTS:
        raise ValueError(f"blocks of {slots.max()} slots, where {MOST_SLOTS} have room")
    sizes = slots * config.heads * (LANES + -(-seen // LANES) * LANES)
    ends = np.cumsum(sizes)
    table = np.stack((rows, slots, firsts, seen, ends - sizes), axis=1).astype(np.int64)
    return SeenBlocks(torch.from_numpy(table), int(ends[-1]) if len(ends) else 0, None, causal)


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Attention of blocks and its gradient, in fp32. qkv: [rows, (heads + 2 kv_heads) * head_dim], not rotated; turning
    has the tables of the rows' positions. keys, values: of the rows laid before, [kv_heads, rows, head_dim], the heads
    of a row side by side in memory. Raises TypeError for any other dtype or layout.

    lay_keys(config, qkv, turning): such keys, rotated, and values.
    attend(config, qkv, turning, keys, values, seen, kept): attention [rows, heads * head_dim]; and the shares, fp32
        [seen.shares], where `kept`, else None.
    slopes(config, d_out, qkv, turning, keys, values, seen, shares): the gradient with respect to qkv, as qkv.
    """

    lay_keys: Callable[[ModelConfig, Tensor, Rotary], tuple[Tensor, Tensor]]
    attend: Callable[[ModelConfig, Tensor, Rotary, Tensor, Tensor, SeenBlocks, bool], tuple[Tensor, Tensor | None]]
    slopes: Callable[[ModelConfig, Tensor, Tensor, Rotary, Tensor, Tensor, SeenBlocks, Tensor], Tensor]


def supports_blocks(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `block_ops` fits a model's heads."""
    return dtype is torch.float32 and config.head_dim % LANES == 0


def block_ops(library: ctypes.CDLL) -> BlockOps:
    """`BlockOps` over the compiled library `training`. All tensors are fp32 on the CPU: qkv
    [rows, (heads + 2 kv_heads) * head_dim] and cos, sin [rows, head_dim / 2], contiguous; keys, values
    [kv_heads, rows, head_dim], the heads of a row side by side; d_out [rows, heads * head_dim]."""
    shared = [pointer, _Heads, pointer, pointer]
    run_lay_keys = bound(library, "lay_keys", *shared, pointer, integer)
    run_lay_across = bound(library, "lay_across", pointer, wide, wide, integer, integer, pointer, wide, integer)
    blocks = [real, pointer, integer, _LaidRows]
    run_attend = bound(library, "attend_blocks", *shared, *blocks, pointer, integer, *[pointer] * 2, integer)
    run_slopes = bound(library, "slope_blocks", pointer, *shared, *blocks, *[pointer] * 2, integer)

    def lay_keys(config: ModelConfig, qkv: Tensor, turning: Rotary) -> tuple[Tensor, Tensor]:
        laid = qkv.new_empty(len(qkv), 2, config.kv_heads, config.head_dim)
        run_lay_keys(*_shared(config, qkv, turning), laid.data_ptr(), torch.get_num_threads())
        keys, values = laid.transpose(0, 1)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def across(rows: Tensor) -> Tensor:
        """[kv_heads, head_dim, …] of rows [kv_heads, rows, head_dim]."""
        kv_heads, count, head_dim = rows.shape
        # Room for a block's last lanes, and never a power of two, whose columns a cache would keep in few places.
        lanes = -(-count // LANES) + 1
        out = rows.new_empty(kv_heads, head_dim, (lanes | 1) * LANES)
        run_lay_across(
            rows.data_ptr(), _step(rows), count, kv_heads, head_dim, out.data_ptr(), out.shape[2],
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def attend(
        config: ModelConfig, qkv: Tensor, turning: Rotary, keys: Tensor, values: Tensor, seen: SeenBlocks, kept: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = qkv.new_empty(len(qkv), config.heads * config.head_dim)
        shares = qkv.new_empty(seen.shares) if kept else None
        keys_across = across(keys)
        run_attend(
            *_shared(config, qkv, turning), config.head_dim**-0.5, seen.table.data_ptr(), len(seen.table),
            _laid(values, keys_across), address(seen.begins), seen.causal, address(shares), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out, shares

    def slopes(
        config: ModelConfig,
        d_out: Tensor,
        qkv: Tensor,
        turning: Rotary,
        keys: Tensor,
        values: Tensor,
        seen: SeenBlocks,
        shares: Tensor,
    ) -> Tensor:
        d_out, d_qkv = rows_of(torch.float32, d_out), torch.empty_like(qkv)
        values_across = across(values)
        run_slopes(
            d_out.data_ptr(), *_shared(config, qkv, turning), config.head_dim**-0.5, seen.table.data_ptr(),
            len(seen.table), _laid(keys, values_across), shares.data_ptr(), d_qkv.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return d_qkv

    return BlockOps(lay_keys, attend, slopes)


def _shared(config: ModelConfig, qkv: Tensor, turning: Rotary) -> tuple[int, _Heads, int, int]:
    if qkv.dtype is not torch.float32 or not qkv.is_contiguous():
        raise TypeError("rows of fp32, one behind the other, are what the kernels read")
    heads = _Heads(len(qkv), config.heads, config.kv_heads, config.head_dim)
    return qkv.data_ptr(), heads, turning.cos.data_ptr(), turning.sin.data_ptr()


def _laid(rows: Tensor, across: Tensor) -> _LaidRows:
    return _LaidRows(rows.data_ptr(), _step(rows), across.data_ptr(), across.shape[2])


def _step(rows: Tensor) -> int:
    """From one row to the next, of rows [kv_heads, rows, head_dim]."""
    apart = rows.shape[0] > 1 and rows.stride(0) != rows.shape[2]
    if rows.dtype is not torch.float32 or rows.stride(2) != 1 or apart:
        raise TypeError("keys and values of fp32, the heads of a row side by side, are what the kernels read")
    return rows.stride(1)
