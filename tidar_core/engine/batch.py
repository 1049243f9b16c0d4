"""From the plans of a step to the tensors of one forward pass."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import StepRows
from tidar_core.layout import WithinBlock, mask_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. tokens: int64 [verify], the tokens of the verify rows. slots: int64 [mask], the slot of
    each mask row. emit_rows[i]: the verify rows of plan i whose answers are wanted. draft_rows[i]: for each
    outcome of plan i, the rows of slots 1 … b-1 of its proposal."""

    rows: StepRows
    tokens: Tensor
    slots: Tensor
    emit_rows: tuple[range, ...]
    draft_rows: tuple[dict[int, range], ...]


@lru_cache(maxsize=4096)
def _mask_columns(proposals: tuple[int, ...], block: int, within_block: WithinBlock) -> np.ndarray:
    """[5, rows] int32: slot, offset, context offset, tail start, tail end (see `tidar_core.layout.MaskRow`)."""
    rows = [row[1:] for row in mask_rows(proposals, block, within_block)]
    return np.array(rows, dtype=np.int32).T


def build_batch(
    plans: Items[SequencePlan], page_size: int, row_multiple: int, within_block: WithinBlock, device: torch.device
) -> Batch:
    """Rows of all plans, all verify rows first; padding verify rows (trash page) make it a multiple of
    `row_multiple`."""
    total = sum(plan.verify_rows + plan.shape.mask_rows for plan in plans)
    padding = -total % row_multiple
    verify = sum(plan.verify_rows for plan in plans) + padding
    total += padding

    columns = np.zeros((5, total), dtype=np.int32)  # positions, sequence, context end, tail start, tail end
    tokens = np.zeros(verify, dtype=np.int64)
    slots = np.zeros(total - verify, dtype=np.int64)
    write_slots = np.zeros(verify, dtype=np.int32)
    page_table = np.zeros((len(plans) + 1, max(len(plan.sequence.pages) for plan in plans)), dtype=np.int32)
    emit_rows, draft_rows = [], []
    row, mask_row = 0, verify
    for index, plan in enumerate(plans):
        pages = plan.sequence.pages
        page_table[index, : len(pages)] = pages
        span = slice(row, row + plan.verify_rows)
        positions = np.arange(plan.start, plan.start + plan.verify_rows, dtype=np.int32)
        tokens[span] = plan.known + plan.drafts
        columns[0, span], columns[1, span], columns[2, span] = positions, index, positions + 1
        write_slots[span] = page_table[index, positions // page_size] * page_size + positions % page_size
        row += plan.verify_rows
        emit_rows.append(range(row - plan.shape.drafts - 1, row) if plan.emits else range(0))

        draft_rows.append(
            {
                outcome: range(mask_row + k * plan.shape.block + 1, mask_row + (k + 1) * plan.shape.block)
                for k, outcome in enumerate(plan.shape.proposals)
            }
        )
        if plan.shape.mask_rows:
            slot, offset, context_offset, tail_start, tail_end = _mask_columns(
                plan.shape.proposals, plan.shape.block, within_block
            )
            span, first = slice(mask_row, mask_row + plan.shape.mask_rows), mask_row - verify
            slots[span.start - verify : span.stop - verify] = slot
            columns[0, span], columns[1, span] = plan.position + offset, index
            columns[2, span] = plan.position + context_offset
            columns[3, span], columns[4, span] = first + tail_start, first + tail_end
            mask_row += plan.shape.mask_rows
    columns[1, row:verify], columns[2, row:verify] = len(plans), 1  # padding: its table row is the trash page

    positions, sequence, context_end, tail_start, tail_end = torch.from_numpy(columns).to(device)
    return Batch(
        StepRows(
            verify, positions, sequence, context_end, tail_start, tail_end,
            torch.from_numpy(page_table).to(device), torch.from_numpy(write_slots).to(device),
        ),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(slots).to(device),
        tuple(emit_rows),
        tuple(draft_rows),
    )  # fmt: skip
