"""Slots that hear each other out: the head that corrects a slot once the token before it is known.

All slots of a proposal come from one pass, so each guesses without knowing what the others say, and a draft of single
likely words need not be a likely phrase. When drafts are picked, the anchor is known, and slot by slot the drafts
before: a small recurrent net over the slots (`weights.SlotHead`) adds to each final hidden state what those tokens
tell. The model's own head has scored the slots already; only the few best tokens of each are scored anew. Drafts alone
change, never the text. Its place in the design: a conditional head in the manner of Hydra (Ankner et al., arXiv
2402.05109), over mask rows instead of one row's many heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tidar_core.model.weights import SlotHead

CANDIDATES = 32
"""Tokens of each slot that are scored anew."""


def next_state(head: SlotHead, hidden: Tensor, before: Tensor, state: Tensor | None) -> Tensor:
    """The head's state in one slot. hidden: [rows, hidden], the slot's final hidden states; before: [rows, hidden],
    embeddings of the tokens before it; state: [rows, width], that of the slot before, None in slot 1."""
    heard = F.linear(hidden, head.hidden) + F.linear(before, head.token)
    return F.silu(heard if state is None else heard + F.linear(state, head.state))


def corrected(head: SlotHead, hidden: Tensor, before: Tensor) -> Tensor:
    """Hidden states of whole proposals when the tokens before each slot are known; slot 0 stays as it is.

    hidden: [blocks, block, hidden]; before: the same, the embedding of the token before each slot.
    """
    state, states = None, []
    for slot in range(1, hidden.shape[1]):
        state = next_state(head, hidden[:, slot], before[:, slot], state)
        states.append(state)
    if not states:
        return hidden
    correction = F.linear(torch.stack(states, dim=1), head.out)
    return torch.cat((hidden[:, :1], hidden[:, 1:] + correction), dim=1)


def rescored(scores: Tensor, candidates: Tensor, correction: Tensor, vocabulary: Tensor) -> Tensor:
    """The candidates' scores, fp32 [rows, candidates], when `correction` is added to the hidden states they come from.

    scores: [rows, candidates], from the hidden states as they were; candidates: their ids, int64; correction: [rows,
    hidden]; vocabulary: the model's head, [vocab, hidden].
    """
    return scores.float() + torch.einsum("rch,rh->rc", vocabulary[candidates].float(), correction.float())


def drafts_of(
    head: SlotHead,
    words: Tensor,
    vocabulary: Tensor,
    hidden: Tensor,
    scores: Tensor,
    candidates: Tensor,
    anchors: Tensor,
    pick: Callable[[int, Tensor, Tensor], Tensor],
) -> Tensor:
    """One candidate of each slot, one slot after the other: int64 [proposals, slots]. All on the device, sizes alone
    decide what is launched.

    words: [vocab, hidden], the embedding. hidden: [slots, proposals, hidden] of slots 1, 2, …; scores and candidates:
    [slots, proposals, candidates], as the model's head scored them; anchors: int64 [proposals]. pick(slot, scores,
    candidates): which of a slot's is taken, int64 [proposals]; below 0 where none can be.
    """
    before, state, drafts = anchors, None, []
    for slot, own in enumerate(hidden):
        state = next_state(head, own, words[before], state)
        anew = rescored(scores[slot], candidates[slot], F.linear(state, head.out), vocabulary)
        drafts.append(pick(slot, anew, candidates[slot]))
        before = drafts[-1].clamp(min=0)  # a row without a finite score drafts nothing that could hold
    return torch.stack(drafts, dim=1)
