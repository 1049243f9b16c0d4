"""What the decoder asks of a device: the rows of a step, the K/V pages, and the record of operations."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tidar_core.config import Activation, Experts, ModelConfig
from tidar_core.kernels.experts import Routed
from tidar_core.kernels.rules import RuleNumbers, pick_listed
from tidar_core.kernels.succession import Carried, Decided, carry, decide, renew
from tidar_core.model.float8 import FLOAT8
from tidar_core.model.rope import inverse_frequencies
from tidar_core.model.weights import AdapterWeights, LowRank, ModelWeights, SlotHead
from tidar_core.sampling.picking import pick_tokens
from tidar_core.sampling.token_rule import TokenRule


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward pass: all verify rows (padding among them), then all mask rows.

    All tensors are int32. positions, sequence (row of `page_table`), context_end, tail_start, tail_end: [rows].
    A row sees the page positions below its context_end (in layers with a window, of these the ones in the window that
    ends with its own position) and the mask rows tail_start <= k < tail_end, counted from the first mask row.
    page_table: [sequences, pages]. write_slots: [verify], page * page_size + offset.
    """

    verify: int
    positions: Tensor
    sequence: Tensor
    context_end: Tensor
    tail_start: Tensor
    tail_end: Tensor
    page_table: Tensor
    write_slots: Tensor

    def apart(self) -> tuple["StepRows", "StepRows"]:
        """The verify rows alone and the mask rows alone, as `Ops.rotate_and_store` needs them."""
        verifying = replace(self, positions=self.positions[: self.verify])
        masks = replace(self, verify=0, positions=self.positions[self.verify :], write_slots=self.write_slots[:0])
        return verifying, masks


@dataclass(frozen=True, slots=True)
class KVCache:
    """K/V pages of all layers. Page 0 is the trash page that padding rows write.

    keys: [layers, pages, kv_heads, head_dim, page_size] (keys lie side by side, so that one load takes the same
    coordinate of several). values: [layers, pages, kv_heads, page_size, head_dim]. Where these are in 8 bits
    (`float8.to_float8`, one scale a key or value): key_scales, value_scales, fp32 [layers, pages, kv_heads, page_size].
    windows: for each layer, how many positions a row sees, its own the last; 0 for all.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """How many positions the rows of a layer see, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.keys.shape[-1]


def empty_cache(config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Pages without anything in them, all zero."""
    heads = (config.layers, pages, config.kv_heads)
    keys = torch.zeros(*heads, config.head_dim, page_size, dtype=dtype, device=device)
    values = torch.zeros(*heads, page_size, config.head_dim, dtype=dtype, device=device)
    if dtype != FLOAT8:
        return KVCache(keys, values, windows=layer_windows(config))
    key_scales, value_scales = torch.ones(2, *heads, page_size, device=device)
    return KVCache(keys, values, key_scales, value_scales, layer_windows(config))


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """`KVCache.windows` of a model; nothing where all layers see all."""
    if config.window is None or not config.windowed:
        return ()
    return tuple(config.window if layer in config.windowed else 0 for layer in range(config.layers))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary tables, fp32 [max_positions, head_dim / 2]: coordinate i of a head turns with i + head_dim / 2.

    `others`: the tables of the layers `apart`, which know no positions, or turn at another pace.
    """

    cos: Tensor
    sin: Tensor
    apart: tuple[int, ...] = ()
    others: "Rotary | None" = None

    def of(self, layer: int) -> "Rotary":
        """The tables of one layer."""
        return self.others if self.others is not None and layer in self.apart else self

    def at(self, positions: Tensor) -> "Rotary":
        """The rows of these positions, int64 [rows], in place of all positions."""
        others = None if self.others is None else self.others.at(positions)
        return Rotary(self.cos[positions], self.sin[positions], self.apart, others)


def rotary_tables(config: ModelConfig, device: torch.device) -> Rotary:
    """The rotary embedding of all positions, with the model's scaling, computed in fp32 as transformers does."""
    cos, sin = _tables(config, *inverse_frequencies(config), device)
    if config.unrotated:
        return Rotary(cos, sin, config.unrotated, Rotary(torch.ones_like(cos), torch.zeros_like(sin)))
    if config.window_theta is not None:
        unscaled = replace(config, rope_theta=config.window_theta, rope_scaling=None)
        return Rotary(cos, sin, config.windowed, Rotary(*_tables(config, *inverse_frequencies(unscaled), device)))
    return Rotary(cos, sin)


def _tables(config: ModelConfig, inverse: Tensor, factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), inverse)
    scale = torch.where(inverse == 0, config.rotary_scale, factor)  # a scaling is nothing to what does not rotate
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Qwen3's RMSNorm of each query and key head before the rotation; weights [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class GuessedSlots:
    """Slots 1 … b-1 of some proposals, proposal by proposal, whose drafts are to be picked.

    hidden: [slots, hidden]. logits: [slots, vocab]; a slot head may change those of the tokens that it scores anew, in
    place. rules: one a slot; shift: int64 [slots], what their positions lack
    (`tidar_core.sampling.picking.pick_tokens`). anchors: int64 [proposals], the token that each proposal follows.
    counts: how many slots each proposal has.
    """

    hidden: Tensor
    logits: Tensor
    rules: Items[TokenRule]
    anchors: Tensor
    counts: Items[int]
    shift: Tensor | None = None


