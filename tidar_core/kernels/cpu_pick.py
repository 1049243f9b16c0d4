"""The token rule as one call into `cpu_pick.cpp`."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tidar_core.kernels.ops import Pick
from tidar_core.kernels.rules import RuleNumbers, rule_numbers
from tidar_core.sampling.picking import adjusted
from tidar_core.sampling.token_rule import TokenRule, distinct, of_all


def numbers_unless_greedy(rules: Sequence[TokenRule], vocab: int, shift: Tensor | None) -> RuleNumbers | None:
    """The rules' numbers for the library; None where all rows pick the best token."""
    if of_all(rules, _take_the_best):
        return None
    return rule_numbers(rules, vocab, torch.device("cpu"), shift)


def _take_the_best(rules: Sequence[TokenRule]) -> bool:
    return all(rule.params.temperature == 0 for rule in distinct(rules))


def addresses(numbers: RuleNumbers | None) -> tuple[int | None, int | None]:
    """The addresses of the numbers' tensors, which have to live as long as the addresses are used."""
    return (None, None) if numbers is None else (numbers.reals.data_ptr(), numbers.whole.data_ptr())


def bind_pick(function: Callable[..., None]) -> Pick:
    """`Ops.pick` over a function of the compiled library."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [  # type: ignore[attr-defined]
        pointer, ctypes.c_int64, integer, integer, pointer, pointer, pointer, integer,
    ]  # fmt: skip
    function.restype = None  # type: ignore[attr-defined]

    def pick_tokens(logits: Tensor, rules: Sequence[TokenRule], shift: Tensor | None = None) -> Tensor:
        # In fp32, which is exact, and here whatever they are: torch's noise has other bits, and a row that is adjusted
        # brings those beside it along.
        scores = adjusted(logits, rules).float()
        if scores.stride(1) != 1:
            scores = scores.contiguous()
        rows, vocab = scores.shape
        numbers = numbers_unless_greedy(rules, vocab, shift)
        picks = torch.empty(rows, dtype=torch.int64)
        function(
            scores.data_ptr(), scores.stride(0), rows, vocab, *addresses(numbers), picks.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return picks

    return pick_tokens
