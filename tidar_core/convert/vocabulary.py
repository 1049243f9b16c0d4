"""The part of the vocabulary that a step's loss is computed over.

A text uses a small part of a large vocabulary, and most of the rest gets next to no probability from base or draft;
yet it would be most of the head's work. So a step takes the tokens that its own documents hold, the most frequent ones
of the data, and a fresh random sample of all others, each of which stands for many: its logit is raised by the log of
how many. Sums over the vocabulary keep their expected value, and with them the loss and its gradient.

Measured on SmolLM2-135M (49,152 tokens) with 8,192 frequent and 2,048 random ones: the gradient of a step has a cosine
of about 0.99 with that over the whole vocabulary, row by row and summed, early in training and late.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidar_core.convert.shards import Corpus

TAIL_SHARE = 4  # one random token for so many frequent ones
WORTHWHILE = 0.6  # a part larger than this share of the vocabulary saves nothing


@dataclass(frozen=True, slots=True)
class Columns:
    """The head's rows [columns, hidden] that logits are computed with, and what is added to each logit [columns];
    None where that is nothing."""

    head: Tensor
    raised: Tensor | None = None


class Vocabulary:
    """Draws the columns of a step. `frequent` tokens are always among them; 0 takes the whole vocabulary."""

    def __init__(self, corpus: Corpus, head: Tensor, frequent: int):
        self._head = head
        self._tail = frequent // TAIL_SHARE
        self._whole = not frequent or frequent + self._tail > WORTHWHILE * head.shape[0]
        # Equals in frequency go by id: byte-pair vocabularies have their commonest merges first.
        counts = np.bincount(corpus.tokens, minlength=head.shape[0])
        self._frequent = np.argsort(-counts, kind="stable")[:frequent]

    @property
    def columns(self) -> int:
        """How many a step draws, but for those that its documents hold besides."""
        return self._head.shape[0] if self._whole else len(self._frequent) + self._tail

    def draw(self, tokens: Tensor, draw: np.random.Generator) -> Columns:
        """The columns for documents that hold `tokens`."""
        if self._whole:
            return Columns(self._head)
        taken = np.zeros(self._head.shape[0], dtype=bool)
        taken[self._frequent] = True
        taken[tokens.cpu().numpy()] = True
        others = np.flatnonzero(~taken)
        tail = draw.choice(others, min(self._tail, len(others)), replace=False)
        kept = np.flatnonzero(taken)
        raised = torch.zeros(len(kept) + len(tail), dtype=self._head.dtype)
        if len(tail):
            raised[len(kept) :] = math.log(len(others) / len(tail))
        ids = torch.from_numpy(np.concatenate((kept, tail)))
        return Columns(self._head[ids.to(self._head.device)], raised.to(self._head.device))
