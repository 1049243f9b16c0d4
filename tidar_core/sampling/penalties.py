"""What changes the scores before the token rule looks at them: the tokens that are allowed, logit bias, and penalties
for tokens that came before.

Each row is changed by itself, element by element, so that its bits stay its own. The meaning is vLLM's (and
transformers', for the repetition penalty): presence and frequency count the tokens of the answer alone, the
repetition penalty those of prompt and answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tidar_core.request import RequestError, SamplingParams
from tidar_core.transfer import sent


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The different tokens before the one to pick, those of drafts ahead of it included.

    tokens: int64 [n], no two the same. times: fp32 [n], how often each stands in the answer.
    """

    tokens: Tensor
    times: Tensor


NO_HISTORY = History(torch.empty(0, dtype=torch.int64), torch.empty(0))


class Ledger:
    """Counts the tokens of one sequence as it grows. Each is counted once, however often the history is asked for."""

    def __init__(self, prompt_length: int):
        self._prompt_length = prompt_length
        self._counted = 0
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, dtype=np.int64)
        self._times = np.empty(0, dtype=np.float32)

    def follow(self, tokens: Sequence[int]) -> None:
        """Counts what prompt and answer have grown by. tokens: all of both, the ones known before unchanged."""
        new = tokens[self._counted :]
        answer = max(0, self._prompt_length - self._counted)
        fresh = [token for token in dict.fromkeys(new) if token not in self._places]
        self._places.update(zip(fresh, range(len(self._tokens), len(self._tokens) + len(fresh)), strict=True))
        self._tokens = np.concatenate((self._tokens, np.array(fresh, dtype=np.int64)))
        self._times = np.concatenate((self._times, np.zeros(len(fresh), dtype=np.float32)))
        np.add.at(self._times, [self._places[token] for token in new[answer:]], 1.0)
        self._counted = len(tokens)

    def history(self, ahead: Sequence[int] = ()) -> History:
        """The history, with the drafts `ahead` of what was counted as if they had been emitted."""
        fresh = [token for token in dict.fromkeys(ahead) if token not in self._places]
        tokens = np.concatenate((self._tokens, np.array(fresh, dtype=np.int64)))
        times = np.concatenate((self._times, np.zeros(len(fresh), dtype=np.float32)))
        for token in ahead:
            times[self._places[token] if token in self._places else len(self._tokens) + fresh.index(token)] += 1.0
        return History(torch.from_numpy(tokens), torch.from_numpy(times))


def check_allowed(params: SamplingParams, vocab_size: int, eos_ids: tuple[int, ...], mask_token: int | None) -> None:
    """Raises RequestError where an allowed token is not in the vocabulary, or where no allowed token can begin the
    answer."""
    allowed, name = params.allowed_token_ids, "allowed_token_ids"
    if not all(0 <= token < vocab_size for token in allowed):
        raise RequestError(f"{name}: ids must lie between 0 and {vocab_size - 1}", name)
    never = {mask_token}
    if params.min_tokens:
        never |= params.stop_token_ids | (frozenset() if params.ignore_eos else frozenset(eos_ids))
    if allowed and never.issuperset(allowed):
        what = "add one that does not end it, or leave min_tokens out"
        raise RequestError(f"{name} has no token that an answer could begin with: {what}", name)


@lru_cache(maxsize=64)
def refused(allowed: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Which tokens are not allowed: bool [vocab]. Shared: do not change it."""
    mask = torch.ones(vocab, dtype=torch.bool)
    mask[list(allowed)] = False
    return sent(mask, device)


@torch.inference_mode()
def keep_allowed(scores: Tensor, params: Sequence[SamplingParams], counts: Sequence[int]) -> None:
    """Excludes in place the tokens that a request does not allow, so that they are not drafted. scores: [rows, vocab];
    counts[i]: how many rows, in order, belong to params[i]."""
    start = 0
    for one, count in zip(params, counts, strict=True):
        if one.allowed_token_ids:
            scores[start : start + count].masked_fill_(
                refused(one.allowed_token_ids, scores.shape[1], scores.device), -torch.inf
            )
        start += count


def penalised(scores: Tensor, params: SamplingParams, history: History) -> Tensor:
    """One row of scores (fp32 [vocab]) with bias and penalties, changed in place and given back.

    For a token with score x that occurs c times in the answer: -inf where it is not allowed; x + bias; then, if it
    occurs in prompt or answer, x / repetition where x > 0, else x * repetition; then x - frequency * c - presence *
    (c > 0).
    """
    if params.allowed_token_ids:
        scores.masked_fill_(refused(params.allowed_token_ids, len(scores), scores.device), -torch.inf)
    if params.logit_bias:
        tokens, bias = zip(*params.logit_bias, strict=True)
        index = torch.tensor(tokens, dtype=torch.int64, device=scores.device)
        scores[index] += torch.tensor(bias, dtype=torch.float32, device=scores.device)
    if not params.penalises or not len(history.tokens):
        return scores
    seen, times = history.tokens.to(scores.device), history.times.to(scores.device)
    before = scores[seen]
    if params.repetition_penalty != 1.0:
        # By a tensor: for a number a GPU multiplies by its reciprocal, and `penalties_ahead` would have other bits.
        factor = torch.full_like(before, params.repetition_penalty)
        before = torch.where(before > 0, before / factor, before * factor)
    scores[seen] = before - (params.frequency_penalty * times + params.presence_penalty * (times > 0))
    return scores
