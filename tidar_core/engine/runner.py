"""The model on its device: a batch in, hidden states out, and the scores of chosen rows."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.engine.batch import Batch
from tidar_core.kernels.ops import KVCache, Layers, Ops
from tidar_core.model.weights import AdapterWeights, ModelWeights
from tidar_core.request import TokenLogprobs
from tidar_core.sampling import TokenRule


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything that a forward pass needs, on one device."""

    ops: Ops
    config: ModelConfig
    weights: ModelWeights
    adapter: AdapterWeights | None
    cache: KVCache
    layers: Layers

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Runs all rows of a step and writes the verify rows' K/V pages. -> hidden states [rows, hidden]."""
        x = self.weights.embedding[batch.tokens]
        if self.adapter is not None and len(batch.slots):
            x = torch.cat((x, self.adapter.slot_embeddings[batch.slots]))
        return self.layers(x, batch.rows, self.cache)

    @torch.inference_mode()
    def scores(self, hidden: Tensor, rows: Items[int]) -> Tensor:
        """The logits [rows, vocab] of some rows of `hidden`."""
        padded = [*rows, *[rows[-1]] * (-len(rows) % self.ops.row_multiple)]
        return self.ops.head(hidden[torch.tensor(padded, device=self.device)], self.weights.head)[: len(rows)]


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Items[int], rules: Items[TokenRule]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the raw scores for each row whose rule asks for them; None for the others."""
    found: list[TokenLogprobs | None] = []
    for row, token, rule in zip(logits, tokens, rules, strict=True):
        wanted = rule.params.logprobs
        if wanted is None or token < 0:
            found.append(None)
            continue
        logprobs = row.float().log_softmax(-1)
        best, ids = logprobs.topk(wanted)
        top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
        found.append(TokenLogprobs(token, float(logprobs[token]), top))
    return found


@torch.inference_mode()
def ranked_logprobs(logits: Tensor, tokens: Items[int], wanted: int) -> list[TokenLogprobs]:
    """Log-probabilities and ranks of one token a row, and of the `wanted` likeliest beside it."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device).unsqueeze(-1))
    ranks = (logprobs > own).sum(-1) + 1
    best, ids = logprobs.topk(wanted)
    rows = zip(tokens, own.squeeze(-1).tolist(), ids.tolist(), best.tolist(), ranks.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(likeliest, scores, strict=True)), rank)
        for token, logprob, likeliest, scores, rank in rows
    ]
