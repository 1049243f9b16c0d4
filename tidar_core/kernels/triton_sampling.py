"""The token rule in Triton, for rows that keep every token: argmax, or argmax of z + Gumbel noise from Philox.

The rule is that of `tidar_core.sampling`, the integers those of `tidar_core.philox`: four neighbouring tokens share
one evaluation. A row is cut into pieces of fixed size, one program each; the best value and the lowest id among
equals do not depend on the order in which pieces are looked at. Rows with top-k, top-p, min-p, penalties, bias or
banned ids go through `tidar_core.sampling` on the same device.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core import sampling
from tidar_core.sampling import NO_TOKEN, TokenRule
from tidar_core.transfer import on_device

QUADS = 1024  # of tokens that one program looks at
COLDEST = 1e-30  # as in `tidar_core.sampling`: lower temperatures would overflow x / T
WORD = 0xFFFFFFFF
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _philox(x0, x1, x2, x3, k0, k1):
    """Philox4x32-10 on uint32 counters under the key (k0, k1)."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(x0, 0xD2511F53), x0 * 0xD2511F53
        high2, low2 = tl.umulhi(x2, 0xCD9E8D57), x2 * 0xCD9E8D57
        x0, x1, x2, x3 = high2 ^ x1 ^ k0, low2, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def _gumbel(word):
    """Standard Gumbel noise in fp32 from uint32 words: -log(-log1p(-u)), u = min((h + 1/2) / 2**32, 1 - 2**-24).

    -log1p(-u) is -log(w) u / (1 - w) with w = 1 - u rounded: as exact as log for every u, the tiniest included.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    w = 1.0 - u
    rest = 1.0 - w
    return -tl.log(tl.where(rest > 0.0, -tl.log(w) * (u / tl.where(rest > 0.0, rest, 1.0)), u))


@triton.jit
def _better(value, token, other_value, other_token):
    """The greater value, and of equals the lower id."""
    wins = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(wins, other_value, value), tl.where(wins, other_token, token)


@triton.jit
def _score(logits, noise, token, vocab, heat, samples):
    """z + G of tokens, x where nothing is sampled, -inf beyond the vocabulary; and whether z is a NaN or +inf."""
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    z = tl.where(samples, tl.div_rn(x, heat), x)
    return tl.where(samples, z + noise, z), ((z != z) | (z == float("inf"))).to(tl.int32)


@triton.jit(do_not_specialize=["vocab", "row_stride", "pieces"], do_not_specialize_on_alignment=["words"])
def _pick_pieces(
    logits, temperature, words, best_values, best_tokens, vocab, row_stride, pieces, BLOCK: tl.constexpr
):  # fmt: skip
    """The best token among 4 * BLOCK of one row; the value is +inf where there is a NaN or +inf among them.

    logits [rows, vocab]; temperature fp32 [rows], 0 for argmax; words int32 [4, rows]: seed low and high, position,
    choice. best_values fp32 and best_tokens int32: [rows, pieces].
    """
    row, piece = tl.program_id(0), tl.program_id(1)
    rows = tl.num_programs(0)
    quad = piece * BLOCK + tl.arange(0, BLOCK)
    warmth = tl.load(temperature + row)
    samples = warmth > 0.0
    heat = tl.full([BLOCK], 0, tl.float32) + tl.where(samples, warmth, 1.0)
    n0 = tl.full([BLOCK], 0, tl.float32)
    n1, n2, n3 = n0, n0, n0
    if samples:
        none = tl.full([BLOCK], 0, tl.uint32)
        low = none + tl.load(words + row).to(tl.uint32, bitcast=True)
        high = none + tl.load(words + rows + row).to(tl.uint32, bitcast=True)
        position = none + tl.load(words + 2 * rows + row).to(tl.uint32, bitcast=True)
        choice = none + tl.load(words + 3 * rows + row).to(tl.uint32, bitcast=True)
        x0, x1, x2, x3 = _philox(quad.to(tl.uint32), position, choice, none, low, high)
        n0, n1, n2, n3 = _gumbel(x0), _gumbel(x1), _gumbel(x2), _gumbel(x3)
    at = logits + row.to(tl.int64) * row_stride
    token = quad * 4
    value, bad = _score(at, n0, token, vocab, heat, samples)
    other, other_bad = _score(at, n1, quad * 4 + 1, vocab, heat, samples)
    value, token = _better(value, token, other, quad * 4 + 1)
    bad |= other_bad
    other, other_bad = _score(at, n2, quad * 4 + 2, vocab, heat, samples)
    value, token = _better(value, token, other, quad * 4 + 2)
    bad |= other_bad
    other, other_bad = _score(at, n3, quad * 4 + 3, vocab, heat, samples)
    value, token = _better(value, token, other, quad * 4 + 3)
    bad |= other_bad
    best = tl.max(value, 0)
    lowest = tl.min(tl.where(value == best, token, NO_ID), 0)
    tl.store(best_values + row * pieces + piece, tl.where(tl.max(bad, 0) > 0, float("inf"), best))
    tl.store(best_tokens + row * pieces + piece, lowest)


@triton.jit(do_not_specialize=["pieces"])
def _pick_rows(best_values, best_tokens, picks, pieces, BLOCK: tl.constexpr):
    """picks int64 [rows]: the best of a row's pieces, -1 where it is not finite."""
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    value = tl.load(best_values + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    token = tl.load(best_tokens + row * pieces + piece, mask=piece < pieces, other=NO_ID)
    best = tl.max(value, 0)
    lowest = tl.min(tl.where(value == best, token, NO_ID), 0)
    fine = (best > float("-inf")) & (best < float("inf"))
    tl.store(picks + row, tl.where(fine, lowest, -1).to(tl.int64))


def pick_whole(logits: Tensor, temperature: Tensor, words: Tensor) -> Tensor:
    """The pick of rows that keep the whole vocabulary: two launches, shapes known beforehand.

    logits: [rows, vocab], each row contiguous. temperature: fp32 [rows], 0 for argmax. words: int32 [4, rows], the
    bits of seed low and high, position and choice (see `tidar_core.philox`). Returns int64 [rows], `NO_TOKEN` for a
    row with NaN or +inf in it or nothing finite.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, 4 * QUADS)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    picks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _pick_pieces[(rows, pieces)](
            logits, temperature, words, values, tokens, vocab, logits.stride(0), pieces,
            BLOCK=QUADS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        block = max(64, triton.next_power_of_2(pieces))
        _pick_rows[(rows,)](values, tokens, picks, pieces, BLOCK=block, num_warps=1, enable_fp_fusion=True)
    return picks


def rule_tensors(
    rules: Sequence[TokenRule], device: torch.device, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Temperatures and noise words of `pick_whole` for some rules; shift as in `tidar_core.sampling.pick_tokens`."""
    params = [rule.params for rule in rules]
    heats = [0.0 if one.temperature == 0 else max(one.temperature, COLDEST) for one in params]
    words = [
        [one.seed & WORD for one in params],
        [one.seed >> 32 & WORD for one in params],
        [rule.position & WORD for rule in rules],
        [one.choice & WORD for one in params],
    ]
    bits = on_device(words, device, torch.int64).to(torch.int32)
    if shift is not None:
        bits[2] += shift
    return on_device(heats, device, torch.float32), bits


def pick_tokens(logits: Tensor, rules: Sequence[TokenRule], shift: Tensor | None = None) -> Tensor:
    """`tidar_core.sampling.pick_tokens`, with rows that keep every token picked here."""
    whole = [row for row, rule in enumerate(rules) if rule.keeps_all(logits.shape[-1])]
    if not whole:
        return sampling.pick_tokens(logits, rules, shift)
    if len(whole) == len(rules):
        return pick_whole(logits.contiguous(), *rule_tensors(rules, logits.device, shift))
    cut = [row for row in range(len(rules)) if row not in set(whole)]
    picks = torch.full((len(rules),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    for chosen, pick in ((whole, pick_tokens), (cut, sampling.pick_tokens)):
        index = on_device(chosen, logits.device)
        own = None if shift is None else shift[index]
        picks[index] = pick(logits[index], [rules[row] for row in chosen], own)
    return picks
