"""Which tokens may come next, behind a sequence's drafts too: by where it stands in its grammar."""

import sys
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from tidar_core.sampling import NO_TOKEN, TokenRule, pick_tokens

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

TOO_SLOW = "the grammar has too many readings to be followed in time: make it simpler"
SLOWEST_SECONDS = 0.1  # of computing for one token, where a grammar is so ambiguous that it holds all others up
ANY_NUMBER = sys.maxsize


class Constraint(Protocol):
    """What an answer has to follow, behind the tokens that were emitted. Whatever looks ahead goes back there.

    error: why the answer cannot go on, in one line, or None. A mask is uint8, a bit a token id, the lowest first; None
    where any token may come.
    """

    @property
    def error(self) -> str | None: ...

    @property
    def ended(self) -> bool:
        """Nothing may follow any more."""

    @property
    def free(self) -> int:
        """So many tokens at least may be any."""

    def advance(self, tokens: Items[int]) -> int:
        """Moves on behind emitted tokens; how many there are until the answer ends. Sets `error` where one of them is
        not allowed, or takes too long: the answer ends with that one."""

    def masks(self, drafts: Items[int]) -> list[np.ndarray | None]:
        """What may follow the emitted tokens and drafts 1 … i, for i = 0 … n; None where anything may, or where a
        draft that ends the answer makes the question idle. Behind a draft that is refused nothing is asked."""

    def guess(self, token: int) -> bool:
        """Moves on behind a draft, if it is allowed; `forget` goes back."""

    def mask(self) -> np.ndarray | None:
        """What may come next, guesses included."""

    def forget(self, guesses: int) -> None:
        """Goes back over so many guesses."""


class GrammarState:
    """The state of a grammar, by xgrammar: a `Constraint`.

    Where looking ahead takes too long nothing is guessed any more: drafts must not end an answer that would be
    complete without them. What was too slow behind drafts that then held ends it where it would end without.
    """

    def __init__(self, compiled: "CompiledGrammar", end_ids: list[int], vocab_size: int):
        import xgrammar

        # the matcher complains to the log of each special token that it is asked for
        self._never = frozenset(compiled.tokenizer_info.special_token_ids) - set(end_ids)
        self._error: str | None = None
        self._ahead = 0  # guesses that the matcher stands behind
        self._slow = False  # whether the last that was asked of the matcher took too long
        self._guesses_too_slowly = False
        self._too_slow_at: int | None = None  # of the tokens that `masks` looked at, the last that can be emitted
        self._words = -(-vocab_size // 32)
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=end_ids or None, terminate_without_stop_token=not end_ids
        )

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    @property
    def free(self) -> int:
        return 0

    def advance(self, tokens: Items[int]) -> int:
        for count, token in enumerate(tokens, 1):
            if self.ended:
                return count - 1
            if not self._accept(token):
                self._error = "the answer does not follow its grammar"
            elif count == self._too_slow_at:
                self._error = TOO_SLOW
            if self._error is not None:
                return count
        return len(tokens)

    def masks(self, drafts: Items[int]) -> list[np.ndarray | None]:
        found = [self.mask()]
        self._too_slow_at = None
        for count, draft in enumerate(drafts, 1):
            if not self._step_ahead(draft):
                break
            slow_step = self._slow
            found.append(self.mask())
            if self._too_slow_at is None and (slow_step or self._slow):
                self._too_slow_at = count if slow_step else count + 1  # a slow mask shows with the token it is for
        self.forget(self._ahead)
        return found + [None] * (len(drafts) + 1 - len(found))

    def guess(self, token: int) -> bool:
        possible = token >= 0 and token not in self._never and not self.ended and not self._guesses_too_slowly
        return possible and self._step_ahead(token)

    def mask(self) -> np.ndarray | None:
        if self.ended:
            return None
        began = time.thread_time()
        words = torch.empty((1, self._words), dtype=torch.int32)
        bound = self._matcher.fill_next_token_bitmask(words)
        self._watch(began)
        return words.numpy().view(np.uint8)[0] if bound else None

    def forget(self, guesses: int) -> None:
        self._matcher.rollback(guesses)
        self._ahead -= guesses

    def _step_ahead(self, token: int) -> bool:
        """Moves on behind a token that is not emitted, if the grammar allows it."""
        self._ahead += 1
        allowed = self._accept(token)
        self._ahead -= not allowed
        return allowed

    def _accept(self, token: int) -> bool:
        began = time.thread_time()
        allowed = bool(self._matcher.accept_token(token))
        self._watch(began)
        return allowed

    def _watch(self, began: float) -> None:
        self._slow = time.thread_time() - began > SLOWEST_SECONDS
        if self._slow and self._ahead:
            self._guesses_too_slowly = True
        elif self._slow:
            self._error = TOO_SLOW


