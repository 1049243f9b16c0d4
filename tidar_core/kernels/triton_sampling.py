"""The token rule in Triton: argmax, or argmax of z + Gumbel noise from Philox over what top-k, top-p and min-p keep.

The rule is that of `tidar_core.sampling`, the integers those of its `philox.py`: four neighbouring tokens share one
evaluation. Where every token is kept, a row is cut into pieces of fixed size, one program each; the best value and
the lowest id among equals do not depend on the order in which pieces are looked at. Where some are not, one program
looks through its row, again and again but without a sort: what is kept is always the head of the row by descending
score, so the best of all with its noise is the answer if it is kept, and if not, nor is anything behind it, and the
best of those before it is next. How often that is, the host need not know. Penalties, bias, grammars and banned ids
change the scores first, by `tidar_core.sampling` on the same device.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.kernels.rules import RuleNumbers, rule_numbers
from tidar_core.sampling.picking import adjusted
from tidar_core.sampling.token_rule import Rules, TokenRule, kept_by_rank, of_all
from tidar_core.transfer import on_device

QUADS = 1024  # of tokens that one program looks at together
WIDE = 8192  # tokens that it looks at together where there is no noise
NO_ID = tl.constexpr(2**31 - 1)
MASS = tl.constexpr(17592186044416.0)  # of a row's best token: 2**44
SLACK = tl.constexpr(1e-3)  # by which a bound is missed rather than a token


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
def _noise(words, rows, quad):
    """Of the four tokens of each quad, by the words [4, rows] that `words` points into: seed low and high, position and
    choice of a row."""
    none = quad.to(tl.uint32) * 0
    low = none + tl.load(words).to(tl.uint32, bitcast=True)
    high = none + tl.load(words + rows).to(tl.uint32, bitcast=True)
    position = none + tl.load(words + 2 * rows).to(tl.uint32, bitcast=True)
    choice = none + tl.load(words + 3 * rows).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3 = _philox(quad.to(tl.uint32), position, choice, none, low, high)
    return _gumbel(x0), _gumbel(x1), _gumbel(x2), _gumbel(x3)


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
        n0, n1, n2, n3 = _noise(words + row, rows, quad)
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


@triton.jit
def _scaled(logits, token, vocab, heat):
    """z = x / T of tokens, -inf beyond the vocabulary."""
    return tl.div_rn(tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32), heat)


@triton.jit
def _mass_before(logits, vocab, heat, best, least, place, BLOCK: tl.constexpr):
    """int64: the mass of the tokens with z above `least`, and of those with just that and ids below `place`."""
    masses = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        z = _scaled(logits, token, vocab, heat)
        before = (z > least) | ((z == least) & (token < place))
        masses += tl.where(before, (tl.exp(z - best) * MASS).to(tl.int64), 0)
    return tl.sum(masses, 0)


@triton.jit
def _further(logits, noise, token, vocab, heat, floor, end_z, end, value, winner, winner_z):
    """The greatest z + G so far, its token and its z, when `token` is looked at too, where it is kept so far and comes
    before the end."""
    z = _scaled(logits, token, vocab, heat)
    fits = (z >= floor) & ((z > end_z) | ((z == end_z) & (token < end)))
    noisy = tl.where(fits, z + noise, float("-inf"))
    wins = (noisy > value) | ((noisy == value) & (token < winner))
    return tl.where(wins, noisy, value), tl.where(wins, token, winner), tl.where(wins, z, winner_z)


@triton.jit(do_not_specialize=["vocab", "row_stride"], do_not_specialize_on_alignment=["reals", "whole"])
def _pick_kept(
    logits, borders, reals, whole, picks, vocab, row_stride, QUAD: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row: the token that wins among those that are kept. logits [rows, vocab]; borders fp32 [rows], the last logit
    that top-k keeps; reals [3, rows] and whole [5, rows] as in `RuleNumbers`, temperatures above 0; picks int64."""
    BLOCK: tl.constexpr = 4 * QUAD
    row, rows = tl.program_id(0), tl.num_programs(0)
    at = logits + row.to(tl.int64) * row_stride
    warmth, cut, min_p = tl.load(reals + row), tl.load(reals + rows + row), tl.load(reals + 2 * rows + row)
    wide_heat = tl.full([WIDE], 0, tl.float32) + warmth
    heat = tl.full([BLOCK], 0, tl.float32) + warmth
    quad_heat = tl.full([QUAD], 0, tl.float32) + warmth

    highest = tl.full([WIDE], float("-inf"), tl.float32)
    wrong = tl.full([WIDE], 0, tl.int32)
    for start in range(0, vocab, WIDE):
        z = _scaled(at, start + tl.arange(0, WIDE), vocab, wide_heat)
        bad = (z != z) | (z == float("inf"))
        wrong |= bad.to(tl.int32)
        highest = tl.maximum(highest, tl.where(bad, float("-inf"), z))
    best = tl.max(highest, 0)
    border = tl.max(tl.div_rn(tl.full([BLOCK], 0, tl.float32) + tl.load(borders + row), heat), 0)

    total = tl.full([], 0, tl.int64)
    floor = border
    if min_p > 0.0:
        floor = tl.maximum(floor, best + tl.log(min_p) - SLACK)
    if cut >= 0.0:
        total = _mass_before(at, vocab, wide_heat, best, border, vocab, WIDE)
        # All tokens of so little mass have no more than the share that is left out, be they ever so many.
        least = cut * (total.to(tl.float32) / MASS) / vocab
        floor = tl.maximum(floor, best + tl.log(tl.maximum(least, 1e-37)) - SLACK)

    pick = tl.full([], -1, tl.int64)
    end_z = tl.full([], float("-inf"), tl.float32)
    end = tl.full([], 0, tl.int32)
    looking = (tl.max(wrong, 0) == 0) & (best > float("-inf"))
    while looking:
        value = tl.full([QUAD], float("-inf"), tl.float32)
        winner = tl.full([QUAD], NO_ID, tl.int32)
        winner_z = value
        for start in range(0, vocab, BLOCK):
            here = _scaled(at, start + tl.arange(0, BLOCK), vocab, heat)
            if tl.max(here, 0) >= tl.maximum(floor, end_z):
                quad = start // 4 + tl.arange(0, QUAD)
                n0, n1, n2, n3 = _noise(whole + row, rows, quad)
                token = quad * 4
                value, winner, winner_z = _further(
                    at, n0, token, vocab, quad_heat, floor, end_z, end, value, winner, winner_z
                )
                value, winner, winner_z = _further(
                    at, n1, token + 1, vocab, quad_heat, floor, end_z, end, value, winner, winner_z
                )
                value, winner, winner_z = _further(
                    at, n2, token + 2, vocab, quad_heat, floor, end_z, end, value, winner, winner_z
                )
                value, winner, winner_z = _further(
                    at, n3, token + 3, vocab, quad_heat, floor, end_z, end, value, winner, winner_z
                )
        most = tl.max(value, 0)
        end = tl.min(tl.where(value == most, winner, NO_ID), 0)
        end_z = tl.max(tl.where((value == most) & (winner == end), winner_z, float("-inf")), 0)
        keeps = tl.exp(end_z - best) >= min_p
        if cut >= 0.0:
            rest = total - _mass_before(at, vocab, wide_heat, best, end_z, end, WIDE)
            keeps &= (rest.to(tl.float64) / total.to(tl.float64)).to(tl.float32) > cut
        if keeps:
            pick = end.to(tl.int64)
            looking = False
    tl.store(picks + row, pick)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["scores", "candidates", "reals", "whole"])
