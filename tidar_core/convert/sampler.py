"""Which documents a step trains on: fixed by the seed and the step, so that a resumed run sees the same."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from tidar_core.convert.blocks import anchor_places
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.shards import Corpus


def anchor_counts(corpus: Corpus, documents: Iterable[int], block: int, max_positions: int) -> dict[int, int]:
    """What these documents bring to a drafter: anchors that blocks can stand behind."""
    return {index: len(anchor_places(corpus.document(index)[1], block, max_positions)) for index in documents}


class Sampler:
    """Goes through documents in a new order each epoch. document: tokens and own of one; of each the first `longest`
    are taken. brings: how much there is to learn in each; those that bring nothing are left out."""

    def __init__(
        self,
        document: Callable[[int], tuple[np.ndarray, np.ndarray]],
        brings: Mapping[int, int],
        longest: int,
        seed: int,
    ):
        self._document, self._brings, self._longest, self._seed = document, brings, longest, seed
        self._documents = np.array([index for index, some in brings.items() if some], dtype=np.int64)
        self._drawn = -1, self._documents

    def __len__(self) -> int:
        return len(self._documents)

    def next_documents(
        self, progress: Progress, wanted: int, most: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Documents (tokens, own) that bring about `wanted` together, each at most `most` where that is given. Moves
        `progress` on; where documents were added since its epoch began, a new epoch begins."""
        if progress.documents != len(self):
            progress.epoch += progress.documents > 0
            progress.documents, progress.place = len(self), 0
        chosen: list[tuple[np.ndarray, np.ndarray]] = []
        found = 0
        order = self._order(progress.epoch)
        while found < wanted and len(chosen) < 4 * len(self):
            if progress.place == len(self):
                progress.epoch, progress.place = progress.epoch + 1, 0
                order = self._order(progress.epoch)
            index = int(order[progress.place])
            progress.place += 1
            tokens, own = self._document(index)
            chosen.append((tokens[: self._longest], own[: self._longest]))
            found += self._brings[index] if most is None else min(most, self._brings[index])
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
