"""The model on its device: a batch in, hidden states out, and tokens picked from chosen rows."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.engine.batch import Batch
from tidar_core.kernels.ops import KVCache, Ops, Rotary
from tidar_core.model.decoder import paged_attention, run_layers
from tidar_core.model.weights import AdapterWeights, ModelWeights
from tidar_core.sampling import TokenRule, pick_tokens


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything that a forward pass needs, on one device."""

    ops: Ops
    config: ModelConfig
    weights: ModelWeights
    adapter: AdapterWeights | None
    cache: KVCache
    rotary: Rotary

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Runs all rows of a step and writes the verify rows' K/V pages. -> hidden states [rows, hidden]."""
        x = self.weights.embedding[batch.tokens]
        if self.adapter is not None and len(batch.slots):
            x = torch.cat((x, self.adapter.slot_embeddings[batch.slots]))
        attention = paged_attention(self.ops, self.config, self.weights, batch.rows, self.rotary, self.cache)
        return run_layers(self.ops, self.config, self.weights, self.adapter, x, batch.rows.verify, attention)

    @torch.inference_mode()
    def pick(self, hidden: Tensor, rows: Items[int], rules: Items[TokenRule]) -> list[int]:
        """The token that each rule picks from its row of `hidden`; -1 where the scores are not numbers."""
        if not rows:
            return []
        padded = [*rows, *[rows[-1]] * (-len(rows) % self.ops.row_multiple)]
        logits = self.ops.head(hidden[torch.tensor(padded, device=self.device)], self.weights.head)
        return pick_tokens(logits[: len(rows)], rules).tolist()
