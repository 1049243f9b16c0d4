"""What steps that lay the same share, against the same told plan by plan and row by row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.kernels.test_succession import PAGE, padded
from tidar_core.engine.batch import build_batch
from tidar_core.engine.row_layout import lay_rows, numbered
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.layout import PLAIN, BlockForm, Shape, mask_rows
from tidar_core.request import Request, SamplingParams, Sequence, page_numbers

FORMS = [BlockForm(), BlockForm("causal"), BlockForm(slot_0="anchor", labels="shifted")]


@st.composite
def kinds(draw):
    """Known tokens, a shape, and whether the answers are wanted."""
    drafts = draw(st.integers(0, 4))
    outcomes = tuple(sorted(draw(st.sets(st.integers(1, drafts + 1)))))
    shape = Shape(drafts, outcomes, draw(st.integers(2, 5))) if outcomes else Shape(drafts)
    return draw(st.integers(1, 6)), *draw(st.sampled_from([(shape, True), (PLAIN, True), (PLAIN, False)]))


def some(kinds, start=0):
    """Plans of these kinds, each on pages of its own."""
    params = SamplingParams(max_tokens=1)
    for number, (known, shape, emits) in enumerate(kinds):
        pages = page_numbers(range(10 * number + 1, 10 * number + 9))
        sequence = Sequence(Request(str(number), (1,), params), 0.0, [1], pages=pages)
        tokens = tuple(range(100 * number, 100 * number + known + shape.drafts))
        yield SequencePlan(sequence, start + number, tokens[:known], tokens[known:], shape, emits)


@given(st.lists(kinds(), min_size=1, max_size=6), st.sampled_from(FORMS))
@settings(deadline=None)
def test_rows_are_those_of_the_plans_one_by_one(kinds, form):
    layout = lay_rows(*(tuple(column) for column in zip(*kinds, strict=True)), form)
    answers, guesses, columns, slots, repeats, nearest, owners = [], [], [], [], [], [], []
    first = masks = 0
    for number, (known, shape, emits) in enumerate(kinds):
        rows = range(first + known - 1, first + known + shape.drafts) if emits else range(0)
        answers += rows
        assert layout.emit_rows[number] == rows
        assert layout.first_mask_rows[number] == masks
        owners += [(number, place) for place in range(known + shape.drafts)]
        for place, row in enumerate(mask_rows(shape.proposals, shape.block, form)):
            last = known - 1
            tail = masks + row.tail_start, masks + row.tail_end
            columns.append((last + row.offset, number, last + row.context_offset, *tail))
            guesses += [masks + place] if row.slot else []
            slots.append(row.slot)
            repeats.append(first + last + row.repeats if row.repeats >= 0 else -1)
            nearest.append(shape.proposals[0] if place < shape.block else 0)
        first += known + shape.drafts
        masks += shape.mask_rows
    assert layout.answer_rows.tolist() == answers
    assert layout.guess_rows.tolist() == guesses
    assert list(zip(layout.verify_owner.tolist(), layout.verify_place.tolist(), strict=True)) == owners
    assert layout.mask_columns.T.tolist() == [list(row) for row in columns]
    assert (layout.mask_slots.tolist(), layout.repeats.tolist(), layout.nearest.tolist()) == (slots, repeats, nearest)
    assert (layout.size.unscored + layout.size.verify, layout.size.mask) == (first, masks)
    assert (layout.size.verify, layout.size.slots) == (len(answers), len(guesses))
    assert layout.known_behind == sum(known - 1 for known, _, _ in kinds)


@given(st.lists(kinds(), min_size=1, max_size=6), st.sampled_from(FORMS))
@settings(deadline=None)
def test_a_step_that_lays_the_same_elsewhere_is_built_as_if_it_were_the_first(kinds, form):
    """What is shared is not written to: neither by the batch built from it, nor by those who change that batch."""
    here, there = list(some(kinds)), list(some(kinds, start=7))
    one = build_batch(here, PAGE, padded, form)
    before = one.numbers.clone()
    other = build_batch(there, PAGE, padded, form)
    assert other.layout is one.layout
    other.numbers.fill_(-5)
    assert one.numbers.equal(before)
    lay_rows.cache_clear()
    assert build_batch(here, PAGE, padded, form).numbers.equal(before)


@given(st.lists(st.integers(0, 4), max_size=8))
def test_elements_are_numbered_within_their_groups(counts):
    owner, place = numbered(np.array(counts, dtype=np.int64))
    expected = [(group, at) for group, count in enumerate(counts) for at in range(count)]
    assert list(zip(owner.tolist(), place.tolist(), strict=True)) == expected
