"""The noise is the one that the design defines, word for word, and behaves like noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidar_core.sampling.philox import NoiseKey, gumbel, gumbel_all, gumbel_at, philox4x32

CPU = torch.device("cpu")
WORDS = st.integers(0, 2**32 - 1)

# Random123, kat_vectors: counter, key, result of philox4x32-10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper has it, in Python's integers."""
    mask = 2**32 - 1
    for turn in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        k0, k1 = key[0] + turn * 0x9E3779B9 & mask, key[1] + turn * 0xBB67AE85 & mask
        counter = [high >> 32 ^ counter[1] ^ k0, high & mask, low >> 32 ^ counter[3] ^ k1, low & mask]
    return counter


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
@pytest.mark.parametrize("width", [1, 3, 64])
def test_known_answers(counter: str, key: str, answer: str, width: int) -> None:
    x0, x1, x2, x3 = (torch.full((width,), word) for word in words(counter))
    k0, k1 = (torch.full((width,), word) for word in words(key))
    found = philox4x32((x0, x1, x2, x3), (k0, k1))
    assert [word.tolist() for word in found] == [[word] * width for word in words(answer)]
    assert philox_in_integers(words(counter), words(key)) == words(answer)


@given(seed=st.integers(-(2**70), 2**70), position=WORDS, choice=WORDS, token=st.integers(0, 2**20))
def test_noise_of_a_token_is_as_defined(seed: int, position: int, choice: int, token: int) -> None:
    key = [seed % 2**64 % 2**32, seed % 2**64 // 2**32]
    word = philox_in_integers([token // 4, position, choice, 0], key)[token % 4]
    noise = gumbel_at(NoiseKey.build([seed], [position], [choice], CPU), torch.tensor([[token]]))
    assert noise.item() == gumbel(torch.tensor([word])).item()
    uniform = min((np.float32(word) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    assert noise.item() == pytest.approx(-math.log(-math.log1p(-float(uniform))), rel=1e-6, abs=1e-6)


def test_gumbel_at_its_ends() -> None:
    ends = gumbel(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert ends.dtype == torch.float32
    assert ends.tolist() == pytest.approx([22.8739, 21.7752, 0.366513, -2.81149], abs=1e-4)
    assert len(gumbel(torch.arange(1000)).unique()) == 1000


@pytest.mark.parametrize("vocab", [1, 6, 17, 1024, 49152])
def test_one_token_or_all_the_same_bits(vocab: int) -> None:
    seeds, positions, choices = [5, -1, 2**63], [0, 4096, 7], [0, 1, 2]
    key = NoiseKey.build(seeds, positions, choices, CPU)
    everything = gumbel_all(key, vocab)
    assert everything.shape == (3, vocab)
    tokens = torch.randint(vocab, (3, 50), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_at(key, tokens), everything.gather(1, tokens))
    for row in range(3):
        alone = NoiseKey.build(seeds[row : row + 1], positions[row : row + 1], choices[row : row + 1], CPU)
        assert torch.equal(gumbel_all(alone, vocab)[0], everything[row])
        assert torch.equal(gumbel_at(alone, tokens[row : row + 1, 3:4])[0, 0], everything[row, tokens[row, 3]])


def test_noise_is_gumbel_and_independent() -> None:
    """Mean, variance and pairwise correlation over 131,072 values, each within five standard errors."""
    count = 2**17
    kinds = {
        "reference": (1, 1, 0),
        "seed": (2, 1, 0),
        "high word of the seed": (1 + 2**32, 1, 0),
        "position": (1, 2, 0),
        "choice": (1, 1, 1),
    }
    noise = torch.cat([gumbel_all(NoiseKey.build([s], [p], [c], CPU), count) for s, p, c in kinds.values()]).double()
    standard_error = count**-0.5
    deviation = math.pi / 6**0.5
    assert (noise.mean(1) - 0.5772156649).abs().max() < 5 * deviation * standard_error
    assert (noise.std(1) / deviation - 1).abs().max() < 5 * 1.1 * standard_error
    others = torch.corrcoef(noise) - torch.eye(len(kinds))
    assert others.abs().max() < 5 * standard_error
    assert not (noise[1:] == noise[:1]).all(1).any()
    neighbours = torch.corrcoef(torch.stack([noise[0, step : count - 8 + step] for step in range(8)])) - torch.eye(8)
    assert neighbours.abs().max() < 5 * standard_error
