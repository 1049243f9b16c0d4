"""The trainer's attention of mask rows on a GPU: one kernel each way (`tidar_core.kernels.triton_blocks`).

Before the first use of a size its kernels are held against plain torch, out and gradient, on the GPU at hand; where
they fail or do not fit, FlexAttention takes their place, as it does where layers have a window.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.attention import Attention, CleanKV
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.convert.flex import flex_mask_attention, rotated
from tidar_core.error_text import first_line
from tidar_core.kernels.ops import Rotary, layer_windows
from tidar_core.kernels.reference import attend_blocks, split_heads
from tidar_core.kernels.triton_blocks import BlockAttentionSizes, block_attention, block_tiles, supports
from tidar_core.layout import WithinBlock
from tidar_core.model.weights import ModelWeights

ALLOWED = 1e-2  # of the largest number, in 16 bits
PROBED = ((900, 24), (70, 9), (3, 2), (150, 1))
"""Documents: clean rows, blocks behind them. The first is so long that a tile goes through all stages of shared memory
more than once."""

log = logging.getLogger("tidar")


def fused_mask_attention(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: Rotary,
    pack: Pack,
    clean: CleanKV,
    blocks: Blocks,
    within_block: WithinBlock,
) -> Attention:
    """As `attention.mask_attention`, over the clean keys of `flex.flex_clean_attention`."""
    sizes = _sizes(config, blocks.block, within_block)
    device = pack.tokens.device
    if layer_windows(config) or not proven(sizes, weights.embedding.dtype, device):
        return flex_mask_attention(config, weights, rotary, pack, clean, blocks, within_block)
    starts = np.array([start for start, _ in pack.spans])
    tiles = block_tiles(blocks.document, blocks.context, starts, sizes, device)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        rows = rotated(config, weights, rotary, blocks.positions, layer, qkv)
        return block_attention(rows, clean.keys[layer], clean.values[layer], tiles, sizes)

    return attention


def prepare_blocks(
    config: ModelConfig, weights: ModelWeights, blocks: Iterable[int], within_block: WithinBlock
) -> None:
    """Compiles and proves the kernels for blocks of so many slots; each size has its own."""
    for block in () if layer_windows(config) else blocks:
        proven(_sizes(config, block, within_block), weights.embedding.dtype, weights.embedding.device)


def _sizes(config: ModelConfig, block: int, within_block: WithinBlock) -> BlockAttentionSizes:
    return BlockAttentionSizes(config.heads, config.kv_heads, config.head_dim, block, within_block == "causal")


@lru_cache(maxsize=64)
def proven(sizes: BlockAttentionSizes, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels for these sizes give here what plain torch gives; if not, a line in the log says so."""
    if not supports(sizes, dtype):
        log.warning("training with FlexAttention, which is slower: no kernel for %s in %s", sizes, dtype)
        return False
    try:
        error = block_error(sizes, dtype, device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the one passes, with the other nothing goes on
    except Exception as failed:  # Triton and the compiler may fail in many ways
        name, reason = type(failed).__name__, first_line(failed)
        log.warning("training with FlexAttention, which is slower: %s: %s", name, reason)
        return False
    if not error <= ALLOWED:
        log.warning("training with FlexAttention: the kernels are off by %.2g of the largest number here", error)
        return False
    return True


@torch.inference_mode(False)
def block_error(
    sizes: BlockAttentionSizes, dtype: torch.dtype, device: torch.device, documents: Sequence[tuple[int, int]] = PROBED
) -> float:
    """max|Δ| / max|oracle| of the kernels' result and of its gradient, the greater of the two, on random inputs behind
    documents of so many clean rows, with so many blocks each."""
    draw, random = np.random.default_rng(0), torch.Generator(device).manual_seed(0)
    lengths, counts = (list(column) for column in zip(*documents, strict=True))
    starts = np.cumsum([0, *lengths[:-1]])
    document = np.repeat(np.arange(len(documents)), counts)
    context = np.concatenate(
        [np.sort(draw.choice(length, count, replace=False)) + 1 for length, count in documents]
    ).astype(np.int64)
    tiles = block_tiles(document, context, starts, sizes, device)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads * sizes.head_dim, generator=random, device=device).to(dtype)

    # As `CleanKV` has them: the kernels are compiled for how far apart rows lie.
    _, k, v = split_heads(rows(sum(lengths), 2 * sizes.kv_heads), sizes.kv_heads, sizes.head_dim)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    qkv = rows(len(context) * sizes.slots, sizes.heads + 2 * sizes.kv_heads)
    first = torch.from_numpy(starts[document])[:, None]
    row = torch.arange(sum(lengths))
    seen = ((row >= first) & (row < first + torch.from_numpy(context)[:, None])).to(device)
    slope = torch.randn(len(qkv), sizes.heads * sizes.head_dim, generator=random, device=device).to(dtype)
    ours = _with_gradient(lambda x: block_attention(x, keys, values, tiles, sizes), qkv, slope)
    theirs = _with_gradient(
        lambda x: attend_blocks(x, keys.float(), values.float(), seen, sizes.causal), qkv.float(), slope
    )
    errors = [(mine - oracle).abs().max() / oracle.abs().max() for mine, oracle in zip(ours, theirs, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one is


@torch.enable_grad()
def _with_gradient(attend: Callable[[Tensor], Tensor], qkv: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """A result and the gradient of its sum weighted by `slope`, in fp32."""
    x = qkv.clone().requires_grad_(True)
    out = attend(x)
    out.backward(slope.to(out.dtype))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out.detach().float(), x.grad.float()
