"""What the rows of a step share with those of every step that lays the same, found once and kept while it repeats.

Where many sequences decode, one step after the other has plans of the same kinds in the same order: only where they
start, their tokens and their pages differ. All else is here, for all plans at once, since a large batch has no time for
some calls of Python or numpy each. Numbers alone, no torch.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tidar_core.engine.step_cost import IntArray, StepSize
from tidar_core.kernels.columns import (
    BLOCK,
    DRAFTER,
    FIRST_ROW,
    FIRST_SCORE,
    FIRST_SLOT,
    FIRST_TRUTH,
    MOST_DRAFTS,
    OUTCOMES,
)
from tidar_core.layout import BlockForm, Shape, mask_rows

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a step. The arrays cannot be written to, since steps share them.

    size: of the step, without its context. known_behind: how many known tokens all plans together have behind their
    first ones. answers: [plans], how many true tokens each plan gets; answer_rows: the verify rows that give them, and
    emit_rows[i]: those of plan i. guesses: [plans], how many slots of one proposal may become drafts; guess_rows: the
    rows of these slots, of all proposals. first_mask_rows: [plans]. Mask rows count from the first mask row here.

    verify_owner, verify_place: [verify], the plan of each verify row, and its place there. mask_columns: [5, mask], the
    positions, sequence, context_end, tail_start and tail_end of mask rows, positions counted from their plan's start.
    mask_slots, repeats: [mask], as `Inputs` has them. nearest: [mask], as `kernels.succession.Carried` has it. table:
    the plans as `kernels.succession` reads them, with mask rows and the scores of slots counted from the first.
    """

    size: StepSize
    known_behind: int
    answers: IntArray
    answer_rows: IntArray
    emit_rows: tuple[range, ...]
    guesses: IntArray
    guess_rows: IntArray
    first_mask_rows: IntArray
    verify_owner: IntArray
    verify_place: IntArray
    mask_columns: Int32Array
    mask_slots: Int32Array
    repeats: Int32Array
    nearest: Int32Array
    table: Int32Array

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)


def numbered(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For groups of these sizes laid side by side: each element's group, and its place in the group."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - _before(counts)[owner]


@lru_cache(maxsize=8)
def lay_rows(known: tuple[int, ...], shapes: tuple[Shape, ...], emits: tuple[bool, ...], form: BlockForm) -> RowLayout:
    """The rows of plans with so many known tokens and these shapes, all verify rows first. emits: whether a plan's
    answers are wanted."""
    settled, drafts = np.array(known), np.array([shape.drafts for shape in shapes])
    outcomes = np.array([len(shape.proposals) for shape in shapes])
    block = np.array([shape.block if shape.proposals else 0 for shape in shapes])
    guesses, masks, ends = np.maximum(block - 1, 0), outcomes * block, (settled + drafts).cumsum()

    answers = np.where(emits, drafts + 1, 0)
    asked, asked_place = numbered(answers)
    verify_owner, verify_place = numbered(settled + drafts)

    made = [_mask_columns(shape.proposals, shape.block, form) for shape in shapes if shape.proposals]
    slot, offset, context_offset, tail_start, tail_end, repeated = np.concatenate(
        [np.zeros((6, 0), dtype=np.int32), *made], axis=1
    )
    owner, place = numbered(masks)
    last, first = (settled - 1)[owner], np.arange(len(owner)) - place
    columns = np.stack((last + offset, owner, last + context_offset, first + tail_start, first + tail_end))
    repeats = np.where(repeated >= 0, (ends - drafts - 1)[owner] + repeated, -1)
    nearest = np.array([shape.proposals[0] if shape.proposals else 0 for shape in shapes])[owner]

    table = np.zeros((len(shapes), OUTCOMES + int(outcomes.max())), dtype=np.int32)
    table[:, FIRST_TRUTH], table[:, MOST_DRAFTS] = _before(answers), drafts
    table[:, FIRST_SLOT], table[:, BLOCK] = _before(guesses), block
    table[:, FIRST_ROW], table[:, FIRST_SCORE] = _before(masks) + 1, _before(outcomes * guesses)
    table[:, DRAFTER] = _before(block > 0)
    table[:, OUTCOMES:][numbered(outcomes)] = [outcome for shape in shapes for outcome in shape.proposals]

    verify = int(answers.sum())
    return RowLayout(
        size=StepSize(
            unscored=int(ends[-1]) - verify,
            verify=verify,
            mask=int(masks.sum()),
            slots=int((outcomes * guesses).sum()),
            picked=int(guesses.sum()),
            sequences=len(shapes),
        ),
        known_behind=sum(known) - len(known),
        answers=answers,
        answer_rows=(ends - answers)[asked] + asked_place,
        emit_rows=tuple(range(end - count, end) for end, count in zip(ends.tolist(), answers.tolist(), strict=True)),
        guesses=guesses,
        guess_rows=np.flatnonzero(slot),
        first_mask_rows=_before(masks),
        verify_owner=verify_owner,
        verify_place=verify_place,
        mask_columns=columns.astype(np.int32),
        mask_slots=slot,
        repeats=repeats.astype(np.int32),
        nearest=np.where(place < block[owner], nearest, 0).astype(np.int32),
        table=table,
    )


def _before(counts: NDArray[np.int64] | NDArray[np.bool_]) -> IntArray:
    """The sum of the counts before each."""
    return counts.cumsum() - counts


@lru_cache(maxsize=4096)
def _mask_columns(proposals: tuple[int, ...], block: int, form: BlockForm) -> Int32Array:
    """[6, rows]: slot, offset, context offset, tail start, tail end, repeats (see `layout.MaskRow`)."""
    rows = [row[1:] for row in mask_rows(proposals, block, form)]
    columns = np.array(rows, dtype=np.int32).T
    columns.setflags(write=False)
    return columns
