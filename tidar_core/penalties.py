"""What changes the scores before the token rule looks at them: logit bias, and penalties for what was said before.

Each row is changed by itself, element by element, so that its bits stay its own. The meaning is vLLM's (and
transformers', for the repetition penalty): presence and frequency count the tokens of the answer alone, the
repetition penalty those of prompt and answer.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """What came before the token to pick: the prompt, and the answer so far, drafts ahead of it included."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


NOTHING_SAID = History((), ())


def penalised(scores: Tensor, params: SamplingParams, history: History) -> Tensor:
    """One row of scores (fp32 [vocab]) with bias and penalties, changed in place and given back.

    A token's score x, said c times in the answer: x + bias; then, if the token occurs in prompt or answer,
    x / repetition where x > 0, else x * repetition; then x - frequency * c - presence * (c > 0).
    """
    if params.logit_bias:
        tokens, bias = zip(*params.logit_bias, strict=True)
        scores[_ids(tokens, scores)] += torch.tensor(bias, dtype=torch.float32, device=scores.device)
    if params.repetition_penalty != 1.0 and (history.prompt or history.answer):
        seen = _ids(sorted({*history.prompt, *history.answer}), scores)
        before = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(before > 0, before / factor, before * factor)
    if history.answer and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(history.answer)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=scores.device)
        scores[_ids(counts, scores)] -= params.frequency_penalty * times + params.presence_penalty
    return scores


def _ids(tokens: object, scores: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=scores.device)  # type: ignore[call-overload]
