"""Thoughts that are no longer than a request allows: where they would go on, their end is all that may come."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from tidar_core.engine.constraint import ANY_NUMBER, GrammarState
from tidar_core.request import RequestError, ThoughtLimit
from tidar_core.text import special_ids, token_text


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer stands. within: its thoughts have begun; over: they have ended, or it began with none. tail: text
    that may be the front of a tag. thought: tokens so far. last: the last of them, fewer than the end has."""

    within: bool
    over: bool = False
    tail: str = ""
    thought: int = 0
    last: tuple[int, ...] = ()


class ThoughtWatch:
    """Follows an answer through its thoughts; a `Constraint`, alone or around the `grammar` that the answer has to
    follow besides. Where that does not allow the end, there is none to wait for.

    The tags are looked for in the text, whatever tokens it comes in; with_special: special tokens are a part of it.
    Raises RequestError where the model has no tokens for the end of thoughts.
    """

    def __init__(self, limit: ThoughtLimit, tokenizer: PreTrainedTokenizerFast, vocab_size: int, with_special: bool):
        self.grammar: GrammarState | None = None
        self._limit = limit
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._hidden = frozenset() if with_special else special_ids(tokenizer.backend_tokenizer)
        self._end = tuple(tokenizer.encode(limit.end, add_special_tokens=False, padding=False, truncation=False))
        if not self._end or max(self._end) >= vocab_size:
            raise RequestError("this model has no tokens for the end of its thoughts", "thinking_token_budget")
        self._places = [Place(within=limit.begun)]  # behind what was emitted, and behind each guess

    @property
    def error(self) -> str | None:
        return None if self.grammar is None else self.grammar.error

    @property
    def ended(self) -> bool:
        return self.grammar is not None and self.grammar.ended

    @property
    def free(self) -> int:
        place = self._places[-1]
        if self.grammar is not None:
            return self.grammar.free
        return ANY_NUMBER if place.over else max(0, self._limit.tokens - place.thought)

    @property
    def seconds(self) -> float:
        return 0.0 if self.grammar is None else self.grammar.seconds

    @property
    def guesses(self) -> bool:
        return self.grammar is None or self.grammar.guesses

    def advance(self, tokens: Items[int]) -> int:
        until = len(tokens) if self.grammar is None else self.grammar.advance(tokens)
        for token in tokens[:until]:
            self._places = [self._behind(self._places[-1], token)]
        return until

    def masks(self, drafts: Items[int]) -> list[np.ndarray | None]:
        places = [self._places[-1]]
        for draft in drafts:
            places.append(self._behind(places[-1], draft) if draft >= 0 else places[-1])
        asked = [None] * len(places) if self.grammar is None else self.grammar.masks(drafts)
        return [self._with_end(place, mask) for place, mask in zip(places, asked, strict=True)]

    def guess(self, token: int) -> bool:
        place = self._places[-1]
        wanted = self._wanted(place)
        if not 0 <= token < self._vocab_size or (wanted not in (None, token) and self._may_come(wanted)):
            return False
        if self.grammar is not None and not self.grammar.guess(token):
            return False
        self._places.append(self._behind(place, token))
        return True

    def mask(self) -> np.ndarray | None:
        return self._with_end(self._places[-1], None if self.grammar is None else self.grammar.mask())

    def forget(self, guesses: int) -> None:
        del self._places[len(self._places) - guesses :]
        if self.grammar is not None:
            self.grammar.forget(guesses)

    def _wanted(self, place: Place) -> int | None:
        """The one token that may come, where thoughts are long enough; of an end that has begun the rest."""
        if not place.within or place.over or place.thought < self._limit.tokens:
            return None
        begun = (count for count in range(len(self._end) - 1, 0, -1) if place.last[-count:] == self._end[:count])
        return self._end[next(begun, 0)]

    def _may_come(self, token: int | None) -> bool:
        return self.grammar is None or _allows(self.grammar.mask(), token)

    def _with_end(self, place: Place, mask: np.ndarray | None) -> np.ndarray | None:
        wanted = self._wanted(place)
        if wanted is None or not _allows(mask, wanted):
            return mask
        alone = np.zeros(4 * -(-self._vocab_size // 32), np.uint8)
        alone[wanted // 8] = 1 << wanted % 8
        return alone

    def _behind(self, place: Place, token: int) -> Place:
        if place.over:
            return place
        text = place.tail if token in self._hidden else place.tail + token_text(self._tokenizer, token)
        if not place.within:
            front, begin = text.lstrip(), self._limit.begin
            if not front.startswith(begin):
                return Place(within=False, over=not begin.startswith(front), tail=front)
            text = front.removeprefix(begin)
            return Place(within=True, over=self._limit.end in text, tail=self._may_begin(text))
        last = (*place.last, token)
        over = (
            self._limit.end in text
            or last[-len(self._end) :] == self._end
            or self._wanted(place) not in (None, token)  # a grammar allowed no end
        )
        return Place(
            True, over, self._may_begin(text), place.thought + 1, last[max(0, len(last) - len(self._end) + 1) :]
        )

    def _may_begin(self, text: str) -> str:
        """As much of the text's end as the end of thoughts could begin in."""
        return text[max(0, len(text) - len(self._limit.end) + 1) :]


def _allows(mask: np.ndarray | None, token: int | None) -> bool:
    return mask is None or token is None or bool(mask[token // 8] >> token % 8 & 1)
