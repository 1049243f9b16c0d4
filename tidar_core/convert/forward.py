"""The two passes of a training step: clean rows once, without gradient, and mask rows behind them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.convert.attention import Attention, CleanKV, clean_attention, mask_attention
from tidar_core.convert.blocks import Blocks, Pack
from tidar_core.convert.cpu_blocks import cpu_clean_attention, cpu_mask_attention
from tidar_core.convert.flex import flex_clean_attention, flex_runs
from tidar_core.convert.ops import PLAIN_ROWS, training_ops
from tidar_core.kernels.cpu_blocks import block_ops, supports_blocks
from tidar_core.kernels.cpu_build import CompileError, compiled_library
from tidar_core.kernels.cpu_training import RowOps, row_ops, supports_rows
from tidar_core.kernels.ops import Ops, Rotary, rotary_tables
from tidar_core.layout import WithinBlock
from tidar_core.model.decoder import run_layers
from tidar_core.model.slot_head import corrected
from tidar_core.model.weights import AdapterWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Attends:
    """How clean rows and mask rows attend: with the arguments and the results of `attention.clean_attention` and
    `attention.mask_attention`. prepare: compiles what mask rows need for blocks of these sizes, which else happens in
    the first step that has one."""

    clean: Callable[..., Attention]
    masks: Callable[..., Attention]
    prepare: Callable[[ModelConfig, ModelWeights, Iterable[int], WithinBlock], None] = lambda *given: None


PLAIN = Attends(clean_attention, mask_attention)


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The base model as the trainer runs it: its weights never change."""

    config: ModelConfig
    weights: ModelWeights
    rotary: Rotary
    ops: Ops
    attends: Attends

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype


@dataclass(frozen=True, slots=True)
class Clean:
    """What the clean pass leaves: keys and values of all layers, and the final hidden states [rows, hidden]."""

    pack: Pack
    kv: CleanKV
    hidden: Tensor


def frozen_base(
    config: ModelConfig, weights: ModelWeights, report: Callable[[str], None] = lambda line: None
) -> FrozenBase:
    """The loaded model, ready to train a drafter for. report gets a line where something makes it slower."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    attends, rows = PLAIN, PLAIN_ROWS
    if device.type == "cuda":
        attends = gpu_attends() if flex_runs(config, weights.embedding, report) else PLAIN
    elif device.type == "cpu":
        attends, rows = cpu_ways(config, dtype, report)
    return FrozenBase(config, weights, rotary_tables(config, device), training_ops(device, report, rows), attends)


def cpu_ways(config: ModelConfig, dtype: torch.dtype, report: Callable[[str], None]) -> tuple[Attends, RowOps]:
    """How rows attend and what else is done row by row: by our own kernels where they fit the model and can be
    compiled, else in plain torch."""
    blocks_fit, rows_fit = supports_blocks(config, dtype), supports_rows(config, dtype)
    if not (blocks_fit or rows_fit):
        return PLAIN, PLAIN_ROWS
    try:
        library = compiled_library("training")
    except CompileError as error:
        report(f"training without compiled kernels, which is slower: {error}")
        return PLAIN, PLAIN_ROWS
    attends = PLAIN
    if blocks_fit:
        ops = block_ops(library)
        attends = Attends(partial(cpu_clean_attention, ops), partial(cpu_mask_attention, ops))
    return attends, row_ops(library, dtype) if rows_fit else PLAIN_ROWS


def gpu_attends() -> Attends:
    """Clean rows by FlexAttention, mask rows by kernels of their own; needs Triton, as FlexAttention does."""
    from tidar_core.convert.fused import fused_mask_attention, prepare_blocks

    return Attends(flex_clean_attention, fused_mask_attention, prepare_blocks)


@torch.no_grad()
def run_clean(base: FrozenBase, pack: Pack) -> Clean:
    """Reads the documents as the engine reads them: causal, without the adapter."""
    kv = CleanKV([], [])
    attention = base.attends.clean(base.config, base.weights, base.rotary, pack, kv)
    x = base.weights.embedding[pack.tokens]
    return Clean(pack, kv, run_layers(base.ops, base.config, base.weights, None, x, len(x), attention))


def run_masks(
    base: FrozenBase, adapter: AdapterWeights, clean: Clean, blocks: Blocks, within_block: WithinBlock
) -> Tensor:
    """Final hidden states of the mask rows, [blocks * block, hidden], differentiable in `adapter` (of the base's
    dtype)."""
    attention = base.attends.masks(base.config, base.weights, base.rotary, clean.pack, clean.kv, blocks, within_block)
    slots = adapter.slot_embeddings[: blocks.block]
    x = slots.expand(len(blocks), -1, -1).reshape(-1, slots.shape[1])
    return run_layers(base.ops, base.config, base.weights, adapter, x, 0, attention)


def run_slot_head(
    base: FrozenBase,
    adapter: AdapterWeights,
    clean: Clean,
    blocks: Blocks,
    drafted: Tensor,
    alone: Tensor | None = None,
) -> Tensor:
    """`drafted`, the hidden states of `run_masks`, corrected by the slot head; unchanged where there is none. alone:
    bool [blocks], blocks to leave unchanged.

    Each slot knows the document's token before it. In decoding it knows the draft before it, which is that token as
    long as drafts are right; behind a wrong one nothing counts.
    """
    if adapter.slot_head is None:
        return drafted
    own = drafted.view(len(blocks), blocks.block, -1)
    # The row whose answer a slot should match is that of the token before it.
    before = base.weights.embedding[clean.pack.tokens[blocks.target_rows]]
    informed = corrected(adapter.slot_head, own, before)
    if alone is not None:
        informed = torch.where(alone[:, None, None], own, informed)
    return informed.reshape(drafted.shape)
