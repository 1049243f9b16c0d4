"""One step of one sequence: which rows run, what each may see, and what their answers mean. Read this first.

Between two steps a sequence has `p` committed positions (their K/V lie in pages), an *anchor* (the token at
position p, decided and sent, its K/V not yet computed) and m *drafts* for positions p+1 … p+m. A step runs, in
one forward pass (TiDAR, arXiv 2511.08923, section 3; the sets P and b are ours):

    row                                   token               position   attends to
    verify row i, 0 <= i <= n             anchor, or draft i  p+i        context [0, p), verify rows 0 … i
    proposal a in P, slot s, 0 <= s < b   [MASK]              p+a+s      context, verify rows 0 … a-1,
                                                                         the slots of its own proposal

Verify row i gives the true token y of position p+i+1. Draft i holds while it equals the y of row i-1. With
a = 1 + the drafts that held in a row, a rows are committed (the cursor moves, nothing is copied), y of row a-1
is the new anchor, and a tokens are emitted. If a is in P, slots 1 … b-1 of proposal a are the new drafts.

Slot s of proposal a guesses position p+a+s. Drafters whose slots were made to say what comes next (`BlockForm.labels`
is "shifted") guess the same from one position earlier, where slot 0 may hold a token that is known (`slot_0` "anchor",
as in Orthrus, arXiv 2605.12825):

    proposal a in P, slot s, 0 <= s < b   [MASK]; of verify   p+a+s-1    context, verify rows 0 … a-2,
                                          row a-1 if s = 0               the slots of its own proposal

A prefill chunk is the same step with c known tokens in the anchor's place: p is then the position of the last
known token, and only the chunk that ends with the last known token emits.

Everything here is arithmetic on integers: no torch, no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

WithinBlock = Literal["bidirectional", "causal"]


class Shape(NamedTuple):
    """What one sequence does in one step: verify n `drafts`, draft for the outcomes `proposals` (P) with
    `block` (b) slots each."""

    drafts: int = 0
    proposals: tuple[int, ...] = ()
    block: int = 0

    @property
    def verify_rows(self) -> int:
        """n + 1: the anchor and the drafts."""
        return self.drafts + 1

    @property
    def mask_rows(self) -> int:
        """|P| b: all slots of all proposals."""
        return len(self.proposals) * self.block


PLAIN = Shape()
"""Autoregression: one row, nothing drafted."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a drafter wants its proposals laid. within_block: whether slots see each other both ways or only earlier
    ones. slot_0: a "mask" like the others, or the "anchor": the token that the proposal follows, whose verify row it
    repeats. labels: whether slots guess their own position ("aligned") or the next one ("shifted"). An anchor needs no
    guess, so behind one the labels are shifted."""

    within_block: WithinBlock = "bidirectional"
    slot_0: Literal["mask", "anchor"] = "mask"
    labels: Literal["aligned", "shifted"] = "aligned"

    def __post_init__(self) -> None:
        if (self.slot_0, self.labels) == ("anchor", "aligned"):
            raise ValueError("slot_0 'anchor' goes with labels 'shifted' alone")


class MaskRow(NamedTuple):
    """One slot of one proposal. Offsets count from p; the tail range counts this sequence's mask rows.

    The row sits at position p + `offset`, sees every position below p + `context_offset` (committed tokens and
    verify rows in front of it) and the mask rows `tail_start` <= k < `tail_end`. repeats: the verify row whose token
    stands in it, -1 for a mask.
    """

    proposal: int
    slot: int
    offset: int
    context_offset: int
    tail_start: int
    tail_end: int
    repeats: int


@lru_cache(maxsize=4096)
def mask_rows(proposals: tuple[int, ...], block: int, form: BlockForm) -> tuple[MaskRow, ...]:
    """The mask rows of a step, proposal by proposal in the order of `proposals`, slot by slot."""
    rows = []
    earlier = int(form.labels == "shifted")
    for index, outcome in enumerate(proposals):
        first, start = index * block, outcome - earlier
        for slot in range(block):
            end = first + (slot + 1 if form.within_block == "causal" else block)
            repeats = start if form.slot_0 == "anchor" and not slot else -1
            rows.append(MaskRow(outcome, slot, start + slot, start, first, end, repeats))
    return tuple(rows)


@lru_cache(maxsize=256)
def full_shape(block_length: int, drafts_in_hand: int) -> Shape:
    """Full pre-drafting, as in the paper: verify all drafts, draft for every outcome with all slots."""
    drafts = min(drafts_in_hand, block_length - 1)
    return Shape(drafts, tuple(range(1, drafts + 2)), block_length)


def fit_shape(wanted: Shape, *, drafts_in_hand: int, remaining: int, position: int, max_positions: int) -> Shape:
    """The part of `wanted` that a sequence can use.

    remaining: tokens that may still be emitted (>= 1). position: p. No row may reach `max_positions`; no draft
    is verified that could not be emitted; no outcome is drafted for that leaves nothing to verify.
    """
    if not wanted.drafts and not wanted.proposals:
        return PLAIN
    drafts = max(0, min(wanted.drafts, drafts_in_hand, remaining - 1, max_positions - 1 - position))
    if wanted.block < 2:
        return Shape(drafts)
    furthest = min(drafts + 1, remaining - 2, max_positions - position - wanted.block)
    proposals = tuple([outcome for outcome in wanted.proposals if outcome <= furthest])
    return Shape(drafts, proposals, wanted.block) if proposals else Shape(drafts)


def count_committed(drafts: Sequence[int], truths: Sequence[int]) -> int:
    """a = 1 + how many drafts hold in a row. `truths[i]` is the y of verify row i; one more than `drafts`."""
    held = 0
    while held < len(drafts) and drafts[held] == truths[held]:
        held += 1
    return held + 1


def drafts_left(in_hand: Sequence[int], verified: int, committed: int, anchor: int) -> list[int]:
    """Drafts that outlive a step which brought no new ones.

    Drafts n+1 … m guessed on top of drafts 1 … n and of draft n+1 as the new anchor: they stay usable if all n
    held and the anchor is that token.
    """
    if committed == verified + 1 and len(in_hand) > verified and in_hand[verified] == anchor:
        return list(in_hand[verified + 1 :])
    return []
