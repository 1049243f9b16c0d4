"""Words that an answer must not have, as vLLM has them: of each, as tokens, the last is refused where the answer ends
with those before it."""

from collections import defaultdict
from collections.abc import Sequence

from tidar_core.request import RequestError, SamplingParams


class BadWords:
    """Those of one sequence. always: the tokens that are words by themselves, ascending."""

    def __init__(self, words: Sequence[tuple[int, ...]], prompt_length: int):
        self.always = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._prompt_length = prompt_length
        self._ends: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for *front, end in words:
            if front:
                self._ends[tuple(front)].add(end)
        self._lengths = sorted({len(front) for front in self._ends})

    def refused(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that may not come behind these, all of prompt and answer, and drafts `ahead` of them."""
        longest = max(self._lengths, default=0)
        answer = (*tokens[max(self._prompt_length, len(tokens) - longest) :], *ahead)
        ends = (self._ends.get(answer[-length:], ()) for length in self._lengths)
        return (*self.always, *(end for found in ends for end in sorted(found)))


def check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError where a word has a token that is none of the model's."""
    if not all(0 <= token < vocab_size for word in params.bad_words for token in word):
        raise RequestError(f"bad_words: ids must lie between 0 and {vocab_size - 1}", "bad_words")
