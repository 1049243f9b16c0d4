"""The row-wise operations in Triton: residual + RMSNorm, QK-norm + rotation + page write, SiLU times.

A row is computed by programs of its own, in an order that only the sizes of the model decide. Rounding follows
`reference.py`: the sum of residual and x, and a normed value before its weight, are rounded to the dtype.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.config import Activation
from tidar_core.kernels.ops import KVCache, QKNorm, Rotary, StepRows
from tidar_core.kernels.triton_launch import launch_options, let_next_begin, wait_for_kernel_before

HEADS_A_PROGRAM = 8
GATE_BLOCK = 1024


@triton.jit
def _add_norm(
    x, residual, weight, out, total_out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = RMSNorm(total) * weight, total_out = total = residual + x, one row a program: [rows, WIDTH]."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    total = tl.load(x + at + i, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + at + i, mask=inside, other=0.0)
        total = (before.to(tl.float32) + total.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total_out + at + i, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + i, scaled.to(x.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, overlap_launches: bool = True
) -> tuple[Tensor, Tensor]:
    """`Ops.add_norm`; updates the residual in place."""
    rows, width = x.shape
    out, total = torch.empty_like(x), x if residual is None else residual
    block = triton.next_power_of_2(width)
    if rows:
        _add_norm[(rows,)](
            x, total, weight, out, total, eps, WIDTH=width, BLOCK=block, HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(2, block // 512)), enable_fp_fusion=True,
            **launch_options(x.device, rows, overlap_launches),
        )  # fmt: skip
    return out, total


@triton.jit
def _norm_halves(first, second, weight_first, weight_second, eps, HALF: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of heads given as two halves [heads, HALF] in fp32, rounded to the dtype as `rms_norm` rounds."""
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]
    first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _float8_scale(largest):
    """The scale of `float8.to_float8` for rows of these greatest magnitudes, and one over it."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)  # 448 is 1.75 * 2^8
    exponent = tl.where(largest > 0.0, exponent, 127)
    scale = tl.where(largest < float("inf"), (exponent << 23).to(tl.float32, bitcast=True), float("nan"))
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["verify"], do_not_specialize_on_alignment=["positions", "write_slots"])
def _rotate_and_store(
    qkv, positions, cos, sin, q_norm, k_norm, keys, values, key_scales, value_scales, write_slots, eps, verify,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: norms and rotates those of q and k in place, writes those of k and v into the page."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF)
    at = qkv + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + (head * 2 * HALF)[:, None] + d[None, :]
    present = (head < HEADS + 2 * KV_HEADS)[:, None]
    turns = (head < HEADS + KV_HEADS)[:, None]
    raw_first = tl.load(at, mask=present, other=0.0)
    raw_second = tl.load(at + HALF, mask=present, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if HAS_NORM:
        is_query = (head < HEADS)[:, None]
        weight_first = tl.where(is_query, tl.load(q_norm + d)[None, :], tl.load(k_norm + d)[None, :])
        weight_second = tl.where(is_query, tl.load(q_norm + HALF + d)[None, :], tl.load(k_norm + HALF + d)[None, :])
        first, second = _norm_halves(
            first, second, weight_first.to(tl.float32), weight_second.to(tl.float32), eps, HALF, dtype
        )
    angle = tl.load(positions + row) * HALF + d
    c, s = tl.load(cos + angle)[None, :], tl.load(sin + angle)[None, :]
    turned_first = tl.where(turns, (first * c - second * s).to(dtype), raw_first)
    turned_second = tl.where(turns, (second * c + first * s).to(dtype), raw_second)
    tl.store(at, turned_first, mask=turns)
    tl.store(at + HALF, turned_second, mask=turns)
    if row < verify:
        slot = tl.load(write_slots + row)
        page, offset = (slot // PAGE).to(tl.int64), slot % PAGE
        kv = head - HEADS
        if keys.dtype.element_ty == tl.float8e4nv:
            wide_first, wide_second = turned_first.to(tl.float32), turned_second.to(tl.float32)
            scale, inverse = _float8_scale(tl.maximum(tl.max(tl.abs(wide_first), 1), tl.max(tl.abs(wide_second), 1)))
            kept_first = (wide_first * inverse[:, None]).to(tl.float8e4nv)
            kept_second = (wide_second * inverse[:, None]).to(tl.float8e4nv)
            tl.store(key_scales + (page * KV_HEADS + kv) * PAGE + offset, scale, mask=(kv >= 0) & (kv < KV_HEADS))
            value_scale = value_scales + (page * KV_HEADS + kv - KV_HEADS) * PAGE + offset
            tl.store(value_scale, scale, mask=(kv >= KV_HEADS) & (kv < 2 * KV_HEADS))
        else:
            kept_first, kept_second = turned_first, turned_second
        is_key = ((kv >= 0) & (kv < KV_HEADS))[:, None]
        key = keys + ((page * KV_HEADS + kv) * (2 * HALF * PAGE) + offset)[:, None] + (d * PAGE)[None, :]
        tl.store(key, kept_first, mask=is_key)
        tl.store(key + HALF * PAGE, kept_second, mask=is_key)
        kv -= KV_HEADS
        is_value = present & (kv >= 0)[:, None]
        value = values + (((page * KV_HEADS + kv) * PAGE + offset) * (2 * HALF))[:, None] + d[None, :]
        tl.store(value, kept_first, mask=is_value)
        tl.store(value + HALF, kept_second, mask=is_value)


def scales_of(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """The scales of a layer's pages, or any tensor where they have none."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys[layer], cache.values[layer]
    return cache.key_scales[layer], cache.value_scales[layer]


