"""Which documents and anchors a step trains on: fixed by the seed and the step, so that a resumed run sees the same."""

from collections.abc import Sequence

import numpy as np

from tidar_core.convert.blocks import anchor_places
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.shards import Corpus


class Sampler:
    """Goes through the documents in a new order each epoch; anchors are drawn anew for every step."""

    def __init__(self, corpus: Corpus, documents: Sequence[int], block: int, max_positions: int, seed: int):
        self._corpus = corpus
        self._longest = max_positions
        self._seed = seed
        counts = {index: len(anchor_places(corpus.document(index)[1], block, max_positions)) for index in documents}
        self._documents = np.array([index for index in documents if counts[index]], dtype=np.int64)
        self._places = counts
        self._drawn = -1, self._documents

    def __len__(self) -> int:
        return len(self._documents)

    def next_documents(self, progress: Progress, blocks: int, per_document: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Documents (tokens, own) with room for about `blocks` anchors, at most `per_document` in each. Moves
        `progress` on; where documents were added since its epoch began, a new epoch begins."""
        if progress.documents != len(self):
            progress.epoch += progress.documents > 0
            progress.documents, progress.place = len(self), 0
        chosen: list[tuple[np.ndarray, np.ndarray]] = []
        found = 0
        order = self._order(progress.epoch)
        while found < blocks and len(chosen) < 4 * len(self):
            if progress.place == len(self):
                progress.epoch, progress.place = progress.epoch + 1, 0
                order = self._order(progress.epoch)
            index = int(order[progress.place])
            progress.place += 1
            tokens, own = self._corpus.document(index)
            chosen.append((tokens[: self._longest], own[: self._longest]))
            found += min(per_document, self._places[index])
        return chosen

    def draw(self, progress: Progress) -> np.random.Generator:
        """The random numbers of this step."""
        return np.random.default_rng((self._seed, progress.step, 1))

    def _order(self, epoch: int) -> np.ndarray:
        """Kept for all steps of an epoch: of many documents it takes long to draw."""
        if self._drawn[0] != epoch:
            draw = np.random.default_rng((self._seed, epoch, len(self), 2))
            self._drawn = epoch, draw.permutation(self._documents)
        return self._drawn[1]
