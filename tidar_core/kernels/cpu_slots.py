"""Drafting by the slot head as one call into `cpu_slots.cpp`."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from tidar_core.kernels.cpu_build import LANES
from tidar_core.kernels.cpu_pick import addresses, numbers_unless_greedy
from tidar_core.kernels.ops import DraftSlots, GuessedSlots
from tidar_core.model.slot_head import CANDIDATES
from tidar_core.model.weights import SlotHead
from tidar_core.sampling.token_rule import any_adjusts, of_all


def bind_draft_slots(function: Callable[..., None]) -> DraftSlots:
    """`Ops.draft_slots` over a function of the compiled library."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [  # type: ignore[attr-defined]
        *[pointer] * 4, integer, integer, pointer, pointer, integer, pointer, pointer, integer, integer, pointer,
        pointer, integer, pointer, pointer, pointer, integer,
    ]  # fmt: skip
    function.restype = None  # type: ignore[attr-defined]

    def draft_slots(head: SlotHead, words: Tensor, vocabulary: Tensor, slots: GuessedSlots) -> Tensor | None:
        size, width = head.out.shape
        fits = size % LANES == 0 and width % LANES == 0 and slots.hidden.dtype == words.dtype == head.out.dtype
        if not fits or of_all(slots.rules, any_adjusts):
            return None
        logits, hidden = slots.logits.float().contiguous(), slots.hidden.contiguous()
        drafts = torch.empty(len(hidden), dtype=torch.int64)
        each, first = torch.tensor(slots.counts, dtype=torch.int32), slots.anchors.contiguous()
        numbers = numbers_unless_greedy(slots.rules, logits.shape[1], slots.shift)
        function(
            head.hidden.data_ptr(), head.token.data_ptr(), head.state.data_ptr(), head.out.data_ptr(), size, width,
            words.data_ptr(), vocabulary.data_ptr(), logits.shape[1], hidden.data_ptr(), logits.data_ptr(),
            len(hidden), len(each), each.data_ptr(), first.data_ptr(), min(CANDIDATES, logits.shape[1]),
            *addresses(numbers), drafts.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return drafts

    return draft_slots
