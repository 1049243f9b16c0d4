"""Checkpoints that carry a second view of their attention, for drafting: Orthrus (arXiv 2605.12825).

Such a checkpoint is an ordinary Qwen3 one, the base's weights as they were, with four more projections and two more
norms in each layer, called as the base's with `_diff` behind: what mask rows use in place of the base's. MLPs, norms,
embedding and head are shared, and mask rows read the base's own K/V. A proposal begins with a known token, its other
slots hold the mask token, its slots see each other both ways, and each guesses the token behind its own position
(`BlockForm.slot_0` "anchor").

Its authors decode in two passes a cycle: one drafts behind the anchor, one verifies. Here both are one pass, as in
TiDAR: while drafts are verified, proposals are laid behind the outcomes that are likely. The text is the base's, which
may say any token of its vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tidar_core.config import ConfigError, ModelConfig
from tidar_core.model.adapter import Adapter
from tidar_core.model.adapter_config import AdapterConfig, BaseIdentity
from tidar_core.model.loading import Checkpoint, checked, open_checkpoint, read_fused
from tidar_core.model.own_drafter import masked_slots
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.model.weights import AdapterWeights, LayerAdapter, OwnAttention

ARCHITECTURE = "OrthrusLM"
REPORTED_ACCEPTANCE = (0.8,)
"""What the draft policy expects until it has seen some: a cycle of 4 to 8 tokens, as published for Qwen3-1.7B, 4B and
8B (arXiv 2605.12825, table 1: tokens a pass, of two passes a cycle; others measured the less)."""


@dataclass(frozen=True, slots=True)
class SecondView:
    """What `config.json` says of drafting: slots of a proposal, and the token that stands in all but the first."""

    block_length: int
    mask_token: int


def read_second_view(directory: Path) -> SecondView | None:
    """What the checkpoint in `directory` says of its second view; None where it has none. Raises ConfigError."""
    path = directory / "config.json"
    stated = read_json(path)
    if ARCHITECTURE not in (stated.get("architectures") or ()):
        return None
    block, mask = stated.get("block_size"), stated.get("mask_token_id")
    if not isinstance(block, int) or block < 2 or not isinstance(mask, int) or mask < 0:
        raise ConfigError(
            f"{path}: drafting needs a block_size above 1 and a mask_token_id, not {block!r} and {mask!r}: correct "
            "them, or serve the model with --adapter none"
        )
    return SecondView(block, mask)


def load_second_view(
    view: SecondView, source: ModelSource, config: ModelConfig, base: BaseIdentity, embedding: Tensor
) -> Adapter:
    """The drafter of a checkpoint with a second view, in the dtype and on the device of `embedding` ([vocab, hidden]).

    Raises ConfigError where a tensor is missing or misshapen, where the vocabulary has no such mask token, and where
    attention has biases.
    """
    slots = masked_slots(embedding, view.mask_token, view.block_length, base.name)
    if config.qkv_bias or config.o_bias:
        raise ConfigError(f"{base.name}: a second view of attention with biases is not supported: use --adapter none")
    with open_checkpoint(source, config) as checkpoint:
        attention = tuple(
            _read_attention(checkpoint, layer, config, base.name, embedding.dtype, embedding.device)
            for layer in range(config.layers)
        )
    described = AdapterConfig(  # nothing is of low rank, so the rank is that of nothing
        kind="projections",
        base=base,
        rank=1,
        projections=("qkv", "o"),
        block_length=view.block_length,
        within_block="bidirectional",
        slot_0="anchor",
        labels="shifted",
        holds=REPORTED_ACCEPTANCE,
    )
    layers = (LayerAdapter(),) * config.layers
    return Adapter(described, AdapterWeights(slots, layers, attention=attention), "of its own")


def _read_attention(
    checkpoint: Checkpoint, layer: int, config: ModelConfig, model: str, dtype: torch.dtype, device: torch.device
) -> OwnAttention:
    prefix, hidden = f"model.layers.{layer}.self_attn.", config.hidden_size
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def read(**wanted: tuple[int, ...]) -> Tensor:
        shapes = ((f"{prefix}{stem}_diff.weight", shape) for stem, shape in wanted.items())
        return read_fused(checkpoint, checked(checkpoint, shapes, model), dtype, device)

    return OwnAttention(
        qkv=read(q_proj=(q_size, hidden), k_proj=(kv_size, hidden), v_proj=(kv_size, hidden)),
        q_norm=read(q_norm=(config.head_dim,)) if config.qk_norm else None,
        k_norm=read(k_norm=(config.head_dim,)) if config.qk_norm else None,
        o=read(o_proj=(hidden, q_size)),
    )
