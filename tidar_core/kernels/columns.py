"""The columns of the arrays in which one step hands over to the next, for all that write or read them. No torch."""

COMMITTED, ANCHOR, DRAFTS = range(3)
"""Of a state, int32 [plans + 1, DRAFTS + width] (`succession`): how many tokens the last step of a sequence committed,
its anchor, and from DRAFTS on the drafts in hand."""

FIRST_TRUTH, MOST_DRAFTS, FIRST_SLOT, BLOCK, FIRST_ROW, FIRST_SCORE, DRAFTER, OUTCOMES = range(8)
"""Of a table of plans, int32 [plans, OUTCOMES + most outcomes], a row a plan: where its true tokens begin among those
of all; how many drafts it verifies at most; where its slots begin among those of all; its block length, 0 where it does
not draft; the row of slot 1 of its first proposal, and that slot's row of the scores; which of the plans that draft it
is; and from OUTCOMES on the outcomes that it drafts for, 0 behind the last."""
