"""The operations in plain torch: any device, any dtype, differentiable where training needs it."""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Activation, Experts
from tidar_core.kernels.experts import Routed, choose, mix_by_turns
from tidar_core.kernels.ops import KVCache, Ops, QKNorm, Rotary, StepRows
from tidar_core.model.float8 import rounded
from tidar_core.model.weights import LowRank

ROW_MULTIPLE = 4
_ROW_TILE, _KEY_TILE = 16, 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
    """`Ops.linear`."""
    y = F.linear(x, weight, bias)
    if low_rank is None or first_mask_row >= x.shape[0]:
        return y
    drafted = y[first_mask_row:] + F.linear(F.linear(x[first_mask_row:], low_rank.a), low_rank.b)
    return torch.cat((y[:first_mask_row], drafted)) if first_mask_row else drafted


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32 and rounded before the weight, as transformers does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`Ops.add_norm`; changes nothing in place."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [rows, heads, head_dim] by cos and sin [rows, head_dim / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_heads(qkv: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] out of a fused projection."""
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def rotate_qkv(qkv: Tensor, positions: Tensor, rotary: Rotary, kv_heads: int, qk_norm: QKNorm | None) -> Tensor:
    """QK-norm and rotation of a fused projection; values pass through. Same shape as `qkv`."""
    q, k, v = split_heads(qkv, kv_heads, 2 * rotary.cos.shape[1])
    if qk_norm is not None:
        q, k = rms_norm(q, qk_norm.q, qk_norm.eps), rms_norm(k, qk_norm.k, qk_norm.eps)
    cos, sin = rotary.cos[positions], rotary.sin[positions]
    return torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=1).view(qkv.shape)


def rotate_and_store(
    qkv: Tensor, rows: StepRows, rotary: Rotary, cache: KVCache, layer: int, qk_norm: QKNorm | None
) -> Tensor:
    """`Ops.rotate_and_store`; leaves `qkv` as it is."""
    keys, values = cache.keys[layer], cache.values[layer]
    _, kv_heads, head_dim, page_size = keys.shape
    qkv = rotate_qkv(qkv, rows.positions, rotary, kv_heads, qk_norm)
    _, k, v = split_heads(qkv[: rows.verify], kv_heads, head_dim)
    page, offset = rows.write_slots // page_size, rows.write_slots % page_size
    keys[page, :, :, offset] = k
    values[page, :, offset] = v
    return qkv


def rounding_pages(
    store: Callable[[Tensor, StepRows, Rotary, KVCache, int, QKNorm | None], Tensor],
) -> Callable[[Tensor, StepRows, Rotary, KVCache, int, QKNorm | None], Tensor]:
    """`rotate_and_store` with what it writes into pages of another dtype rounded to what 8 bits keep of it."""

    def rotate_and_store(
        qkv: Tensor, rows: StepRows, rotary: Rotary, cache: KVCache, layer: int, qk_norm: QKNorm | None
    ) -> Tensor:
        qkv = store(qkv, rows, rotary, cache, layer, qk_norm)
        keys, values = cache.keys[layer], cache.values[layer]
        page, offset = rows.write_slots // cache.page_size, rows.write_slots % cache.page_size
        keys[page, :, :, offset] = rounded(keys[page, :, :, offset])
        values[page, :, offset] = rounded(values[page, :, offset])
        return qkv

    return rotate_and_store


