"""The geometry of a step against a dense mask that is written from the definition, exhaustively for small B."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidar_core.layout import BlockForm, Shape, count_committed, drafts_left, fit_shape, full_shape, mask_rows

CONTEXT = 3


def dense_mask(p: int, drafts: int, proposals: tuple[int, ...], block: int, form: BlockForm) -> list[set]:
    """For each row, verify rows first, the set of keys it sees: ("kv", position) or ("slot", a, s)."""
    earlier = 1 if form.labels == "shifted" else 0
    context = {("kv", position) for position in range(p)}
    rows = [context | {("kv", p + j) for j in range(i + 1)} for i in range(drafts + 1)]
    for a in proposals:
        for s in range(block):
            verified = {("kv", p + i) for i in range(a - earlier)}
            visible = range(s + 1) if form.within_block == "causal" else range(block)
            rows.append(context | verified | {("slot", a, t) for t in visible})
    return rows


def proposal_sets(drafts: int):
    outcomes = range(1, drafts + 2)
    return (chosen for size in range(drafts + 2) for chosen in combinations(outcomes, size))


KINDS = (("mask", "aligned"), ("mask", "shifted"), ("anchor", "shifted"))
FORMS = [BlockForm(within, *kind) for within in ("bidirectional", "causal") for kind in KINDS]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("block_length", [2, 3, 4])
def test_rows_see_what_the_definition_says(block_length, form):
    for drafts in range(block_length):
        for proposals in proposal_sets(drafts):
            for block in range(1, block_length + 1):
                expected = dense_mask(CONTEXT, drafts, proposals, block, form)
                rows = mask_rows(proposals, block, form)
                seen = [{("kv", k) for k in range(CONTEXT + i + 1)} for i in range(drafts + 1)]
                for row in rows:
                    tail = [rows[k] for k in range(row.tail_start, row.tail_end)]
                    keys = {("kv", k) for k in range(CONTEXT + row.context_offset)}
                    seen.append(keys | {("slot", other.proposal, other.slot) for other in tail})
                assert seen == expected
                earlier = 1 if form.labels == "shifted" else 0
                assert [(r.proposal, r.slot, r.offset) for r in rows] == [
                    (a, s, a + s - earlier) for a in proposals for s in range(block)
                ]
                assert [r.repeats for r in rows] == [
                    a - 1 if form.slot_0 == "anchor" and s == 0 else -1 for a in proposals for s in range(block)
                ]
                assert Shape(drafts, proposals, block).mask_rows == len(rows)


def test_every_row_sees_at_least_one_key():
    for form in FORMS:
        for row in mask_rows((1, 2, 3), 3, form):
            assert row.context_offset >= 0
            assert row.tail_end > row.tail_start


def test_behind_an_anchor_labels_are_shifted():
    with pytest.raises(ValueError, match="goes with labels 'shifted' alone"):
        BlockForm(slot_0="anchor")


def test_full_shape_is_the_papers():
    shape = full_shape(8, 7)
    assert (shape.verify_rows, shape.mask_rows) == (8, 64)
    assert full_shape(8, 0) == Shape(0, (1,), 8)
    assert full_shape(4, 7) == Shape(3, (1, 2, 3, 4), 4), "no more drafts than a block of its own has"


shapes = st.builds(
    lambda drafts, outcomes, block: Shape(drafts, tuple(sorted(a for a in outcomes if a <= drafts + 1)), block),
    st.integers(0, 15),
    st.sets(st.integers(1, 16)),
    st.integers(0, 16),
)


@given(shapes, st.integers(0, 15), st.integers(1, 40), st.integers(0, 60), st.integers(1, 64))
def test_fitted_shapes_keep_every_limit(wanted, in_hand, remaining, position, max_positions):
    position = min(position, max_positions - 1)
    shape = fit_shape(
        wanted, drafts_in_hand=in_hand, remaining=remaining, position=position, max_positions=max_positions
    )
    assert shape.drafts <= min(wanted.drafts, in_hand, remaining - 1)
    assert position + shape.drafts < max_positions
    assert set(shape.proposals) <= set(wanted.proposals) & set(range(1, shape.drafts + 2))
    for row in mask_rows(shape.proposals, shape.block, BlockForm()):
        assert position + row.offset < max_positions
    if shape.proposals:
        assert shape.block >= 2
        assert remaining - max(shape.proposals) >= 2
    else:
        assert shape.mask_rows == 0


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_committed_counts_the_leading_matches(drafts, truths):
    truths = truths[: len(drafts) + 1]
    committed = count_committed(drafts, truths)
    emitted = [*drafts[: committed - 1], truths[committed - 1]]
    assert emitted == truths[:committed]
    assert committed == len(drafts) + 1 or drafts[committed - 1] != truths[committed - 1]


def test_unverified_drafts_survive_only_behind_the_anchor_they_guessed():
    assert drafts_left([5, 6, 7, 8], verified=2, committed=3, anchor=7) == [8]
    assert drafts_left([5, 6, 7, 8], verified=2, committed=3, anchor=9) == []
    assert drafts_left([5, 6, 7, 8], verified=2, committed=2, anchor=7) == []
    assert drafts_left([5, 6], verified=2, committed=3, anchor=7) == []


def test_a_proposal_may_reach_the_last_position_and_none_beyond():
    def fitted(position):
        return fit_shape(Shape(0, (1,), 4), drafts_in_hand=0, remaining=99, position=position, max_positions=40)

    assert fitted(35) == Shape(0, (1,), 4)
    assert fitted(36) == Shape(0)
