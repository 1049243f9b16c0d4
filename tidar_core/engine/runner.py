"""The model on its device: a batch in, hidden states out, and the scores of chosen rows."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.engine.batch import Batch, BatchSize, build_batch, inputs_of, padding
from tidar_core.engine.graphs import Graphs, bucket
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import KVCache, Layers, Ops
from tidar_core.kernels.succession import Carried
from tidar_core.layout import BlockForm
from tidar_core.model.weights import AdapterWeights, ModelWeights
from tidar_core.request import TokenLogprobs
from tidar_core.sampling.token_rule import TokenRule
from tidar_core.transfer import on_device, sent


@dataclass(frozen=True, slots=True)
class Runner:
    """Everything that a forward pass needs, on one device.

    weights, adapter: packed. vocabulary: where there is a slot head, the model's head [vocab, hidden] before it was
    packed. graphs: captured steps, where the device has CUDA graphs. mask_token: the token that stands for a mask,
    where there is one; it is never picked. form: how the drafter wants its proposals laid.
    """

    ops: Ops
    config: ModelConfig
    weights: ModelWeights
    adapter: AdapterWeights | None
    cache: KVCache
    layers: Layers
    vocabulary: Tensor | None = None
    graphs: Graphs | None = None
    mask_token: int | None = None
    form: BlockForm = field(default_factory=BlockForm)

    @property
    def block_length(self) -> int:
        """Slots of a proposal at most; 0 where there is no drafter."""
        return 0 if self.adapter is None else len(self.adapter.slot_embeddings)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def untypical(self) -> int:
        """`Graphs.untypical`."""
        return 0 if self.graphs is None else self.graphs.untypical

    def padded(self, size: BatchSize) -> BatchSize:
        """The size that a batch is filled up to here."""
        found = None if self.graphs is None else bucket(size, self.graphs.reach)
        if found is not None:
            return found
        multiple = self.ops.row_multiple
        if self.adapter is not None and self.adapter.attention is not None:  # rows of both kinds are multiplied apart
            return replace(size, verify=_up(size.verify, multiple), mask=_up(size.mask, multiple))
        return replace(size, verify=_up(size.verify + size.mask, multiple) - size.mask)

    def batch(self, plans: Items[SequencePlan]) -> Batch:
        """The rows of a step, filled up to the size that such a step has here."""
        return build_batch(plans, self.cache.page_size, self.padded, self.form)

    @torch.inference_mode()
    def forward(self, batch: Batch, carried: Carried | None = None) -> Tensor:
        """Runs all rows of a step and writes the verify rows' K/V pages. -> hidden states [rows, hidden].

        carried: what has to be added to the batch's numbers where the step before it is not over.
        """
        work, numbers = partial(self._run, batch.size), batch.numbers
        if carried is not None:
            numbers = sent(numbers, self.device)
            inputs = inputs_of(numbers, batch.size)
            self.ops.carry(inputs.rows, inputs.tokens, inputs.repeats, carried, self.cache.page_size)
        if self.graphs is None or bucket(batch.size, self.graphs.reach) != batch.size:
            return work(numbers.to(self.device))
        return self.graphs.run(batch.size, self.device, work, numbers)

    @torch.inference_mode()
    def capture(self, size: BatchSize) -> None:
        """Captures the step of a bucket before it is needed, as `Graphs.prepare` does; what it computes goes to the
        trash page."""
        if self.graphs is not None:
            self.graphs.prepare(size, self.device, partial(self._run, size), torch.from_numpy(padding(size)))

    def _run(self, size: BatchSize, numbers: Tensor) -> Tensor:
        inputs = inputs_of(numbers, size)
        x = self.weights.embedding[inputs.tokens]
        if self.adapter is not None and size.mask:
            slots = self.adapter.slot_embeddings[inputs.slots]
            if self.form.slot_0 == "anchor":
                slots = torch.where((inputs.repeats >= 0)[:, None], x[inputs.repeats.clamp(min=0)], slots)
            x = torch.cat((x, slots))
        return self.layers(x, inputs.rows, self.cache)

    @torch.inference_mode()
    def scores(self, hidden: Tensor, rows: Items[int] | Tensor) -> Tensor:
        """The logits [rows, vocab] of some rows of `hidden` [rows, hidden], in the dtype that `Ops.head` gives. Row
        numbers that only the device knows come as int64. A contiguous range is not copied."""
        if isinstance(rows, range) and rows.step == 1 and not len(rows) % self.ops.row_multiple:
            chosen = hidden[rows.start : rows.stop]
        else:
            index = rows if isinstance(rows, Tensor) else on_device(rows, self.device)
            filling = index[-1:].expand(-len(index) % self.ops.row_multiple)
            chosen = hidden[torch.cat((index, filling))]
        scores = self.ops.head(chosen, self.weights.head)[: len(rows)]
        if self.mask_token is not None:
            scores[:, self.mask_token] = -torch.inf
        return scores


def _up(count: int, multiple: int) -> int:
    return count + -count % multiple


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Items[int], rules: Items[TokenRule]) -> list[TokenLogprobs | None]:
    """Log-probabilities by the raw logits [rows, vocab], for each row whose rule asks for them; None for the others."""
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
    """Log-probabilities and ranks by logits [rows, vocab]: of one token a row, and of the `wanted` likeliest."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device).unsqueeze(-1))
    ranks = (logprobs > own).sum(-1) + 1
    best, ids = logprobs.topk(wanted)
    rows = zip(tokens, own.squeeze(-1).tolist(), ids.tolist(), best.tolist(), ranks.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(likeliest, scores, strict=True)), rank)
        for token, logprob, likeliest, scores, rank in rows
    ]
