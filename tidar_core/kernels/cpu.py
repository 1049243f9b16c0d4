"""The CPU's operations: `cpu_kernels.cpp` and the products beside it."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Activation, Experts, ModelConfig, RoundedDType
from tidar_core.kernels.cpu_build import LANES, CompileError, Part, compiled_libraries
from tidar_core.kernels.cpu_experts import bind_mix_experts
from tidar_core.kernels.cpu_pass import ACTIVATIONS, address, bind_layers
from tidar_core.kernels.cpu_pick import bind_pick
from tidar_core.kernels.cpu_slots import bind_draft_slots
from tidar_core.kernels.experts import Routed, choose, mix_by_turns
from tidar_core.kernels.ops import KVCache, Ops, QKNorm, Rotary, StepRows
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank

INT4_GROUP = 32  # inputs that share a scale and a minimum
SLICE_WEIGHTS = 1 << 20  # that are packed at a time
SUFFIXES: dict[torch.dtype, Literal["bf16", "float"]] = {torch.bfloat16: "bf16", torch.float32: "float"}
_ROUNDED: dict[str, Part] = {"bf16": "rounded_bf16", "float": "rounded_float"}


def supports(config: ModelConfig, page_size: int) -> bool:
    """Whether the kernels fit a model's sizes and the page size."""
    sizes = (config.hidden_size, *inner_sizes(config), config.head_dim)
    return page_size == LANES and all(size % LANES == 0 for size in sizes)


def inner_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Of all MLPs of the model."""
    experts = config.experts
    if experts is None:
        return (config.intermediate_size,)
    dense = (config.intermediate_size,) if len(experts.layers) < config.layers else ()
    return (*dense, experts.inner, *((experts.shared_inner,) if experts.shared_inner else ()))


def _packs_whole(config: ModelConfig) -> bool:
    """Whether all matrices of the model have sizes that our own products take."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    sizes = (config.hidden_size, qkv, *(2 * size for size in inner_sizes(config)), config.vocab_size)
    return all(size % (2 * LANES) == 0 for size in sizes)


def _packs_rounded(config: ModelConfig, rounded: RoundedDType) -> bool:
    """Whether all matrices can be kept in fewer bits; those of 4 have groups of 32 inputs."""
    inputs = (config.hidden_size, config.heads * config.head_dim, *inner_sizes(config))
    return _packs_whole(config) and (rounded == "int8" or all(size % INT4_GROUP == 0 for size in inputs))


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, in / S, 16, S], as `cpu_gemm.cpp` reads it; as it is where the sizes do not divide."""
    rows, columns = weight.shape
    if rows % LANES or columns % LANES:
        return weight
    step = 2 if weight.dtype is torch.bfloat16 else 1
    return weight.view(rows // LANES, LANES, columns // step, step).permute(0, 2, 1, 3).contiguous()


def pack_int8(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, 16 in + 64] bytes, as `cpu_gemm_int8.cpp` reads it: one scale an output."""
    return _in_slices(_int8_blocks, weight, LANES * (weight.shape[1] + 4))


