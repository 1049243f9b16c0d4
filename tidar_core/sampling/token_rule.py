"""The rule by which one token is picked, and the rules of many rows."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from tidar_core.request import SamplingParams
from tidar_core.sampling.penalties import NO_HISTORY, History

NO_TOKEN = -1
"""Picked where a row has no finite best score."""

_COLDEST = 1e-30


class Kind(Enum):
    GREEDY = "greedy"
    WHOLE = "whole"  # sampled, every token kept
    RANKED = "ranked"  # top-k, then perhaps top-p and min-p
    TAILED = "tailed"  # top-p or min-p alone


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How one token is picked.

    position: of the token to pick (its logits come from the row before). banned: ids never picked here:
    end-of-sequence and stop ids before min_tokens, the ends of bad words; ids outside the vocabulary are ignored.
    history: what came before, for parameters that penalise it. allowed: the only ids that may be picked, uint8, a bit
    an id, the lowest first; None where all may.
    """

    params: SamplingParams
    position: int
    banned: tuple[int, ...] = ()
    history: History = NO_HISTORY
    allowed: np.ndarray | None = field(default=None, compare=False)

    @property
    def adjusts(self) -> bool:
        """Whether banned ids, a grammar, bias or penalties change this row's scores."""
        return bool(self.banned) or self.allowed is not None or self.params.changes_scores

    def keeps_all(self, vocab: int) -> bool:
        """Whether S is the whole vocabulary, or the best token alone."""
        return kind_of(self.params, vocab) in (Kind.GREEDY, Kind.WHOLE)


def distinct(rules: Sequence[TokenRule]) -> Iterable[TokenRule]:
    """Each rule once, however many rows share it."""
    return {id(rule): rule for rule in rules}.values()


T = TypeVar("T")


class Rules(tuple[TokenRule, ...]):
    """The rules of rows, one each, for many steps: what `of_all` derives from them is kept with them."""

    def __init__(self, rules: Iterable[TokenRule]):
        self._found: dict[Hashable, Any] = {}


def of_all(rules: Sequence[TokenRule], find: Callable[..., T], *arguments: Hashable) -> T:
    """`find(rules, *arguments)`, computed once and then kept where the rules are `Rules`. find: a named function, the
    same object at each call, whose result nobody changes."""
    if not isinstance(rules, Rules):
        return find(rules, *arguments)
    key = (find, *arguments)
    if key not in rules._found:
        rules._found[key] = find(rules, *arguments)
    found: T = rules._found[key]
    return found


def kept_by_rank(params: SamplingParams, vocab: int) -> int:
    """How many tokens top-k keeps, ties at the border not counted; 0 where it keeps all."""
    return params.top_k if params.top_k < vocab else 0


def any_adjusts(rules: Sequence[TokenRule]) -> bool:
    """Whether any of the rules changes its row's scores."""
    return any(rule.adjusts for rule in distinct(rules))


def heat(params: SamplingParams) -> float:
    """The temperature that scores are divided by, 0 for greedy. Below `_COLDEST` x / T would overflow, and the choice
    would be the same."""
    return max(params.temperature, _COLDEST) if params.temperature else 0.0


def top_p_cut(params: SamplingParams) -> float:
    """The share of the mass that top-p removes, 1 - top_p; below 0 where it keeps all."""
    # The best token always stays: its share is 1, so the cut has to stay below.
    return min(1 - params.top_p, 1 - 2.0**-24) if params.top_p < 1 else -1.0


def kind_of(params: SamplingParams, vocab: int) -> Kind:
    """What S keeps, by which rows are picked in different ways."""
    if params.temperature == 0:
        return Kind.GREEDY
    if kept_by_rank(params, vocab):
        return Kind.RANKED
    return Kind.WHOLE if params.top_p >= 1 and params.min_p <= 0 else Kind.TAILED
