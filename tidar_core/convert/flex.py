"""The trainer's attention by FlexAttention over packed rows, one call for all documents or blocks: of clean rows on a
GPU, and of mask rows where `fused.py` cannot be.

What a row sees is at most two runs of keys: of its document, and of its own block. Which tiles of 128 rows and 128
keys matter follows from the runs' ends directly, so that no mask over all rows and keys is ever made.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.attention import Attention, CleanKV
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.convert.ops import compiled
from tidar_core.kernels.ops import Rotary, layer_windows
from tidar_core.kernels.reference import rotate_qkv, split_heads
from tidar_core.layout import WithinBlock
from tidar_core.model.decoder import layer_qk_norm
from tidar_core.model.weights import ModelWeights

TILE = 128

log = logging.getLogger("tidar")


@dataclass(frozen=True, slots=True)
class Seen:
    """The keys that each row sees: first <= key < end, or own_first <= key < own_end. int32 [rows] each."""

    first: Tensor
    end: Tensor
    own_first: Tensor
    own_end: Tensor

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's mask_mod. It holds tensors alone, so that the compiled kernel serves every step."""
        first, end, own_first, own_end = self.first, self.end, self.own_first, self.own_end

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            document = (key >= first[row]) & (key < end[row])
            return document | ((key >= own_first[row]) & (key < own_end[row]))

        return visible


