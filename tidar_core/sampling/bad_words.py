"""Words that an answer must not have, as vLLM has them: of each, as tokens, the last is refused where the answer ends
with those before it."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from tidar_core.request import RequestError, SamplingParams


class BadWords:
    """Those of one sequence. always: the tokens that are words by themselves, ascending."""

    def __init__(self, words: Sequence[tuple[int, ...]], prompt_length: int):
        self.always = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._prompt_length = prompt_length
        # A tree of what stands before the last tokens, read backwards: places by number, the root is 0.
        self._before: dict[tuple[int, int], int] = {}
        ends: defaultdict[int, set[int]] = defaultdict(set)
        for *front, end in words:
            place = 0
            for token in reversed(front):
                place = self._before.setdefault((place, token), len(self._before) + 1)
            if front:
                ends[place].add(end)
        self._ends = {place: tuple(sorted(found)) for place, found in ends.items()}

    def refused(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that may not come behind these, all of prompt and answer, and drafts `ahead` of them."""
        found = [*self.always]
        place = 0
        answer = (tokens[at] for at in range(len(tokens) - 1, self._prompt_length - 1, -1))
        for token in chain(reversed(ahead), answer):
            place = self._before.get((place, token), -1)
            if place < 0:
                break
            found += self._ends.get(place, ())
        return tuple(found)


def check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError where a word has a token that is none of the model's."""
    if not all(0 <= token < vocab_size for word in params.bad_words for token in word):
        raise RequestError(f"bad_words: ids must lie between 0 and {vocab_size - 1}", "bad_words")
