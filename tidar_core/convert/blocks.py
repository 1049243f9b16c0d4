"""Which mask blocks are trained on: anchors drawn at random in packed documents.

A block stands for a proposal of the engine (`tidar_core.layout`): its slot s sits at position c + s, sees the
document's positions below its context end c, and the slots of its own block. It should say what the base says at
position c + s when it has read everything before: the answer of the base's row c + s - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

BlockSizes = Literal["whole", "mixed", "growing"]
GROWN = 0.5  # of the training, after which growing blocks are whole


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents side by side, one row a token. tokens, positions: int64 [rows]; positions start anew with each
    document. spans: first row and length of each. own: bool [rows] on the CPU, the tokens to learn from."""

    tokens: Tensor
    positions: Tensor
    spans: tuple[tuple[int, int], ...]
    own: np.ndarray


@dataclass(frozen=True, slots=True)
class Blocks:
    """Mask blocks over a pack, sorted by document and context end. document, context: int64 [blocks] on the CPU.

    positions: int64 [blocks * block], of the mask rows. target_rows: int64 [blocks, block], the pack's row whose
    answer each slot should match. trained: bool [blocks, block], false behind the end of the own words.
    """

    block: int
    document: np.ndarray
    context: np.ndarray
    positions: Tensor
    target_rows: Tensor
    trained: Tensor

    def __len__(self) -> int:
        return len(self.context)

    def part(self, first: int, last: int) -> "Blocks":
        """Blocks first … last - 1."""
        rows = slice(first * self.block, last * self.block)
        some = slice(first, last)
        return Blocks(
            self.block, self.document[some], self.context[some],
            self.positions[rows], self.target_rows[some], self.trained[some],
        )  # fmt: skip


def pack_documents(documents: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> Pack:
    """Lays documents (tokens, own) side by side."""
    lengths = [len(tokens) for tokens, _ in documents]
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).tolist()
    tokens = np.concatenate([tokens for tokens, _ in documents]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    own = np.concatenate([own for _, own in documents])
    return Pack(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        tuple(zip(starts, lengths, strict=True)),
        own,
    )


def block_of_step(sizes: BlockSizes, whole: int, used: float, draw: np.random.Generator) -> int:
    """Slots of the blocks that a step trains on, 2 to `whole`: all of them, as many as are drawn, or more and more from
    2 on. used: the share of the training that is over."""
    if sizes == "mixed":
        return int(draw.integers(2, whole + 1))
    if sizes == "growing":
        return min(whole, 2 + int(used / GROWN * (whole - 1)))
    return whole


def blocks_ahead(sizes: BlockSizes, whole: int, used: float) -> range:
    """All that `block_of_step` may give from here on."""
    if sizes == "growing":
        return range(min(whole, 2 + int(used / GROWN * (whole - 1))), whole + 1)
    return range(2 if sizes == "mixed" else whole, whole + 1)


def anchor_places(own: np.ndarray, block: int, max_positions: int) -> np.ndarray:
    """Context ends at which a block of one document learns something: slots 0 and 1 stand for own words."""
    places = np.flatnonzero(own[:-1] & own[1:])
    return places[(places >= 1) & (places + block <= max_positions)]


def draw_blocks(pack: Pack, per_document: int, block: int, max_positions: int, draw: np.random.Generator) -> Blocks:
    """Up to `per_document` anchors in each document, without repetition."""
    chosen = []
    for start, length in pack.spans:
        places = anchor_places(pack.own[start : start + length], block, max_positions)
        count = min(per_document, len(places))
        chosen.append(np.sort(draw.choice(places, count, replace=False)) if count else places[:0])
    return lay_blocks(pack, chosen, block)


def narrowed(pack: Pack, blocks: Blocks) -> tuple[Pack, Blocks]:
    """The documents that consecutive blocks of a pack lie in, and the blocks over these alone."""
    first, last = int(blocks.document[0]), int(blocks.document[-1])
    start, end = pack.spans[first][0], pack.spans[last][0] + pack.spans[last][1]
    spans = tuple((row - start, length) for row, length in pack.spans[first : last + 1])
    kept = Pack(pack.tokens[start:end], pack.positions[start:end], spans, pack.own[start:end])
    return kept, replace(blocks, document=blocks.document - first, target_rows=blocks.target_rows - start)


def lay_blocks(pack: Pack, contexts: Sequence[np.ndarray], block: int) -> Blocks:
    """Blocks at given context ends (ascending) of each document of the pack."""
    document = np.repeat(np.arange(len(contexts)), [len(each) for each in contexts])
    context = np.concatenate(contexts).astype(np.int64)
    starts, lengths = (np.array(column)[document] for column in zip(*pack.spans, strict=True))
    slots = context[:, None] + np.arange(block)
    inside = slots < lengths[:, None]
    own = pack.own[starts[:, None] + np.minimum(slots, lengths[:, None] - 1)] & inside
    trained = np.logical_and.accumulate(own, axis=1)
    targets = starts[:, None] + np.minimum(slots, lengths[:, None]) - 1
    device = pack.tokens.device
    return Blocks(
        block,
        document,
        context,
        torch.from_numpy(slots.reshape(-1)).to(device),
        torch.from_numpy(targets).to(device),
        torch.from_numpy(trained).to(device),
    )
