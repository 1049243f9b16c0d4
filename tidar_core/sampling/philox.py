"""Random numbers that are looked up, not drawn: noise as a pure function of seed, choice, position and token.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a counter of
four 32-bit words under a key of two to four random words. Here the key is the seed modulo 2**64, low word first, and
the counter of token v is (v >> 2, position, choice, 0); the token's own word is number v mod 4. So the noise of one
token costs the same wherever it is asked for, four neighbours share one evaluation, and nobody keeps a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
WORD = 0xFFFFFFFF  # 32 bits


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What keys the noise of each row: int64 [rows, 1] each, with values in [0, 2**32)."""

    seed_low: Tensor
    seed_high: Tensor
    position: Tensor
    choice: Tensor

    @classmethod
    def build(
        cls, seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int], device: torch.device
    ) -> "NoiseKey":
        """One row for each entry; integers of any size and sign, taken modulo 2**64 (seeds) and 2**32."""
        words = [
            [seed & WORD for seed in seeds],
            [seed >> 32 & WORD for seed in seeds],
            [position & WORD for position in positions],
            [choice & WORD for choice in choices],
        ]
        return cls(*torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(-1))

    def rows(self, index: Tensor | slice) -> "NoiseKey":
        """The same for some of the rows."""
        return NoiseKey(self.seed_low[index], self.seed_high[index], self.position[index], self.choice[index])


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors that hold words in [0, 2**32); shapes broadcast. Returns such words."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap modulo 2**64, which keeps both halves right; a word is cut to 32 bits where it is
        # multiplied next, and the others stay wide until then.
        even, odd = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x2 = ((odd >> 32) ^ x1 ^ k0) & WORD, ((even >> 32) ^ x3 ^ k1) & WORD
        x1, x3 = odd, even
        k0, k1 = (k0 + _KEY_STEPS[0]) & WORD, (k1 + _KEY_STEPS[1]) & WORD
    return x0, x1 & WORD, x2, x3 & WORD


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise in fp32 from words in [0, 2**32), of the same shape.

    u = min((h + 1/2) / 2**32, 1 - 2**-24) and G = -log(-log1p(-u)): fp32 is finest near u = 0, so large values,
    which decide, are told apart as finely as the 32 bits allow.
    """
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def gumbel_at(key: NoiseKey, tokens: Tensor) -> Tensor:
    """The noise of some tokens: int64 [rows, n] -> fp32 [rows, n]."""
    zero = torch.zeros_like(key.choice)
    words = philox4x32((tokens >> 2, key.position, key.choice, zero), (key.seed_low, key.seed_high))
    return gumbel(torch.stack(words, -1).gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1))


def gumbel_all(key: NoiseKey, vocab: int) -> Tensor:
    """The noise of every token of the vocabulary: fp32 [rows, vocab]."""
    quads = torch.arange((vocab + 3) // 4, device=key.choice.device).unsqueeze(0)
    zero = torch.zeros_like(key.choice)
    words = philox4x32((quads, key.position, key.choice, zero), (key.seed_low, key.seed_high))
    return torch.stack([gumbel(word) for word in words], -1).flatten(-2)[:, :vocab]
