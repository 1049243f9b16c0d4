"""Which tokens may come next, behind a sequence's drafts too: by where it stands in its grammar."""

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.timed_calls import Crowded, Late, TimedCalls
from tidar_core.sampling.picking import pick_tokens
from tidar_core.sampling.token_rule import NO_TOKEN, TokenRule

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

T = TypeVar("T")

TOO_SLOW = "the grammar has too many readings to be followed in time: make it simpler"
CROWDED = "others' grammars take too long for one of this kind to be followed now: try again later"
SLOWEST_SECONDS = 0.1  # of computing a token, where a grammar is so ambiguous that it holds all others up
SLOW_TOKENS = 16  # over which that is averaged: one that takes long now and then is not slow
GUESSING_SECONDS = 0.05  # of computing a step behind drafts, which save no more
AHEAD_SECONDS = 0.25  # of computing a step behind drafts, from where on the rest of them are given up
QUICK_SECONDS = 0.01  # of computing: what took longer once is not waited for without a limit again
ANY_NUMBER = sys.maxsize


class Constraint(Protocol):
    """What an answer has to follow. It stands behind the tokens that were emitted; what looks ahead of them returns
    there.

    error: why the answer cannot go on, in one line, or None. A mask is uint8, a bit a token id, the lowest first; None
    where any token may come.
    """

    @property
    def error(self) -> str | None: ...

    @property
    def ended(self) -> bool:
        """Whether nothing may follow any more."""

    @property
    def free(self) -> int:
        """How many of the next tokens, at least, are not constrained."""

    @property
    def seconds(self) -> float:
        """Processor seconds spent here on the last step, its guesses included."""

    @property
    def guesses(self) -> bool:
        """Whether anything is guessed behind what was emitted."""

    def advance(self, tokens: Items[int]) -> int:
        """Moves on behind emitted tokens; returns how many of them belong to the answer. Sets `error` where one is not
        allowed or takes too long: the answer ends with that one."""

    def masks(self, drafts: Items[int]) -> list[np.ndarray | None]:
        """The masks of what may follow the emitted tokens and drafts 1 … i, for i = 0 … n; None where anything may, or
        where an earlier draft ends the answer. Behind a draft that is refused nothing is looked up. One that allows no
        token where it cannot be told in time: behind drafts that is asked for again without them."""

    def guess(self, token: int) -> bool:
        """Moves on behind a draft, if it is allowed; `forget` goes back."""

    def mask(self) -> np.ndarray | None:
        """What may come next, guesses included."""

    def forget(self, guesses: int) -> None:
        """Goes back over so many guesses."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What looking at drafts took, which those that hold need not be asked for again. masks: seconds for that in front
    and for each behind a draft; drafts: those that are allowed, each with the seconds for it."""

    masks: tuple[float, ...] = ()
    drafts: tuple[tuple[int, float], ...] = ()


_Question = tuple[tuple[int, ...], int | None]