DraftSlots = Callable[[SlotHead, Tensor, Tensor, GuessedSlots], Tensor | None]
"""`engine.drafting.pick_drafts` by a slot head, given the embedding and the rows of the model's head, [vocab, hidden]
each: int64 [slots]; None where it does not support these tensors or rules."""


class Pick(Protocol):
    """`tidar_core.sampling.picking.pick_tokens`, or a function with the same results."""

    def __call__(self, logits: Tensor, rules: Items[TokenRule], shift: Tensor | None = None, /) -> Tensor: ...


PARTIAL_BYTES = 256 << 20
"""Of attention's partial results at once, on a GPU; more rows than fit are attended part by part."""

Layers = Callable[[Tensor, StepRows, KVCache], Tensor]
"""All layers of a model: x [rows, hidden], what its rows see, and the pages -> hidden states [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of the decoder's operations. x is [rows, in], weights are [out, in] before `pack`.

    pack(weight): a base matrix in the layout that `linear` of this record reads, or those of a layer's experts,
        [experts, out, in], as `mix_experts` does; pack_head: the head's, for `head`; pack_adapter: one of an adapter's,
        or a router.

    linear(x, weight, bias, low_rank, first_mask_row): x weightᵀ + bias, and on rows from first_mask_row on also
        the adapter's x aᵀ bᵀ. Base rows never see the adapter.
    add_norm(x, residual, weight, eps): residual + x (x alone where residual is None), and its RMSNorm times
        weight. Gives (normed, residual); may update the residual in place.
    rotate_and_store(qkv, rows, rotary, cache, layer, qk_norm): QK-norm, rotation of q and k, and the page write
        of the verify rows' K/V; mask rows never write. Gives qkv ([rows, (heads + 2 kv_heads) * head_dim]) back,
        rotated; may work in place.
    attend(qkv, rows, cache, layer): attention of each row over what it sees -> [rows, heads * head_dim].
    gate(gate_up, activation): activation(gate) * up -> [rows, out / 2].
    head(x, weight): logits [rows, vocab]. fp32 from the Triton kernels and from the CPU's own products; in x's dtype
        from `reference.head`, which stands in where those do not fit or are not wanted.
    route(x, router, bias, experts): `experts.choose` by the router's logits. The router keeps the weights' dtype where
        other matrices are rounded to fewer bits.
    mix_experts(x, routed, gate_up, down, activation): the MLPs of each row's experts, added by their shares -> as x.
    row_multiple: `linear` and `head` only get multiples of so many rows, at which a row has the same bits whatever
        their number. (MKL's fp32 kernels treat a remainder of four apart, oneDNN's bf16 ones a single row.)
    bind_layers(weights, adapter, rotary): `decoder.run_layers` over packed weights as one call; returns None where it
        does not support these weights. None where a device has no such call. On a CPU it gives bit for bit what the
        single operations give; on a GPU norms round once where those round twice.
    draft_slots: drafting by a slot head as one call; None where a device has no such call.
    float8_pages: whether `rotate_and_store` and `attend` support pages in 8 bits.
    pick(logits, rules, shift): the token of each row: `tidar_core.sampling.picking.pick_tokens`.
    pick_listed(scores, candidates, numbers): the same among a few candidates: `tidar_core.kernels.rules.pick_listed`.
    carry, decide, renew: as in `tidar_core.kernels.succession`.
    """

    name: str
    row_multiple: int
    pack: Callable[[Tensor], Tensor]
    pack_head: Callable[[Tensor], Tensor]
    pack_adapter: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None, LowRank | None, int], Tensor]
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[[Tensor, StepRows, Rotary, KVCache, int, QKNorm | None], Tensor]
    attend: Callable[[Tensor, StepRows, KVCache, int], Tensor]
    gate: Callable[[Tensor, Activation], Tensor]
    head: Callable[[Tensor, Tensor], Tensor]
    route: Callable[[Tensor, Tensor, Tensor | None, Experts], Routed]
    mix_experts: Callable[[Tensor, Routed, Tensor, Tensor, Activation], Tensor]
    bind_layers: Callable[[ModelWeights, AdapterWeights | None, Rotary], Layers | None] | None = None
    draft_slots: DraftSlots | None = None
    float8_pages: bool = False
    pick: Pick = pick_tokens
    pick_listed: Callable[[Tensor, Tensor, RuleNumbers], Tensor] = pick_listed
    carry: Callable[[StepRows, Tensor, Tensor, Carried, int], None] = carry
    decide: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Decided] = decide
    renew: Callable[[Decided, Tensor, Tensor], None] = renew
