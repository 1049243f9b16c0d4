"""From the plans of a step to one array of numbers, and from that to the tensors of a forward pass."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import StepRows
from tidar_core.layout import WithinBlock, mask_rows


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What the tensors of a step are as large as: rows of both kinds, rows of the page table and its width. The last
    row of the page table is the trash page's, which padding rows belong to."""

    verify: int
    mask: int
    sequences: int
    pages: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward pass reads. tokens: int32 [verify], of the verify rows. slots: int32 [mask], the slot of each mask
    row."""

    rows: StepRows
    tokens: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass, in the host's memory. numbers: int32, all of `Inputs` in one array, so that one copy brings it
    to a device. emit_rows[i]: the verify rows of plan i whose answers are wanted. draft_rows[i]: for each outcome of
    plan i, the rows of slots 1 … b-1 of its proposal."""

    size: BatchSize
    numbers: Tensor
    emit_rows: tuple[range, ...]
    draft_rows: tuple[dict[int, range], ...]


def inputs_of(numbers: Tensor, size: BatchSize) -> Inputs:
    """The parts of a batch's numbers, without a copy, on whichever device they are."""
    total = size.verify + size.mask
    lengths = [5 * total, size.sequences * size.pages, size.verify, size.verify, size.mask]
    columns, table, write_slots, tokens, slots = numbers.split(lengths)
    positions, sequence, context_end, tail_start, tail_end = columns.view(5, total)
    table = table.view(size.sequences, size.pages)
    rows = StepRows(size.verify, positions, sequence, context_end, tail_start, tail_end, table, write_slots)
    return Inputs(rows, tokens, slots)


@lru_cache(maxsize=4096)
def _mask_columns(proposals: tuple[int, ...], block: int, within_block: WithinBlock) -> np.ndarray:
    """[5, rows] int32: slot, offset, context offset, tail start, tail end (see `tidar_core.layout.MaskRow`)."""
    rows = [row[1:] for row in mask_rows(proposals, block, within_block)]
    return np.array(rows, dtype=np.int32).T


def build_batch(
    plans: Items[SequencePlan], page_size: int, padded: Callable[[BatchSize], BatchSize], within_block: WithinBlock
) -> Batch:
    """Rows of all plans, all verify rows first. padded: the size to fill up to, no smaller in any part; what is filled
    up with sees the trash page and writes to it."""
    needed = BatchSize(
        verify=sum(plan.verify_rows for plan in plans),
        mask=sum(plan.shape.mask_rows for plan in plans),
        sequences=len(plans) + 1,
        pages=max(len(plan.sequence.pages) for plan in plans),
    )
    size = padded(needed)
    verify = size.verify
    length = 5 * (verify + size.mask) + size.sequences * size.pages + 2 * verify + size.mask
    numbers = torch.zeros(length, dtype=torch.int32)
    inputs = inputs_of(numbers, size)
    columns = numbers[: 5 * (verify + size.mask)].view(5, -1).numpy()  # positions, sequence, context, tail start, end
    slots = inputs.slots.numpy()
    columns[1], columns[2] = size.sequences - 1, 1
    _fill_verify_rows(plans, inputs, columns, page_size)
    emit_rows: list[range] = []
    draft_rows: list[dict[int, range]] = []
    row, mask_row = 0, verify
    for index, plan in enumerate(plans):
        row += plan.verify_rows
        emit_rows.append(range(row - plan.shape.drafts - 1, row) if plan.emits else range(0))
        if not plan.shape.proposals:
            draft_rows.append({})
            continue
        draft_rows.append(
            {
                outcome: range(mask_row + k * plan.shape.block + 1, mask_row + (k + 1) * plan.shape.block)
                for k, outcome in enumerate(plan.shape.proposals)
            }
        )
        slot, offset, context_offset, tail_start, tail_end = _mask_columns(
            plan.shape.proposals, plan.shape.block, within_block
        )
        span, first = slice(mask_row, mask_row + plan.shape.mask_rows), mask_row - verify
        slots[span.start - verify : span.stop - verify] = slot
        columns[0, span], columns[1, span] = plan.position + offset, index
        columns[2, span] = plan.position + context_offset
        columns[3, span], columns[4, span] = first + tail_start, first + tail_end
        mask_row += plan.shape.mask_rows
    return Batch(size, numbers, tuple(emit_rows), tuple(draft_rows))


def _fill_verify_rows(plans: Items[SequencePlan], inputs: Inputs, columns: np.ndarray, page_size: int) -> None:
    """Page table, and the columns of the verify rows, of all plans at once: a large batch has no time for a few calls
    of numpy each."""
    table = inputs.rows.page_table.numpy()
    owner, place = _numbered([len(plan.sequence.pages) for plan in plans])
    table[owner, place] = np.fromiter(chain.from_iterable(plan.sequence.pages for plan in plans), np.int32, len(owner))
    owner, place = _numbered([plan.verify_rows for plan in plans])
    count = len(owner)
    positions = np.array([plan.start for plan in plans], dtype=np.int32)[owner] + place
    columns[0, :count], columns[1, :count], columns[2, :count] = positions, owner, positions + 1
    page, at = np.divmod(positions, page_size)
    inputs.rows.write_slots.numpy()[:count] = table[owner, page] * page_size + at
    words = chain.from_iterable(chain(plan.known, plan.drafts) for plan in plans)
    inputs.tokens.numpy()[:count] = np.fromiter(words, np.int32, count)


def _numbered(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of the elements of groups of these sizes, side by side: each one's group, and its place there."""
    sizes = np.array(counts, dtype=np.int32)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), sizes)
    return owner, np.arange(len(owner), dtype=np.int32) - np.repeat(sizes.cumsum(dtype=np.int32) - sizes, sizes)