def _pick_listed(scores, candidates, reals, whole, picks, count, BLOCK: tl.constexpr):
    """One row: the token rule over `count` candidates. scores fp32 and candidates int64 [rows, count]; reals [3, rows]
    and whole [5, rows] as in `RuleNumbers`; picks int64 [rows]."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, BLOCK)
    x = tl.load(scores + row * count + place, mask=place < count, other=float("-inf"))
    token = tl.load(candidates + row * count + place, mask=place < count, other=0x7FFFFFFF).to(tl.int32)
    warmth, cut, min_p = tl.load(reals + row), tl.load(reals + rows + row), tl.load(reals + 2 * rows + row)
    top_k = tl.load(whole + 4 * rows + row)
    samples = warmth > 0.0
    z = tl.div_rn(x, tl.full([BLOCK], 0, tl.float32) + tl.where(samples, warmth, 1.0))
    wrong = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    best = tl.max(z, 0)
    # [one, other]: the other stands before the one.
    above = z[None, :] > z[:, None]
    before = above | ((z[None, :] == z[:, None]) & (token[None, :] < token[:, None]))
    kept = (z > float("-inf")) & ((top_k == 0) | (tl.sum(above.to(tl.int32), 1) < top_k))
    weights = tl.exp(z - best)
    mass = tl.where(kept, (weights * MASS).to(tl.int64), 0)
    total = tl.sum(mass, 0)
    rest = total - tl.sum(tl.where(before, tl.broadcast_to(mass[None, :], [BLOCK, BLOCK]), 0), 1)
    kept &= ((rest.to(tl.float64) / total.to(tl.float64)).to(tl.float32) > cut) & (weights >= min_p)
    value = tl.where(tl.sum(before.to(tl.int32), 1) == 0, z, float("-inf"))
    if samples:
        n0, n1, n2, n3 = _noise(whole + row, rows, token // 4)
        which = token % 4
        value = z + tl.where(which == 0, n0, tl.where(which == 1, n1, tl.where(which == 2, n2, n3)))
    value = tl.where(kept, value, float("-inf"))
    most = tl.max(value, 0)
    lowest = tl.min(tl.where(value == most, token, NO_ID), 0)
    fine = (wrong == 0) & (most > float("-inf"))
    tl.store(picks + row, tl.where(fine, lowest, -1).to(tl.int64))


def pick_whole(logits: Tensor, numbers: RuleNumbers) -> Tensor:
    """The pick of rows that keep the whole vocabulary: two launches, shapes known beforehand.

    logits: [rows, vocab], each row contiguous. Returns int64 [rows], `NO_TOKEN` for a row with NaN or +inf in it or
    nothing finite.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, 4 * QUADS)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    picks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _pick_pieces[(rows, pieces)](
            logits, numbers.reals[0], numbers.whole, values, tokens, vocab, logits.stride(0), pieces,
            BLOCK=QUADS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        block = max(64, triton.next_power_of_2(pieces))
        _pick_rows[(rows,)](values, tokens, picks, pieces, BLOCK=block, num_warps=1, enable_fp_fusion=True)
    return picks


def pick_kept(logits: Tensor, numbers: RuleNumbers, most: int) -> Tensor:
    """The picks of sampled rows that keep a part of the vocabulary. most: the largest top_k among them.

    logits: [rows, vocab], each row contiguous. Returns int64 [rows] as `pick_whole` does.
    """
    rows, vocab = logits.shape
    borders = torch.full((rows,), -torch.inf, dtype=torch.float32, device=logits.device)
    if most:
        top_k = numbers.whole[4].long()
        last = logits.topk(most).values.float().gather(1, (top_k - 1).clamp(min=0)[:, None]).squeeze(1)
        borders = torch.where(top_k > 0, last, borders)
    picks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pick_kept[(rows,)](
        logits, borders, numbers.reals, numbers.whole, picks, vocab, logits.stride(0),
        QUAD=QUADS, WIDE=WIDE, num_warps=16, enable_fp_fusion=True,
    )  # fmt: skip
    return picks


def pick_listed(scores: Tensor, candidates: Tensor, numbers: RuleNumbers) -> Tensor:
    """`tidar_core.kernels.rules.pick_listed` in one launch."""
    rows, count = scores.shape
    picks = torch.empty(rows, dtype=torch.int64, device=scores.device)
    _pick_listed[(rows,)](
        scores.contiguous(), candidates.contiguous(), numbers.reals.contiguous(), numbers.whole.contiguous(), picks,
        count, BLOCK=max(16, triton.next_power_of_2(count)), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return picks


def pick_tokens(logits: Tensor, rules: Sequence[TokenRule], shift: Tensor | None = None) -> Tensor:
    """`picking.pick_tokens` by these kernels; where no rule adjusts scores, the host waits for nothing."""
    scores = adjusted(logits, rules).contiguous()
    kinds = of_all(rules, _kinds, scores.shape[-1], scores.device)
    if not kinds:
        return _pick_alike(scores, rules, shift)
    picks = torch.empty(len(rules), dtype=torch.int64, device=scores.device)
    for index, own in kinds:
        picks[index] = _pick_alike(scores[index], own, None if shift is None else shift[index])
    return picks


def _kinds(rules: Sequence[TokenRule], vocab: int, device: torch.device) -> tuple[tuple[Tensor, Rules], ...]:
    """The rows that keep a part of the vocabulary and those that keep all, int64, and their rules; nothing where there
    are rows of one kind alone."""
    by_kind: list[list[int]] = [[], []]
    for row, rule in enumerate(rules):
        by_kind[rule.keeps_all(vocab)].append(row)
    if not all(by_kind):
        return ()
    return tuple((on_device(rows, device), Rules(rules[row] for row in rows)) for rows in by_kind)


def _most_kept(rules: Sequence[TokenRule], vocab: int) -> int | None:
    """The largest top_k of rows of one kind, None where they keep all."""
    if not rules or rules[0].keeps_all(vocab):
        return None
    return max(kept_by_rank(rule.params, vocab) for rule in rules)


def _pick_alike(scores: Tensor, rules: Sequence[TokenRule], shift: Tensor | None) -> Tensor:
    vocab = scores.shape[-1]
    numbers, most = rule_numbers(rules, vocab, scores.device, shift), of_all(rules, _most_kept, vocab)
    return pick_whole(scores, numbers) if most is None else pick_kept(scores, numbers, most)
