"""From the plans of a step to one array of numbers, and from that to the tensors of a forward pass."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.scheduler import SequencePlan
from tidar_core.engine.step_cost import StepSize
from tidar_core.kernels.ops import StepRows
from tidar_core.layout import BlockForm, Shape, mask_rows


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
    """What a forward pass reads. tokens: int32 [verify], of the verify rows. slots, repeats: int32 [mask], the slot of
    each mask row, and the verify row whose token stands in it, -1 for a mask."""

    rows: StepRows
    tokens: Tensor
    slots: Tensor
    repeats: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass, in the host's memory. numbers: int32, all of `Inputs` in one array, so that one copy brings it
    to a device. emit_rows[i]: the verify rows of plan i whose answers are wanted. first_mask_rows[i]: where its mask
    rows begin."""

    size: BatchSize
    numbers: Tensor
    emit_rows: tuple[range, ...]
    first_mask_rows: tuple[int, ...]


def draft_rows(shape: Shape, first_mask_row: int, place: int) -> range:
    """The rows of slots 1 … b-1 of the proposal for the outcome `shape.proposals[place]`."""
    start = first_mask_row + place * shape.block
    return range(start + 1, start + shape.block)


def _lengths(size: BatchSize) -> tuple[int, ...]:
    """Of the parts of a batch's numbers: the columns positions, sequence, context_end, tail_start and tail_end of all
    rows, page table, write slots and tokens of the verify rows, slots and repeats of the mask rows."""
    return 5 * (size.verify + size.mask), size.sequences * size.pages, size.verify, size.verify, size.mask, size.mask


def inputs_of(numbers: Tensor, size: BatchSize) -> Inputs:
    """The parts of a batch's numbers, without a copy, on whichever device they are."""
    columns, table, write_slots, tokens, slots, repeats = numbers.split(_lengths(size))
    positions, sequence, context_end, tail_start, tail_end = columns.view(5, -1)
    table = table.view(size.sequences, size.pages)
    rows = StepRows(size.verify, positions, sequence, context_end, tail_start, tail_end, table, write_slots)
    return Inputs(rows, tokens, slots, repeats)


def step_size(plans: Items[SequencePlan], batch: Batch) -> StepSize:
    """What a step is as large as, for those who price it."""
    verify = sum(len(rows) for rows in batch.emit_rows)
    slots = sum(len(plan.shape.proposals) * (plan.shape.block - 1) for plan in plans if plan.shape.proposals)
    return StepSize(
        known=sum(plan.verify_rows for plan in plans) - verify,
        verify=verify,
        mask=sum(plan.shape.mask_rows for plan in plans),
        slots=slots,
        picked=sum(plan.shape.block - 1 for plan in plans if plan.shape.proposals),
        sequences=len(plans),
        context=sum(plan.position for plan in plans) / len(plans),
    )


@lru_cache(maxsize=4096)
def _mask_columns(proposals: tuple[int, ...], block: int, form: BlockForm) -> np.ndarray:
    """[6, rows] int32: slot, offset, context offset, tail start, tail end, repeats (see `layout.MaskRow`)."""
    rows = [row[1:] for row in mask_rows(proposals, block, form)]
    return np.array(rows, dtype=np.int32).T


def build_batch(
    plans: Items[SequencePlan], page_size: int, padded: Callable[[BatchSize], BatchSize], form: BlockForm
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
    verify, lengths = size.verify, _lengths(size)
    numbers = np.zeros(sum(lengths), dtype=np.int32)
    columns, table, write_slots, tokens, slots, repeats = np.split(numbers, list(accumulate(lengths[:-1])))
    columns, table = columns.reshape(5, -1), table.reshape(size.sequences, size.pages)
    columns[1], columns[2] = size.sequences - 1, 1
    _fill_page_table(plans, table)
    _fill_verify_rows(plans, columns, table, page_size, write_slots, tokens)
    repeats[:] = -1
    ends = list(accumulate(plan.verify_rows for plan in plans))
    _fill_mask_rows(plans, ends, columns[:, verify:], slots, repeats, form)
    emit_rows = tuple(
        range(end - plan.shape.drafts - 1, end) if plan.emits else range(0)
        for plan, end in zip(plans, ends, strict=True)
    )
    first_mask_rows = tuple(accumulate((plan.shape.mask_rows for plan in plans[:-1]), initial=verify))
    return Batch(size, torch.from_numpy(numbers), emit_rows, first_mask_rows)


# Each for all plans at once: a large batch has no time for a few calls of numpy each.


def _fill_page_table(plans: Items[SequencePlan], table: np.ndarray) -> None:
    owner, place = _numbered([len(plan.sequence.pages) for plan in plans])
    table[owner, place] = np.fromiter(chain.from_iterable(plan.sequence.pages for plan in plans), np.int32, len(owner))


def _fill_verify_rows(
    plans: Items[SequencePlan],
    columns: np.ndarray,
    table: np.ndarray,
    page_size: int,
    write_slots: np.ndarray,
    tokens: np.ndarray,
) -> None:
    owner, place = _numbered([plan.verify_rows for plan in plans])
    count = len(owner)
    positions = np.array([plan.start for plan in plans], dtype=np.int32)[owner] + place
    columns[0, :count], columns[1, :count], columns[2, :count] = positions, owner, positions + 1
    page, at = np.divmod(positions, page_size)
    write_slots[:count] = table[owner, page] * page_size + at
    words = chain.from_iterable(chain(plan.known, plan.drafts) for plan in plans)
    tokens[:count] = np.fromiter(words, np.int32, count)


def _fill_mask_rows(
    plans: Items[SequencePlan],
    ends: list[int],
    columns: np.ndarray,
    slots: np.ndarray,
    repeats: np.ndarray,
    form: BlockForm,
) -> None:
    """ends[i]: one behind plan i's last verify row."""
    drafting = [index for index, plan in enumerate(plans) if plan.shape.proposals]
    if not drafting:
        return
    shapes = [plans[index].shape for index in drafting]
    made = [_mask_columns(shape.proposals, shape.block, form) for shape in shapes]
    slot, offset, context_offset, tail_start, tail_end, repeated = np.concatenate(made, axis=1)
    owner, place = _numbered([shape.mask_rows for shape in shapes])
    count = len(owner)
    positions = np.array([plans[index].position for index in drafting], dtype=np.int32)[owner]
    first = np.arange(count, dtype=np.int32) - place
    slots[:count] = slot
    columns[0, :count], columns[1, :count] = positions + offset, np.array(drafting, dtype=np.int32)[owner]
    columns[2, :count] = positions + context_offset
    columns[3, :count], columns[4, :count] = first + tail_start, first + tail_end
    if form.slot_0 == "anchor":
        anchors = np.array([ends[index] - plans[index].shape.verify_rows for index in drafting], dtype=np.int32)[owner]
        repeats[:count] = np.where(repeated >= 0, anchors + repeated, -1)


def _numbered(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of the elements of groups of these sizes, side by side: each one's group, and its place there."""
    sizes = np.array(counts, dtype=np.int32)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), sizes)
    return owner, np.arange(len(owner), dtype=np.int32) - np.repeat(sizes.cumsum(dtype=np.int32) - sizes, sizes)
