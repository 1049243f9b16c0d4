"""The Triton `Ops`: which kernel does what, for one model. Import this only where triton is installed."""

from collections.abc import Mapping
from functools import partial

import torch
import triton
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS, as_it_is
from tidar_core.kernels.triton_attention import paged_attend
from tidar_core.kernels.triton_experts import mix_experts, route
from tidar_core.kernels.triton_gemm import PREFETCH_BYTES, exact_linear, product_planner
from tidar_core.kernels.triton_layers import bind_layers
from tidar_core.kernels.triton_rows import add_norm, gate, rotate_and_store
from tidar_core.kernels.triton_sampling import pick_listed, pick_tokens
from tidar_core.kernels.triton_succession import carry, decide, renew
from tidar_core.kernels.triton_tiles import GemmTiles, gpu_of, measured_tiles
from tidar_core.model.float8 import packed

PROGRAMS_A_PROCESSOR = 2  # of the attention kernel: what its registers and shared memory leave room for
FLOAT8_SINCE = 8, 9  # the compute capability below which triton has no float8


def supports(config: ModelConfig, page_size: int) -> bool:
    """Whether the kernels fit a model's sizes and the page size."""
    return (
        config.head_dim in (16, 32, 64, 128, 256)
        and page_size in (16, 32, 64)
        and config.heads // config.kv_heads <= 64
    )


def has_float8(device: torch.device) -> bool:
    """Whether the kernels take weights and pages in 8 bits on this device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_SINCE


def programs_at_once(device: torch.device) -> int:
    """Programs of the attention kernel that the device runs side by side; a few where it is interpreted."""
    if device.type != "cuda":
        return 2
    return PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def tiles_of(device: torch.device, dtype: torch.dtype) -> Mapping[tuple[int, int], GemmTiles]:
    """The tiles in the package for this kind of GPU."""
    return measured_tiles(gpu_of(device), dtype) if device.type == "cuda" else {}


def triton_ops(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = True,
    measured: Mapping[tuple[int, int], GemmTiles] | None = None,
    prefetch_bytes: int = PREFETCH_BYTES,
    float8: bool = False,
    overlap_launches: bool = True,
) -> Ops:
    """The operations of one model on an NVIDIA GPU (or, with TRITON_INTERPRET=1 set early, interpreted on a CPU).

    exact: matrix products by the kernel that gives a row the same bits among any number of rows; else by torch, which
    may be faster (not those of experts: torch would have to ask the host). measured: tiles for weights [outs, ins], by
    default those in the package for this kind of GPU. prefetch_bytes: see `product_planner`. float8: the layers'
    matrices are packed into 8 bits where the device has those (exact products only). overlap_launches: whether a kernel
    may be launched while the one before runs (`triton_launch`).
    Keeps a list of the current step's attention work, so one record serves one engine.
    """
    plan = product_planner(
        tiles_of(device, dtype) if measured is None else measured, prefetch_bytes, overlap_launches=overlap_launches
    )
    to_logits, in_8_bits = exact_linear(plan, out_dtype=torch.float32), has_float8(device)
    attend = paged_attend(
        config.heads,
        config.kv_heads,
        config.head_dim,
        dtype,
        programs_at_once(device),
        overlap_launches=overlap_launches,
    )

    def head(x: Tensor, weight: Tensor) -> Tensor:  # in fp32: bf16 scores tie too often
        return to_logits(x, weight, None, None, x.shape[0])

    return Ops(
        name=f"triton {triton.__version__}",
        row_multiple=1,
        pack=packed if float8 and in_8_bits else as_it_is,
        pack_head=as_it_is,
        pack_adapter=as_it_is,
        linear=exact_linear(plan) if exact else REFERENCE_OPS.linear,
        add_norm=partial(add_norm, overlap_launches=overlap_launches),
        rotate_and_store=partial(rotate_and_store, overlap_launches=overlap_launches),
        attend=attend,
        gate=partial(gate, overlap_launches=overlap_launches),
        head=head if exact else REFERENCE_OPS.head,
        route=partial(route, head, overlap_launches),
        mix_experts=partial(mix_experts, overlap_launches=overlap_launches),
        float8_pages=in_8_bits,
        bind_layers=partial(bind_layers, config, plan, attend, overlap_launches) if exact else None,
        pick=pick_tokens,
        pick_listed=pick_listed,
        carry=carry,
        decide=decide,
        renew=renew,
    )
