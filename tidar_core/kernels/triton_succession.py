"""What a step leaves to the next one, in Triton: each function of `tidar_core.kernels.succession` as one launch.

All of it is small: what counts is that the host launches three kernels instead of some sixty operations.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.kernels import columns
from tidar_core.kernels.ops import StepRows
from tidar_core.kernels.succession import Carried, Decided

ROWS_A_PROGRAM = 128
COMMITTED = tl.constexpr(columns.COMMITTED)
ANCHOR = tl.constexpr(columns.ANCHOR)
DRAFTS = tl.constexpr(columns.DRAFTS)
FIRST_TRUTH = tl.constexpr(columns.FIRST_TRUTH)
MOST_DRAFTS = tl.constexpr(columns.MOST_DRAFTS)
FIRST_SLOT = tl.constexpr(columns.FIRST_SLOT)
BLOCK_LENGTH = tl.constexpr(columns.BLOCK)
FIRST_ROW = tl.constexpr(columns.FIRST_ROW)
FIRST_SCORE = tl.constexpr(columns.FIRST_SCORE)
DRAFTER = tl.constexpr(columns.DRAFTER)
OUTCOMES = tl.constexpr(columns.OUTCOMES)


@triton.jit(
    do_not_specialize=["rows", "verify", "pages"],
    do_not_specialize_on_alignment=[
        "positions", "context_end", "sequence", "page_table", "write_slots", "tokens", "repeats", "state", "source",
        "nearest",
    ],
)  # fmt: skip
def _carry(
    positions, context_end, sequence, page_table, write_slots, tokens, repeats, state, source, nearest, rows, verify,
    pages, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program. All int32; state: [.., DRAFTS + WIDTH]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    owner = tl.load(sequence + row, mask=inside, other=0)
    at = state + tl.load(source + owner, mask=inside, other=0) * (DRAFTS + WIDTH)
    in_hand = tl.zeros([BLOCK], tl.int32)
    for draft in tl.static_range(WIDTH):
        in_hand += (tl.load(at + DRAFTS + draft, mask=inside, other=-1) >= 0).to(tl.int32)
    drafts = inside & (row >= verify)
    laid_for = tl.load(nearest + row - verify, mask=drafts, other=0)
    fewer = tl.where(drafts, tl.minimum(in_hand + 1 - laid_for, 0), 0)
    repeated = tl.load(repeats + row - verify, mask=drafts, other=-1)
    tl.store(repeats + row - verify, repeated + fewer, mask=drafts & (repeated >= 0))
    ahead = tl.load(at + COMMITTED, mask=inside, other=0) + fewer
    position = tl.load(positions + row, mask=inside, other=0) + ahead
    tl.store(positions + row, position, mask=inside)
    tl.store(context_end + row, tl.load(context_end + row, mask=inside, other=0) + ahead, mask=inside)
    writes = inside & (row < verify)
    place = tl.load(tokens + row, mask=writes, other=0)
    tl.store(tokens + row, tl.maximum(tl.load(at + ANCHOR + place, mask=writes, other=0), 0), mask=writes)
    page = tl.load(page_table + owner * pages + position // PAGE, mask=writes, other=0)
    tl.store(write_slots + row, page * PAGE + position % PAGE, mask=writes)


def carry(rows: StepRows, tokens: Tensor, repeats: Tensor, carried: Carried, page_size: int) -> None:
    """`succession.carry`."""
    count = len(rows.positions)
    _carry[(triton.cdiv(count, ROWS_A_PROGRAM),)](
        rows.positions, rows.context_end, rows.sequence, rows.page_table, rows.write_slots, tokens, repeats,
        carried.state, carried.source, carried.nearest, count, len(tokens), rows.page_table.shape[1],
        WIDTH=carried.state.shape[1] - columns.DRAFTS, PAGE=page_size, BLOCK=ROWS_A_PROGRAM, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["plans", "outcomes"], do_not_specialize_on_alignment=["truths", "state", "source"])
def _decide(
    truths, table, state, source, after, came, rows, scores, anchors, plans, outcomes,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A plan a program, the last one for the row of zeros. truths, rows, scores, anchors: int64; all else int32."""
    plan = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    drafted = place < WIDTH
    state_after = after + plan * (DRAFTS + WIDTH)
    if plan == plans:
        tl.store(state_after + place, 0, mask=place < DRAFTS + WIDTH)
    else:
        laid = table + plan * (outcomes + OUTCOMES)
        first, most, start = tl.load(laid + FIRST_TRUTH), tl.load(laid + MOST_DRAFTS), tl.load(laid + FIRST_SLOT)
        block, row, score = tl.load(laid + BLOCK_LENGTH), tl.load(laid + FIRST_ROW), tl.load(laid + FIRST_SCORE)
        number = tl.load(laid + DRAFTER)
        hand_at = state + tl.load(source + plan) * (DRAFTS + WIDTH) + DRAFTS
        hand = tl.load(hand_at + place, mask=drafted, other=-1)
        in_hand = tl.sum((hand >= 0).to(tl.int32), 0)
        verified = tl.minimum(most, in_hand)
        truth = tl.load(truths + first + place, mask=place < verified, other=-1).to(tl.int32)
        held = tl.min(tl.where((place < verified) & (truth != hand), place, verified), 0)
        anchor = tl.load(truths + first + held).to(tl.int32)
        guess = tl.max(tl.where(place == verified, hand, -1), 0)
        stays = (held == verified) & (guess >= 0) & (guess == anchor)
        left = tl.load(hand_at + verified + 1 + place, mask=place < WIDTH - 1 - verified, other=-1)
        tl.store(state_after + COMMITTED, held + 1)
        tl.store(state_after + ANCHOR, anchor)
        tl.store(state_after + DRAFTS + place, tl.where(stays, left, -1), mask=drafted)
        outcome = tl.load(laid + OUTCOMES + place, mask=place < outcomes, other=0)
        outcome = tl.where(place == 0, tl.minimum(outcome, in_hand + 1), outcome)
        true = (outcome == held + 1) & (place < outcomes) & (block > 0)
        found = tl.min(tl.where(true, place, BLOCK), 0)
        tl.store(came + plan, tl.where(found < BLOCK, found, -1))
        proposal = tl.where(found < BLOCK, found, 0)
        slots = place < block - 1
        tl.store(rows + start + place, (row + proposal * block + place).to(tl.int64), mask=slots)
        tl.store(scores + start + place, (score + proposal * (block - 1) + place).to(tl.int64), mask=slots)
        if block > 0:
            tl.store(anchors + number, tl.maximum(anchor, 0).to(tl.int64))


