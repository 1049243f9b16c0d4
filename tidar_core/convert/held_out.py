"""What a drafter is worth: tokens per step on held-out documents, by simulated full pre-drafting.

A greedy sequence under full pre-drafting moves from context end c to c + a, where a - 1 drafts behind slot 0 hold in
a row. Whether the draft of slot s at c holds does not depend on what was drafted before, so all blocks of a window
are judged at once, and then walked through as decoding would: every step lands on the next context end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidar_core.convert.blocks import Blocks, anchor_places, lay_blocks, pack_documents
from tidar_core.convert.forward import FrozenBase, run_clean, run_masks, run_slot_head
from tidar_core.convert.shards import KINDS, Corpus, Kind, digest_of
from tidar_core.layout import WithinBlock
from tidar_core.model.slot_head import CANDIDATES, rescored
from tidar_core.model.weights import AdapterWeights

WINDOW = 48  # context ends judged in each of so many documents; more in each where there are fewer
DOCUMENTS = 64
# On a CPU, a model that computes a token with more numbers in its layers is measured on fewer documents: else that
# would take longer than the training between two measurements.
CPU_NUMBERS, FEWEST_DOCUMENTS = 2e8, 8
TOKENS_AT_ONCE = 4096
BLOCKS_AT_ONCE = {"cpu": 64, "cuda": 256}


class Abandoned(Exception):
    """A measurement was ended before it was over."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """tokens_per_step: emitted tokens / decode steps, greedy, full pre-drafting. by_kind: the same for each kind of
    document. slot_0: how often slot 0 says what the base says. all_right: how often slots 1 … s all hold."""

    documents: int
    tokens_per_step: float
    by_kind: dict[Kind, float]
    slot_0: float
    all_right: tuple[float, ...]

    @property
    def holds(self) -> tuple[float, ...]:
        """How often slot s holds where those before it do, for s = 1, 2, …; 0 where these never did."""
        before = (1.0, *self.all_right)
        return tuple(both / first if first else 0.0 for first, both in zip(before, self.all_right, strict=False))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Windows of held-out documents: tokens and own flags, where each window's blocks begin, and what kind it is."""

    documents: tuple[tuple[np.ndarray, np.ndarray], ...]
    windows: tuple[np.ndarray, ...]
    kinds: tuple[Kind, ...]

    @property
    def digest(self) -> str:
        """12 hex digits that stand for these documents and windows."""
        columns = ((*document, places) for document, places in zip(self.documents, self.windows, strict=True))
        return digest_of(column for each in columns for column in each)


def documents_to_measure(device: torch.device, numbers: int) -> int:
    """How many documents a drafter is measured on, where a token is computed with so many numbers of the layers."""
    if device.type != "cpu":
        return DOCUMENTS
    return max(FEWEST_DOCUMENTS, min(DOCUMENTS, int(DOCUMENTS * CPU_NUMBERS / numbers)))