def attend(qkv: Tensor, rows: StepRows, cache: KVCache, layer: int) -> Tensor:
    """`Ops.attend`, one sequence after the other."""
    keys, values = cache.keys[layer], cache.values[layer]
    _, kv_heads, head_dim, _ = keys.shape
    window = cache.window(layer)
    q, k, v = split_heads(qkv, kv_heads, head_dim)
    out = torch.empty_like(q)
    for sequence in range(rows.page_table.shape[0]):
        mine = (rows.sequence == sequence).nonzero().flatten()
        # Apart, so that nothing of a mask row, not even a NaN times zero, can reach a verify row.
        verify, mask = mine[mine < rows.verify], mine[mine >= rows.verify]
        for some, slots in ((verify, mask[:0]), (mask, mask)):
            if len(some) == 0:
                continue
            longest = int(rows.context_end[some].max())
            pages = rows.page_table[sequence, : -(-longest // cache.page_size)]
            context_k = keys[pages].permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, :longest]
            context_v = values[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :longest]
            seen_k = torch.cat((context_k, k[slots].transpose(0, 1)), dim=1)
            seen_v = torch.cat((context_v, v[slots].transpose(0, 1)), dim=1)
            positions, tail = torch.arange(longest, device=qkv.device), slots - rows.verify
            in_context = positions < rows.context_end[some, None]
            if window:
                in_context &= positions > rows.positions[some, None] - window
            in_tail = (tail >= rows.tail_start[some, None]) & (tail < rows.tail_end[some, None])
            out[some] = _mix(q[some], seen_k, seen_v, torch.cat((in_context, in_tail), dim=1))
    return out.view(qkv.shape[0], -1)


def attend_blocks(qkv: Tensor, keys: Tensor, values: Tensor, seen: Tensor, causal: bool) -> Tensor:
    """Attention of the trainer's rotated mask rows [blocks * slots, (heads + 2 kv_heads) * d] -> [rows, heads * d].

    A row sees the clean rows that its block sees, and the slots of its block, if `causal` those up to its own alone.
    keys, values: the clean rows', [kv_heads, clean rows, d]; seen: bool [blocks, clean rows].
    """
    kv_heads, _, head_dim = keys.shape
    q, k, v = split_heads(qkv, kv_heads, head_dim)
    block = torch.arange(len(qkv), device=qkv.device) // (len(qkv) // len(seen))
    own = block[:, None] == block
    visible = torch.cat((seen[block], own.tril() if causal else own), dim=1)
    all_keys, all_values = (torch.cat((clean, mine.transpose(0, 1)), dim=1) for clean, mine in ((keys, k), (values, v)))
    return _mix(q, all_keys, all_values, visible).reshape(len(qkv), -1)


def _mix(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of q [rows, heads, head_dim] over keys and values [kv_heads, keys, head_dim], in fp32.

    Products have one shape whatever the rows and keys are: left to itself, the library sums in an order that depends on
    how many come along, and a row's bits with it. visible: bool [rows, keys].
    """
    kv_heads, count, _ = keys.shape
    short, gap = -len(q) % _ROW_TILE, -count % _KEY_TILE
    queries = F.pad(q.float(), (0, 0, 0, 0, 0, short)).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    key_tiles, value_tiles = (F.pad(some.float(), (0, 0, 0, gap)).split(_KEY_TILE, dim=1) for some in (keys, values))
    # Rows that fill up see something, or their NaN would come back in the gradient.
    seen = F.pad(F.pad(visible, (0, gap)), (0, 0, 0, short), value=True).split(_ROW_TILE)
    mixed = [
        _mix_tile(some, key_tiles, value_tiles, own)
        for some, own in zip(queries.split(_ROW_TILE, dim=2), seen, strict=True)
    ]
    return torch.cat(mixed, dim=2).permute(2, 0, 1, 3)[: len(q)].reshape(q.shape).to(q.dtype)


def _mix_tile(queries: Tensor, keys: Items[Tensor], values: Items[Tensor], seen: Tensor) -> Tensor:
    """queries: [kv_heads, group, _ROW_TILE, head_dim]; keys, values: tiles [kv_heads, _KEY_TILE, head_dim]; seen: bool
    [_ROW_TILE, keys] -> as queries."""
    flat = queries.flatten(1, 2)
    scores = torch.cat([flat @ tile.transpose(1, 2) for tile in keys], dim=-1) / queries.shape[-1] ** 0.5
    weights = scores.view(*queries.shape[:3], -1).masked_fill(~seen, -torch.inf).softmax(dim=-1).flatten(1, 2)
    mixed = torch.zeros_like(flat)
    for weight, tile in zip(weights.split(_KEY_TILE, dim=-1), values, strict=True):
        mixed = mixed + weight @ tile
    return mixed.view(queries.shape)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """`Ops.gate`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def head(x: Tensor, weight: Tensor) -> Tensor:
    """`Ops.head`: logits in x's dtype."""
    return F.linear(x, weight)


def route(x: Tensor, router: Tensor, bias: Tensor | None, experts: Experts) -> Routed:
    """`Ops.route`, with logits in fp32: in bf16 the logits of different experts often tie."""
    short = -len(x) % ROW_MULTIPLE
    logits = F.linear(F.pad(x.float(), (0, 0, 0, short)), router.float())[: len(x)]
    return choose(logits, bias, experts)


def as_it_is(weight: Tensor) -> Tensor:
    """`Ops.pack` where the operations read plain matrices."""
    return weight


REFERENCE_OPS = Ops(
    "torch", ROW_MULTIPLE, as_it_is, as_it_is, as_it_is, linear, add_norm, rotate_and_store, attend, gate, head, route,
    mix_by_turns(F.linear, gate, ROW_MULTIPLE),
)  # fmt: skip