def pack_int4(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, 10 in] bytes, as `cpu_gemm_int4.cpp` reads it: a scale and a minimum for 32 inputs.

    The smallest weight of a group becomes 0 and the largest 15, so that weights from a GGUF file's Q4_1 come out with
    the whole numbers that they had there.
    """
    return _in_slices(_int4_blocks, weight, 10 * weight.shape[1])


def _of_each(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`pack` of a matrix, or of each expert's."""

    def packed(weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return pack(weight)
        first = pack(weight[0])
        together = first.new_empty(len(weight), *first.shape)
        for matrix, to in zip(weight, together, strict=True):
            to.copy_(pack(matrix))
        return together

    return packed


def _in_slices(blocks_of: Callable[[Tensor], Tensor], weight: Tensor, block_bytes: int) -> Tensor:
    """Blocks of 16 outputs, made of some rows at a time: of a whole matrix the numbers between would take several times
    its memory."""
    rows, columns = weight.shape
    packed = weight.new_empty(rows // LANES, block_bytes, dtype=torch.uint8)
    blocks = max(1, SLICE_WEIGHTS // (LANES * columns))
    for part, to in zip(weight.split(blocks * LANES), packed.split(blocks), strict=True):
        to.copy_(blocks_of(part))
    return packed


def _int8_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    whole = (wide * inverse[:, None]).round().clamp(-127, 127) + 128
    blocks = whole.to(torch.uint8).view(rows // LANES, LANES, columns // 4, 4).permute(0, 2, 1, 3)
    return torch.cat((blocks.reshape(rows // LANES, -1), scales.view(rows // LANES, LANES).view(torch.uint8)), dim=1)


def _int4_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    groups = columns // INT4_GROUP
    wide = weight.float().view(rows, groups, INT4_GROUP)
    minima = wide.amin(dim=2).half()
    scales = ((wide.amax(dim=2) - minima.float()) / 15).half()
    above = (wide - minima.float()[..., None]) / scales.float()[..., None]
    whole = above.nan_to_num(0.0).round().clamp(0, 15).to(torch.uint8)  # (a scale of zero divides zero)
    quads = whole.view(rows // LANES, LANES, groups, INT4_GROUP // 8, 2, 4).permute(0, 2, 3, 1, 5, 4)
    numbers = (quads[..., 0] | quads[..., 1] << 4).reshape(rows // LANES, groups, -1)
    behind = [each.view(rows // LANES, LANES, groups).mT.contiguous().view(torch.uint8) for each in (scales, minima)]
    return torch.cat((numbers, *behind), dim=2).flatten(1)


def unpacked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int
) -> Tensor:
    return add_low_rank(F.linear(x, weight, bias), x, low_rank, first_mask_row)


def add_low_rank(y: Tensor, x: Tensor, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
    """Adds the adapter's part to y's mask rows, in place."""
    if low_rank is not None and first_mask_row < x.shape[0]:
        y[first_mask_row:].addmm_(F.linear(x[first_mask_row:], low_rank.a), low_rank.b.t())
    return y


def bound(library: ctypes.CDLL, name: str, *types: type) -> Callable[..., None]:
    """A function of the compiled library that takes these types and gives nothing."""
    found: Callable[..., None] = getattr(library, name)
    found.argtypes, found.restype = types, None  # type: ignore[attr-defined]
    return found


def cpu_ops(config: ModelConfig, dtype: torch.dtype, rounded: RoundedDType | None = None) -> Ops:
    """The CPU's `Ops` for a model in one dtype (bf16 or fp32), the base's matrices in fewer bits where `rounded` says
    so.

    Raises CompileError where they cannot be built.
    """
    suffix = SUFFIXES[dtype]
    library, products = compiled_libraries([suffix, _ROUNDED[suffix] if rounded else suffix])
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

    # By tiles bf16 has other bits, in attention whatever the weights are kept in.
    tiles = dtype is torch.bfloat16 and library.uses_tiles()
    name = " ".join(word for word in ("cpu", rounded, "tiles" if tiles else None) if word)
    slots, pick = bind_draft_slots(getattr(library, f"draft_slots_{suffix}")), bind_pick(library.pick_tokens)
    if rounded and not _packs_rounded(config, rounded):
        raise CompileError(f"{rounded} needs matrices whose sizes are multiples of 32")
    if not _packs_whole(config):
        return replace(
            REFERENCE_OPS, name=name, linear=unpacked_linear, add_norm=add_norm,
            rotate_and_store=rotate_and_store, attend=attend, gate=gate, draft_slots=slots, pick=pick,
            mix_experts=mix_by_turns(F.linear, gate, REFERENCE_OPS.row_multiple),
        )  # fmt: skip
    kind = f"{rounded}_{suffix}" if rounded else suffix
    _, logits_of = _products(library, suffix, False)
    # The head decides between tokens: it is never kept in less than 8 bits.
    linear, _ = _products(products, kind, rounded is not None)
    _, head = _products(products, f"int8_{suffix}" if rounded else suffix, rounded is not None)
    bind = partial(bind_layers, getattr(products, f"run_layers_{kind}"), config)
    pack_base, pack_head = _PACKS[rounded]

    def route(x: Tensor, router: Tensor, bias: Tensor | None, experts: Experts) -> Routed:
        return choose(logits_of(x, router), bias, experts)

    return Ops(
        name, 1, _of_each(pack_base), pack_head, pack, linear, add_norm, rotate_and_store, attend, gate, head, route,
        bind_mix_experts(getattr(products, f"mix_experts_{kind}"), config.experts.inner if config.experts else 0),
        bind, slots, pick=pick,
    )  # fmt: skip


TILE_INPUTS = 32  # as in `cpu_tiles.cpp`: the adapter's narrow rows are filled up to whole tiles
_PACKS = {None: (pack, pack), "int8": (pack_int8, pack_int8), "int4": (pack_int4, pack_int8)}


def _products(
    library: ctypes.CDLL, suffix: str, rounded: bool
) -> tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """`linear` and `head` over packed weights. A row's bits depend on that row alone, whatever the number of rows.

    rounded: the rows are rounded to 8 bits in groups of their inputs, which takes scratch memory.
    """
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    run_linear, run_head = getattr(library, f"linear_{suffix}"), getattr(library, f"head_{suffix}")
    x_types, scratch_types = [pointer, integer, integer], [pointer] * rounded
    adapter_types = [integer, pointer, pointer, integer, pointer]
    run_linear.argtypes = [*x_types, pointer, integer, pointer, pointer, *adapter_types, *scratch_types, integer]
    run_head.argtypes = [*x_types, pointer, integer, pointer, *scratch_types, integer]
    run_linear.restype = run_head.restype = None

    def scratch_for(x: Tensor) -> list[Tensor]:
        """Room for the rounded rows: at least one group of 16 inputs has a scale and a sum."""
        rows, columns = x.shape
        return [x.new_empty(rows * (columns + columns // 2), dtype=torch.uint8)] * rounded

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
        rows, columns = x.shape
        threads, width = torch.get_num_threads(), weight.shape[0] * LANES
        y = x.new_empty(rows, width)
        fused = low_rank is not None and first_mask_row < rows and low_rank.a.dim() == low_rank.b.dim() == 4
        rank, down, up, low = 0, None, None, None
        if low_rank is not None and fused:
            rank = low_rank.a.shape[0] * LANES
            down, up = low_rank.a.data_ptr(), low_rank.b.data_ptr()
            low = x.new_empty(threads, rows, -(-rank // TILE_INPUTS) * TILE_INPUTS)
        scratch = scratch_for(x)
        run_linear(
            x.data_ptr(), rows, columns, weight.data_ptr(), width, address(bias), y.data_ptr(),
            first_mask_row, down, up, rank, address(low), *map(address, scratch), threads,
        )  # fmt: skip
        return y if fused else add_low_rank(y, x, low_rank, first_mask_row)

    def head(x: Tensor, weight: Tensor) -> Tensor:
        rows, columns = x.shape
        width = weight.shape[0] * LANES
        logits = x.new_empty(rows, width, dtype=torch.float32)
        scratch = scratch_for(x)
        run_head(
            x.data_ptr(), rows, columns, weight.data_ptr(), width, logits.data_ptr(), *map(address, scratch),
            torch.get_num_threads(),
        )  # fmt: skip
        return logits

    return linear, head
