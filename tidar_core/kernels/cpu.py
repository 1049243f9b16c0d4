"""The CPU's operations: `cpu_kernels.cpp` and the products beside it."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.config import Experts, ModelConfig, RoundedDType
from tidar_core.kernels.cpu_build import LANES, CompileError, Part, compiled_libraries, compiler
from tidar_core.kernels.cpu_calls import SUFFIXES, Suffix, address
from tidar_core.kernels.cpu_experts import bind_mix_experts
from tidar_core.kernels.cpu_pack import INT4_GROUP, of_each, pack, pack_int4, pack_int8
from tidar_core.kernels.cpu_pass import bind_layers
from tidar_core.kernels.cpu_pick import bind_pick
from tidar_core.kernels.cpu_rows import bind_rows
from tidar_core.kernels.cpu_slots import bind_draft_slots
from tidar_core.kernels.experts import Routed, choose, mix_by_turns
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank

_ROUNDED: dict[Suffix, Part] = {"bf16": "rounded_bf16", "float": "rounded_float"}
_PACKS = {None: (pack, pack), "int8": (pack_int8, pack_int8), "int4": (pack_int4, pack_int8)}  # the base's, the head's
TILE_INPUTS = 32  # as in `cpu_tiles.cpp`: the adapter's narrow rows are filled up to whole tiles


def supports(config: ModelConfig, page_size: int) -> bool:
    """Whether the kernels fit a model's sizes and the page size."""
    sizes = (config.hidden_size, *inner_sizes(config), config.head_dim)
    return page_size == LANES and all(size % LANES == 0 for size in sizes)


def inner_sizes(config: ModelConfig) -> tuple[int, ...]:
    """The intermediate sizes of all kinds of MLPs in the model."""
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


def packs_matrices(config: ModelConfig, page_size: int) -> bool:
    """Whether the CPU's operations have matrices laid out for their products, as far as that is known before anything
    is compiled."""
    try:
        compiler()
    except CompileError:
        return False
    return supports(config, page_size) and _packs_whole(config)


def unpacked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, first_mask_row: int
) -> Tensor:
    """`Ops.linear` by torch's products, for matrices whose sizes our own do not take."""
    return add_low_rank(F.linear(x, weight, bias), x, low_rank, first_mask_row)


def add_low_rank(y: Tensor, x: Tensor, low_rank: LowRank | None, first_mask_row: int) -> Tensor:
    """Adds the adapter's part to y's mask rows, in place."""
    if low_rank is not None and first_mask_row < x.shape[0]:
        y[first_mask_row:].addmm_(F.linear(x[first_mask_row:], low_rank.a), low_rank.b.t())
    return y


def cpu_ops(config: ModelConfig, dtype: torch.dtype, rounded: RoundedDType | None = None) -> Ops:
    """The CPU's `Ops` for a model in one dtype (bf16 or fp32), the base's matrices in fewer bits where `rounded` says
    so.

    Raises CompileError where they cannot be built.
    """
    suffix = SUFFIXES[dtype]
    library, products = compiled_libraries([suffix, _ROUNDED[suffix] if rounded else suffix])
    rows = bind_rows(library, suffix)
    # By tiles bf16 has other bits, in attention whatever the weights are kept in.
    tiles = dtype is torch.bfloat16 and library.uses_tiles()
    name = " ".join(word for word in ("cpu", rounded, "tiles" if tiles else None) if word)
    slots, pick = bind_draft_slots(getattr(library, f"draft_slots_{suffix}")), bind_pick(library.pick_tokens)
    if rounded and not _packs_rounded(config, rounded):
        raise CompileError(f"{rounded} needs matrices whose sizes are multiples of 32")
    if not _packs_whole(config):
        return replace(
            REFERENCE_OPS, name=name, linear=unpacked_linear, add_norm=rows.add_norm,
            rotate_and_store=rows.rotate_and_store, attend=rows.attend, gate=rows.gate, draft_slots=slots, pick=pick,
            mix_experts=mix_by_turns(F.linear, rows.gate, REFERENCE_OPS.row_multiple),
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
        name, 1, of_each(pack_base), pack_head, pack, linear, rows.add_norm, rows.rotate_and_store, rows.attend,
        rows.gate, head, route,
        bind_mix_experts(getattr(products, f"mix_experts_{kind}"), config.experts.inner if config.experts else 0),
        bind, slots, pick=pick,
    )  # fmt: skip


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