def flex_clean_attention(
    config: ModelConfig, weights: ModelWeights, rotary: Rotary, pack: Pack, clean: CleanKV
) -> Attention:
    """As `attention.clean_attention`."""
    rows = len(pack.tokens)
    row = torch.arange(rows, dtype=torch.int32, device=pack.tokens.device)
    none = torch.zeros_like(row)
    seen = Seen(row - pack.positions.int(), row + 1, none, none)
    mask_of = _layer_masks(config, seen, row, rows)

    def attention(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = clean.keep(rotated(config, weights, rotary, pack.positions, layer, qkv), config)
        return _attend(q, k, v, mask_of(layer))

    return attention


def flex_mask_attention(
    config: ModelConfig,
    weights: ModelWeights,
    rotary: Rotary,
    pack: Pack,
    clean: CleanKV,
    blocks: Blocks,
    within_block: WithinBlock,
) -> Attention:
    """As `attention.mask_attention`: keys are all clean rows, then all mask rows."""
    seen = mask_rows_see(pack, blocks, within_block)
    mask_of = _layer_masks(config, seen, seen.first + blocks.positions.int(), len(pack.tokens) + len(blocks.positions))

    def attention(layer: int, qkv: Tensor) -> Tensor:
        rows = rotated(config, weights, rotary, blocks.positions, layer, qkv)
        q, k, v = (each.transpose(0, 1) for each in split_heads(rows, config.kv_heads, config.head_dim))
        keys, values = torch.cat((clean.keys[layer], k), dim=1), torch.cat((clean.values[layer], v), dim=1)
        return _attend(q, keys, values, mask_of(layer))

    return attention


def _layer_masks(config: ModelConfig, seen: Seen, place: Tensor, keys: int) -> Callable[[int], Any]:
    """FlexAttention's mask of each layer. place: int32 [rows], where a row's own token would stand among the keys."""
    whole, windows = block_mask(seen, keys), layer_windows(config)
    if not windows:
        return lambda layer: whole
    nearer = torch.maximum(seen.first, place + 1 - (config.window or 0))
    windowed = block_mask(replace(seen, first=nearer), keys)
    return lambda layer: windowed if windows[layer] else whole


def mask_rows_see(pack: Pack, blocks: Blocks, within_block: WithinBlock) -> Seen:
    """What the mask rows see, among all clean rows and, behind them, all mask rows."""
    device = pack.tokens.device
    starts = torch.tensor([start for start, _ in pack.spans], dtype=torch.int32)
    first = starts[torch.from_numpy(blocks.document)].repeat_interleave(blocks.block).to(device)
    contexts = torch.from_numpy(blocks.context).int().repeat_interleave(blocks.block).to(device)
    row = torch.arange(len(blocks.positions), dtype=torch.int32, device=device)
    own_first = len(pack.tokens) + row // blocks.block * blocks.block
    own_end = len(pack.tokens) + row + 1 if within_block == "causal" else own_first + blocks.block
    return Seen(first, first + contexts, own_first, own_end)


def flex_runs(config: ModelConfig, embedding: Tensor, report: Callable[[str], None]) -> bool:
    """Whether FlexAttention compiles for these heads where the embedding lies; if not, one line to `report`."""
    try:
        q, k, v = (
            embedding.new_zeros(heads, TILE, config.head_dim).requires_grad_()
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        )
        row = torch.arange(TILE, dtype=torch.int32, device=embedding.device)
        _attend(q, k, v, block_mask(Seen(row, row + 1, row, row), TILE)).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # Triton or the compiler may be missing or broken in many ways
        report(f"training without FlexAttention, which is slower: {type(error).__name__}")
        return False
    return True


def tiles(seen: Seen, keys: int) -> tuple[Tensor, Tensor]:
    """bool [row tiles, key tiles]: those in which some row may see some key, and those in which every row sees
    every key. Rows of a tile that lie in two documents make the first a little too large, never too small."""
    rows = len(seen.first)
    padded = torch.arange(-(-rows // TILE) * TILE, device=seen.first.device).clamp_(max=rows - 1)
    tile = torch.arange(-(-keys // TILE), device=seen.first.device)
    some = torch.zeros(len(padded) // TILE, len(tile), dtype=torch.bool, device=tile.device)
    every = some.clone()
    for first, end in ((seen.first, seen.end), (seen.own_first, seen.own_end)):
        low, high = first[padded].view(-1, TILE), end[padded].view(-1, TILE)
        none = (high <= low).all(dim=1)
        reach = (tile >= low.amin(1)[:, None] // TILE) & (tile < -(-high.amax(1)[:, None] // TILE))
        some |= reach & ~none[:, None]
        every |= (tile * TILE >= low.amax(1)[:, None]) & ((tile + 1) * TILE <= high.amin(1)[:, None])
    return some, every


def block_mask(seen: Seen, keys: int) -> Any:
    """FlexAttention's sparse mask."""
    from torch.nn.attention.flex_attention import BlockMask

    some, every = tiles(seen, keys)
    partial, whole = _listed(some & ~every), _listed(every)
    return BlockMask.from_kv_blocks(
        *partial, *whole, BLOCK_SIZE=TILE, mask_mod=seen.rule(), seq_lengths=(len(seen.first), keys)
    )


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles has, and which: those that count come first."""
    order = table.int().argsort(dim=1, descending=True, stable=True).int()
    return table.sum(1, dtype=torch.int32)[None, None], order[None, None]


def rotated(
    config: ModelConfig, weights: ModelWeights, rotary: Rotary, positions: Tensor, layer: int, qkv: Tensor
) -> Tensor:
    """`rotate_qkv` of a layer's rows."""
    norms = layer_qk_norm(weights.layers[layer], config.norm_eps)
    turned: Tensor = _rotation(qkv.device.type)(qkv, positions, rotary.of(layer), config.kv_heads, norms)
    return turned


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    out = _flex(q.device.type)(q[None], k[None], v[None], block_mask=mask, enable_gqa=True)[0]
    return out.transpose(0, 1).reshape(q.shape[1], -1)


@lru_cache(maxsize=2)
def _rotation(device: str) -> Callable[..., Tensor]:
    """`rotate_qkv`; on a GPU compiled, since it goes through memory a dozen times otherwise."""
    return compiled(rotate_qkv, log.warning) if device == "cuda" else rotate_qkv


@lru_cache(maxsize=2)
def _flex(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled on a GPU; elsewhere it is its own plain definition, for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=True) if device == "cuda" else plain