def choose_windows(
    corpus: Corpus, held_out: Sequence[int], block: int, max_positions: int, most: int = DOCUMENTS
) -> HeldOut:
    """A window in each of the first `most` documents of `held_out` that have room for one; the same on every call."""
    found = [(index, anchor_places(corpus.document(index)[1], block, max_positions)) for index in held_out]
    found = [(index, places) for index, places in found if len(places)][:most]
    longest = max(WINDOW, most * WINDOW // max(1, len(found)))
    documents: list[tuple[np.ndarray, np.ndarray]] = []
    windows: list[np.ndarray] = []
    for index, places in found:
        tokens, own = corpus.document(index)
        draw = np.random.default_rng(int(corpus.keys[index]) & 0x7FFFFFFF)
        first = int(draw.integers(max(1, len(places) - longest + 1)))
        # A window is a run of context ends without a gap: turns of a conversation are not joined.
        window = places[first : first + longest]
        window = window[: int(np.argmax(np.diff(window, append=-1) != 1)) + 1]
        end = int(window[-1]) + block
        documents.append((tokens[:end], own[:end]))
        windows.append(window)
    kinds = tuple(KINDS[int(corpus.kinds[index])] for index, _ in found)
    return HeldOut(tuple(documents), tuple(windows), kinds)


def measure_held_out(
    base: FrozenBase,
    adapter: AdapterWeights,
    held_out: HeldOut,
    block: int,
    within_block: WithinBlock,
    abandon: Callable[[], bool] = lambda: False,
) -> HeldOutResult:
    """Tokens per step of `adapter` (of the base's dtype) with proposals of `block` slots. Raises Abandoned soon after
    `abandon` has become true."""
    judged = judge_windows(base, adapter, held_out, block, within_block, abandon)
    steps, tokens = zip(*(_walk(holds[:, 1:]) for holds in judged), strict=True)
    by_kind: dict[Kind, float] = {}
    for kind in dict.fromkeys(held_out.kinds):
        mine = [index for index, each in enumerate(held_out.kinds) if each == kind]
        by_kind[kind] = sum(tokens[index] for index in mine) / sum(steps[index] for index in mine)
    rows = np.concatenate(judged)
    return HeldOutResult(
        documents=len(judged),
        tokens_per_step=sum(tokens) / sum(steps),
        by_kind=by_kind,
        slot_0=float(rows[:, 0].mean()),
        all_right=tuple(np.logical_and.accumulate(rows[:, 1:], axis=1).mean(0).tolist()),
    )


@torch.no_grad()
def judge_windows(
    base: FrozenBase,
    adapter: AdapterWeights,
    held_out: HeldOut,
    block: int,
    within_block: WithinBlock,
    abandon: Callable[[], bool] = lambda: False,
) -> list[np.ndarray]:
    """For each window bool [context ends, block]: whether the slot says what the base says there; False behind the end
    of the document's own words. abandon: as in `measure_held_out`."""
    return [
        holds
        for group in _groups(held_out)
        for holds in _judge(base, adapter, held_out, group, block, within_block, abandon)
    ]


def _groups(held_out: HeldOut) -> Iterator[range]:
    """Runs of documents that are read together, of about `TOKENS_AT_ONCE` tokens."""
    first, tokens = 0, 0
    for index, (document, _) in enumerate(held_out.documents):
        if tokens and tokens + len(document) > TOKENS_AT_ONCE:
            yield range(first, index)
            first, tokens = index, 0
        tokens += len(document)
    yield range(first, len(held_out.documents))


def _judge(
    base: FrozenBase,
    adapter: AdapterWeights,
    held_out: HeldOut,
    group: range,
    block: int,
    within_block: WithinBlock,
    abandon: Callable[[], bool],
) -> list[np.ndarray]:
    pack = pack_documents([held_out.documents[index] for index in group], base.device)
    clean = run_clean(base, pack)
    blocks = lay_blocks(pack, [held_out.windows[index] for index in group], block)
    holds, at_once = [], BLOCKS_AT_ONCE.get(base.device.type, 64)
    for first in range(0, len(blocks), at_once):
        if abandon():
            raise Abandoned
        part = blocks.part(first, min(first + at_once, len(blocks)))
        alone = run_masks(base, adapter, clean, part, within_block)
        informed = run_slot_head(base, adapter, clean, part, alone)
        holds.append(_agree(base, clean.hidden, part, _best(base, alone, informed)))
    together = torch.cat(holds).cpu().numpy()
    return np.split(together, np.cumsum([len(held_out.windows[index]) for index in group])[:-1])


def _agree(base: FrozenBase, clean: Tensor, blocks: Blocks, drafted: Tensor) -> Tensor:
    rows, mine = blocks.target_rows.flatten().unique(return_inverse=True)
    truths = _best(base, clean[rows])[mine]
    return (drafted == truths).view(blocks.trained.shape) & blocks.trained


def _best(base: FrozenBase, hidden: Tensor, informed: Tensor | None = None) -> Tensor:
    """The best token of each row, without ever holding all logits; informed: hidden states after the slot head,
    which chooses among the best tokens of `hidden`."""
    rows = max(16, (8 << 20) // base.weights.head.shape[0])
    if informed is None or informed is hidden:
        return torch.cat([base.ops.head(part, base.weights.head).max(-1).indices for part in hidden.split(rows)])
    best = []
    for part, after in zip(hidden.split(rows), informed.split(rows), strict=True):
        logits = base.ops.head(part, base.weights.head)
        scores, candidates = logits.topk(min(CANDIDATES, logits.shape[1]))
        choice = rescored(scores, candidates, after - part, base.weights.head).argmax(-1)
        best.append(candidates.gather(-1, choice[:, None]).squeeze(-1))
    return torch.cat(best)


def _walk(holds: np.ndarray) -> tuple[int, int]:
    """Decode steps and tokens of walks through a window from each of its first context ends.

    holds: bool [window, slots], without slot 0."""
    moves = 1 + np.logical_and.accumulate(holds, axis=1).sum(1)
    steps = tokens = 0
    for start in range(min(holds.shape[1] + 1, len(moves))):
        place = start
        while place < len(moves):
            steps += 1
            tokens += int(moves[place])
            place += int(moves[place])
    return steps, tokens
