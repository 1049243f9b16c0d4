"""From the plans of a step to one array of numbers, and from that to the tensors of a forward pass."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.row_layout import Int32Array, RowLayout, lay_rows
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.engine.step_cost import StepSize
from tidar_core.kernels.ops import StepRows
from tidar_core.layout import BlockForm, Shape


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The sizes of a step's tensors: verify rows, mask rows, rows of the page table and its width. The last row of the
    page table is the trash page's; padding rows belong to it."""

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
    """One forward pass, in the host's memory. numbers: int32, all of `Inputs` in one array, so that a single copy
    brings it to a device. layout: its rows, without padding."""

    size: BatchSize
    numbers: Tensor
    layout: RowLayout

    @property
    def first_mask_rows(self) -> list[int]:
        """Where the mask rows of each plan begin."""
        rows: list[int] = (self.size.verify + self.layout.first_mask_rows).tolist()
        return rows


def draft_rows(shape: Shape, first_mask_row: int, place: int) -> range:
    """The rows of slots 1 … b-1 of the proposal for the outcome `shape.proposals[place]`."""
    start = first_mask_row + place * shape.block
    return range(start + 1, start + shape.block)


def _lengths(size: BatchSize) -> tuple[int, ...]:
    """The lengths of the parts of a batch's numbers: the columns positions, sequence, context_end, tail_start and
    tail_end of all rows; the page table; write slots and tokens of the verify rows; slots and repeats of the mask
    rows."""
    return 5 * (size.verify + size.mask), size.sequences * size.pages, size.verify, size.verify, size.mask, size.mask


def inputs_of(numbers: Tensor, size: BatchSize) -> Inputs:
    """The parts of a batch's numbers, without a copy, on whichever device they are."""
    columns, table, write_slots, tokens, slots, repeats = numbers.split(_lengths(size))
    positions, sequence, context_end, tail_start, tail_end = columns.view(5, -1)
    table = table.view(size.sequences, size.pages)
    rows = StepRows(size.verify, positions, sequence, context_end, tail_start, tail_end, table, write_slots)
    return Inputs(rows, tokens, slots, repeats)


def step_size(plans: Items[SequencePlan], batch: Batch) -> StepSize:
    """The size of a step, for its price."""
    return replace(
        batch.layout.size, context=(sum([plan.start for plan in plans]) + batch.layout.known_behind) / len(plans)
    )


def build_batch(
    plans: Items[SequencePlan], page_size: int, padded: Callable[[BatchSize], BatchSize], form: BlockForm
) -> Batch:
    """Rows of all plans, all verify rows first. padded: gives the size to fill up to, no smaller in any part. Padding
    rows read and write the trash page alone."""
    known, shapes = tuple([len(plan.known) for plan in plans]), tuple([plan.shape for plan in plans])
    layout = lay_rows(known, shapes, tuple([plan.emits for plan in plans]), form)
    pages = [plan.sequence.pages for plan in plans]
    owned = np.array([len(own) for own in pages])
    verify_rows, mask_rows = len(layout.verify_owner), len(layout.mask_slots)
    widest = int(owned.max())
    size = padded(BatchSize(verify_rows, mask_rows, len(plans) + 1, widest))
    numbers = padding(size)
    columns, table, write_slots, tokens, slots, repeats = _parts(numbers, size)
    table[: len(plans), :widest][np.arange(widest) < owned[:, None]] = np.frombuffer(b"".join(pages), dtype=np.int32)
    starts = np.array([plan.start for plan in plans], dtype=np.int32)
    owner = layout.verify_owner
    positions = starts[owner] + layout.verify_place
    columns[0, :verify_rows], columns[1, :verify_rows], columns[2, :verify_rows] = positions, owner, positions + 1
    page, at = np.divmod(positions, page_size)
    write_slots[:verify_rows] = table[owner, page] * page_size + at
    words: list[int] = []
    for plan in plans:
        words += plan.known
        words += plan.drafts
    tokens[:verify_rows] = words

    if mask_rows:
        own = columns[:, size.verify : size.verify + mask_rows]
        own[:] = layout.mask_columns
        own[0] += starts[own[1]]
        own[2] += starts[own[1]]
        slots[:mask_rows], repeats[:mask_rows] = layout.mask_slots, layout.repeats
    return Batch(size, torch.from_numpy(numbers), layout)


def padding(size: BatchSize) -> Int32Array:
    """The numbers of a batch that is padding alone."""
    numbers = np.zeros(sum(_lengths(size)), dtype=np.int32)
    columns, *_, repeats = _parts(numbers, size)
    columns[1], columns[2] = size.sequences - 1, 1
    repeats[:] = -1
    return numbers


def _parts(numbers: Int32Array, size: BatchSize) -> tuple[Int32Array, ...]:
    """The parts of a batch's numbers, without a copy, those of several rows as such."""
    ends = list(accumulate(_lengths(size), initial=0))
    columns, table, *others = (numbers[start:end] for start, end in pairwise(ends))
    return columns.reshape(5, -1), table.reshape(size.sequences, size.pages), *others