def decide(truths: Tensor, table: Tensor, state: Tensor, source: Tensor, slots: int, drafting: int) -> Decided:
    """`succession.decide`."""
    plans, width, device = len(table), state.shape[1] - columns.DRAFTS, state.device
    decided = Decided(
        state=torch.empty(plans + 1, state.shape[1], dtype=torch.int32, device=device),
        came=torch.empty(plans, dtype=torch.int32, device=device),
        rows=torch.empty(slots, dtype=torch.int64, device=device),
        scores=torch.empty(slots, dtype=torch.int64, device=device),
        anchors=torch.empty(drafting, dtype=torch.int64, device=device),
    )
    _decide[(plans + 1,)](
        truths, table, state, source, decided.state, decided.came, decided.rows, decided.scores, decided.anchors,
        plans, table.shape[1] - columns.OUTCOMES, WIDTH=width, BLOCK=triton.next_power_of_2(state.shape[1]),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return decided


@triton.jit(do_not_specialize=["outcomes"], do_not_specialize_on_alignment=["picks"])
def _renew(state, came, table, picks, outcomes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A plan a program. picks: int64; all else int32."""
    plan = tl.program_id(0)
    if tl.load(came + plan) >= 0:
        place = tl.arange(0, BLOCK)
        laid = table + plan * (outcomes + OUTCOMES)
        start, block = tl.load(laid + FIRST_SLOT), tl.load(laid + BLOCK_LENGTH)
        new = tl.load(picks + start + place, mask=place < block - 1, other=-1).to(tl.int32)
        broken = tl.min(tl.where(new < 0, place, BLOCK), 0)
        tl.store(
            state + plan * (DRAFTS + WIDTH) + DRAFTS + place, tl.where(place < broken, new, -1), mask=place < WIDTH
        )


def renew(decided: Decided, table: Tensor, picks: Tensor) -> None:
    """`succession.renew`."""
    length = decided.state.shape[1]
    _renew[(len(table),)](
        decided.state, decided.came, table, picks, table.shape[1] - columns.OUTCOMES, WIDTH=length - columns.DRAFTS,
        BLOCK=triton.next_power_of_2(length), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