class GrammarState:
    """The state of a grammar, by xgrammar: a `Constraint`.

    Where looking ahead takes too long once, nothing is guessed any more in the answer. It ends where its tokens take
    too long one by one, each counted as it would be without drafts: these must not end an answer that would be complete
    without.

    timed_calls: through which the matcher is asked once it took long, from the start where `apart`. What is late there
    ends the answer if the next token needs it. Behind drafts it may never be needed: the matcher is lost with the call,
    and the copy that was kept of it takes its place.
    """

    def __init__(
        self,
        compiled: "CompiledGrammar",
        end_ids: list[int],
        vocab_size: int,
        timed_calls: TimedCalls | None = None,
        apart: bool = False,
    ):
        # the matcher complains to the log of each special token that it is asked for
        self._never = frozenset(compiled.tokenizer_info.special_token_ids) - set(end_ids)
        self._error: str | None = None
        self._emitted: list[int] = []
        self._guessed: list[int] = []  # tokens behind those, which the matcher stands behind
        self._guesses_too_slowly = False
        self._ahead = _Ahead()
        self._given_up = False  # looking at drafts, in this step
        self._late: _Question | None = None  # which need not be tried again
        self._each = 0.0  # seconds a token, averaged
        self._seconds, self._spent, self._guessing = 0.0, 0.0, 0.0
        self._words = -(-vocab_size // 32)
        self._end_ids = end_ids
        self._no_ends = np.full(4 * self._words, 0xFF, dtype=np.uint8)
        for token in end_ids:
            self._no_ends[token // 8] &= 0xFF ^ (1 << token % 8)
        self._compiled = compiled
        self._timed_calls = timed_calls
        self._apart = apart
        self._matcher = self._begun()  # None where it was lost, and the answer with it
        # Behind what was emitted, while guesses are asked about by timed calls.
        self._kept: GrammarMatcher | None = None

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def ended(self) -> bool:
        return self._matcher is not None and bool(self._matcher.is_terminated())

    @property
    def free(self) -> int:
        return 0

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def guesses(self) -> bool:
        return not self._guesses_too_slowly

    def advance(self, tokens: Items[int]) -> int:
        ahead, self._ahead = self._ahead, _Ahead()
        until = self._follow(tokens, ahead)
        self._seconds, self._spent, self._guessing = self._spent, 0.0, 0.0
        self._given_up, self._kept = False, None
        return until

    def replay(self, token: int) -> None:
        """As `advance`, for a token that was emitted elsewhere: what it takes here ends nothing, unless it is late."""
        self.advance((token,))
        self._each = 0.0
        if self._error == TOO_SLOW and self._matcher is not None:
            self._error = None

    def masks(self, drafts: Items[int]) -> list[np.ndarray | None]:
        mask, seconds = self._timed_mask()
        found, took, allowed = [mask], [seconds], []
        rest: np.ndarray | None = None
        for draft in drafts:
            if self._given_up or self._guessing > AHEAD_SECONDS:
                rest = self._nothing()
                break
            holds, seconds = self._step_ahead(draft)
            if not holds:
                rest = self._nothing() if self._given_up else None
                break
            allowed.append((draft, seconds))
            mask, seconds = self._timed_mask()
            found.append(mask)
            took.append(seconds)
        self.forget(len(self._guessed))
        self._ahead = _Ahead(tuple(took), tuple(allowed))
        return found + [rest] * (len(drafts) + 1 - len(found))

    def guess(self, token: int) -> bool:
        possible = token >= 0 and token not in self._never and not self.ended and self.guesses
        return possible and self._step_ahead(token)[0]

    def mask(self) -> np.ndarray | None:
        return self._timed_mask()[0]

    def forget(self, guesses: int) -> None:
        guesses = min(guesses, len(self._guessed))  # fewer where the matcher was lost
        if guesses and self._matcher is not None:
            self._matcher.rollback(guesses)
            del self._guessed[-guesses:]
        if not self._guessed:
            self._kept = None

    def _follow(self, tokens: Items[int], ahead: _Ahead) -> int:
        for place, token in enumerate(tokens):
            if self.ended or self._matcher is None:
                return place
            allowed, seconds = self._accept(token, self._emitted)
            if not allowed:
                self._error = self._error or "the answer does not follow its grammar"
                return place + 1
            if place < len(ahead.drafts) and ahead.drafts[place][0] == token:
                seconds = ahead.drafts[place][1]
            seconds += ahead.masks[place] if place < len(ahead.masks) else 0.0
            self._each += (seconds - self._each) / SLOW_TOKENS
            if self._each > SLOWEST_SECONDS and not self.ended:
                self._error = TOO_SLOW
                return place + 1
        return len(tokens)

    def _timed_mask(self) -> tuple[np.ndarray | None, float]:
        """The mask, and what it took."""
        matcher = self._matcher
        if matcher is None:
            return self._nothing(), 0.0
        if matcher.is_terminated():
            return None, 0.0
        if self._guessed and self._unkept:
            self._give_up_guessing()
            return self._nothing(), 0.0
        words = torch.empty((1, self._words), dtype=torch.int32)
        bound, seconds = self._ask(matcher.fill_next_token_bitmask, words, None, bool(self._guessed))
        if bound is None:
            return self._nothing(), seconds
        mask: np.ndarray = words.numpy().view(np.uint8)[0]
        if self._end_ids and not matcher.is_completed():
            # From 0.2.9 on xgrammar takes an end that, as text, would complete the answer: but it is no part of that.
            mask &= self._no_ends
            bound = True
        return mask if bound else None, seconds

    def _nothing(self) -> np.ndarray:
        return np.zeros(4 * self._words, np.uint8)

    def _step_ahead(self, token: int) -> tuple[bool, float]:
        """Moves on behind a token that is not emitted, if the grammar allows it; and what that took."""
        if self._unkept and self._guessed:  # it has taken long just now
            self._give_up_guessing()
            return False, 0.0
        if self._unkept and self._matcher is not None:
            self._kept, seconds = _timed(lambda matcher: matcher.fork(), self._matcher)
            self._count(seconds, ahead=True)
        return self._accept(token, self._guessed)

    @property
    def _unkept(self) -> bool:
        """Whether what is asked ahead might be lost with the only matcher."""
        return self._apart and self._timed_calls is not None and self._kept is None

    def _accept(self, token: int, into: list[int]) -> tuple[bool, float]:
        if self._matcher is None:
            return False, 0.0
        allowed, seconds = self._ask(self._matcher.accept_token, token, token, into is self._guessed)
        if allowed:
            into.append(token)
        return bool(allowed), seconds

    def _ask(
        self, question: Callable[[Any], bool], about: Any, token: int | None, ahead: bool
    ) -> tuple[bool | None, float]:
        """What the matcher answers, None where it is late, and what that took. token: which the question is about, None
        for the mask. ahead: it is not asked of what was emitted."""
        try:
            if self._late is not None and self._late == self._question(token):
                raise Late
            if self._timed_calls is not None and self._apart:
                answer, seconds = self._timed_calls.call(lambda: _timed(question, about), self._compiled, ahead)
            else:
                answer, seconds = _timed(question, about)
        except Late as late:
            self._lose(self._question(token), ahead, late)
            return None, 0.0
        if seconds > QUICK_SECONDS:
            self._apart = True
        self._count(seconds, ahead)
        return answer, seconds

    def _count(self, seconds: float, ahead: bool) -> None:
        self._spent += seconds
        if ahead:
            self._guessing += seconds
            self._guesses_too_slowly |= self._guessing > GUESSING_SECONDS

    def _question(self, token: int | None) -> _Question:
        return (*self._emitted, *self._guessed), token

    def _lose(self, question: _Question, ahead: bool, late: Late) -> None:
        """Gives up the matcher: the thread that is late may still be at work on it."""
        self._matcher = self._kept if ahead else None
        if late.computing:
            self._late = question
        if ahead:
            self._kept = None
            self._guessed.clear()
            self._give_up_guessing()
            self._spent += late.waited
        else:
            self._error = _why(late)

    def _give_up_guessing(self) -> None:
        """What this step still looks at is asked for again without drafts, and there are no guesses any more."""
        self._guesses_too_slowly = self._given_up = True

    def _begun(self) -> "GrammarMatcher | None":
        import xgrammar

        def begun() -> "GrammarMatcher":
            return xgrammar.GrammarMatcher(
                self._compiled,
                override_stop_tokens=self._end_ids or None,
                terminate_without_stop_token=not self._end_ids,
            )

        if self._timed_calls is None or not self._apart:
            return begun()
        try:
            return self._timed_calls.call(begun, self._compiled)
        except Late as late:
            self._error = _why(late)
            return None


def _timed(question: Callable[[Any], T], about: Any) -> tuple[T, float]:
    began = time.thread_time()
    answer = question(about)
    return answer, time.thread_time() - began


def _why(late: Late) -> str:
    return CROWDED if isinstance(late, Crowded) else TOO_SLOW


def constrained(rule: TokenRule, mask: np.ndarray | None) -> TokenRule:
    """The rule under a constraint. Where that allows nothing but ending the answer, min_tokens cannot put the end
    off."""
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
        if constraint is not None and constraint.guesses
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