def constrained(rule: TokenRule, mask: np.ndarray | None) -> TokenRule:
    """The rule under a constraint. Where that leaves nothing but the end, min_tokens cannot put it off."""
    if mask is None:
        return rule
    return replace(rule, allowed=mask, banned=rule.banned if allows_beside(mask, rule.banned) else ())


def allows_beside(mask: np.ndarray, tokens: Items[int]) -> bool:
    """Whether a mask allows any token but these."""
    rest = mask.copy()
    for token in tokens:
        if 0 <= token < 8 * len(rest):
            rest[token // 8] &= ~np.uint8(1 << token % 8)
    return bool(rest.any())


def only_token(mask: np.ndarray) -> int | None:
    """The token of a mask that allows one alone."""
    (places,) = mask.nonzero()
    if len(places) != 1 or int(mask[places[0]]).bit_count() != 1:
        return None
    return 8 * int(places[0]) + int(mask[places[0]]).bit_length() - 1


def guess_within(
    followed: Items[tuple[Constraint | None, Items[int]]], logits: Tensor, rules: Items[TokenRule]
) -> list[list[int]]:
    """Guesses that the constraints allow, for sequences with a constraint and guesses each, in the order of the rows.

    A guess that is refused is picked anew from the same scores, among what is allowed there; behind
    the end nothing is guessed. Slot by slot, since what is allowed depends on the guesses before, with one pick for
    all rows of a slot that need it.
    """
    kept = [list(guesses) if constraint is None else [] for constraint, guesses in followed]
    starts = accumulate((len(guesses) for _, guesses in followed), initial=0)
    going = [
        _Guesser(constraint, guesses, start, tokens)
        for (constraint, guesses), start, tokens in zip(followed, starts, kept, strict=False)
        if constraint is not None
    ]
    guessers = going
    for slot in range(max((len(guesser.guesses) for guesser in going), default=0)):
        going = [guesser for guesser in going if slot < len(guesser.guesses) and not guesser.constraint.ended]
        refused = [guesser for guesser in going if not guesser.take(guesser.guesses[slot])]
        for guesser, token in zip(refused, _pick_anew(refused, slot, logits, rules), strict=True):
            guesser.take(token)
        going = [guesser for guesser in going if len(guesser.kept) > slot]
    for guesser in guessers:
        guesser.constraint.forget(len(guesser.kept))
    return kept


@dataclass(frozen=True, slots=True)
class _Guesser:
    """One sequence's guesses, whose rows begin at `start`, and those of them that are kept."""

    constraint: Constraint
    guesses: Items[int]
    start: int
    kept: list[int]

    def take(self, token: int) -> bool:
        allowed = self.constraint.guess(token)
        if allowed:
            self.kept.append(token)
        return allowed


def _pick_anew(guessers: Items[_Guesser], slot: int, logits: Tensor, rules: Items[TokenRule]) -> list[int]:
    """What each would guess in this slot under its constraint."""
    masks = [guesser.constraint.mask() for guesser in guessers]
    picks = [NO_TOKEN if mask is None else only_token(mask) for mask in masks]
    rows = {index: guessers[index].start + slot for index, pick in enumerate(picks) if pick is None}
    if rows:
        own = [constrained(rules[row], masks[index]) for index, row in rows.items()]
        found = pick_tokens(logits[torch.tensor(list(rows.values()), device=logits.device)], own).tolist()
        for index, token in zip(rows, found, strict=True):
            picks[index] = token
    return [NO_TOKEN if pick is None else pick for pick in picks]