def rotate_and_store(
    qkv: Tensor, rows: StepRows, rotary: Rotary, cache: KVCache, layer: int, qk_norm: QKNorm | None, *,
    overlap_launches: bool = True,
) -> Tensor:  # fmt: skip
    """`Ops.rotate_and_store`, in place."""
    keys, values = cache.keys[layer], cache.values[layer]
    _, kv_heads, head_dim, page_size = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q_norm, k_norm, eps = (qk_norm.q, qk_norm.k, qk_norm.eps) if qk_norm is not None else (qkv, qkv, 0.0)
    blocks = triton.cdiv(heads + 2 * kv_heads, HEADS_A_PROGRAM)
    if qkv.shape[0]:
        _rotate_and_store[(qkv.shape[0], blocks)](
            qkv, rows.positions, rotary.cos, rotary.sin, q_norm, k_norm, keys, values, *scales_of(cache, layer),
            rows.write_slots, eps, rows.verify,
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=page_size, BLOCK=HEADS_A_PROGRAM,
            HAS_NORM=qk_norm is not None, num_warps=4, enable_fp_fusion=True,
            **launch_options(qkv.device, qkv.shape[0], overlap_launches),
        )  # fmt: skip
    return qkv


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU, or GELU as approximated by tanh."""
    # (1 + tanh u) / 2 = 1 / (1 + exp(-2u))
    steep = gate * (1.5957691216 + 0.0713548163 * gate * gate) if GELU else gate
    return gate / (1.0 + tl.exp(-steep))


@triton.jit
def _gate_rows(
    gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """out [rows, WIDTH] = activation(gate) * up; gate_up is [rows, 2 * WIDTH]."""
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    activated = activate(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + i, (activated * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, activation: Activation, *, overlap_launches: bool = True) -> Tensor:
    """`Ops.gate`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate_rows[(rows, triton.cdiv(width, GATE_BLOCK))](
            gate_up, out, WIDTH=width, BLOCK=GATE_BLOCK, GELU=activation == "gelu_tanh", num_warps=4,
            enable_fp_fusion=True, **launch_options(out.device, rows, overlap_launches),
        )  # fmt: skip
    return out
