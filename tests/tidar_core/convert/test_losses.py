"""The drafter's loss against torch's own autograd over whole logits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tidar_core.convert.trained import corpus_of
from tidar_core.convert.losses import NEGLIGIBLE, LossConfig, draft_loss
from tidar_core.convert.vocabulary import Columns, Vocabulary

VOCAB, HIDDEN = 97, 24


def plain_loss(
    draft_logits: Tensor, base_logits: Tensor, trained: Tensor, config: LossConfig, normaliser: float
) -> Tensor:
    """From logits [blocks, block, vocab], by the definitions alone."""
    p, q = base_logits.softmax(-1), draft_logits.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    variation = 0.5 * (p - q).abs().sum(-1)
    weights = torch.zeros_like(variation)
    for slot in range(trained.shape[1]):
        if slot == 0:
            weights[:, slot] = config.first_slot
        elif config.weighting == "decay":
            weights[:, slot] = 2.718281828459045 ** (-(slot - 1) / config.decay)
        else:
            weights[:, slot] = (1 - variation.detach())[:, 1:slot].prod(-1)
    distance = config.kl_share * kl + (1 - config.kl_share) * variation
    return (distance * weights * trained).sum() / normaliser


def case(blocks: int, block: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    drafted = torch.randn(blocks * block, HIDDEN, generator=draw, dtype=dtype).requires_grad_(True)
    head = 0.4 * torch.randn(VOCAB, HIDDEN, generator=draw, dtype=dtype)
    clean = torch.randn(blocks + 3, HIDDEN, generator=draw, dtype=dtype)
    targets = torch.randint(blocks + 3, (blocks, block), generator=draw)
    lengths = torch.randint(block + 1, (blocks, 1), generator=draw)
    return drafted, head, clean, targets, torch.arange(block) < lengths


@pytest.mark.parametrize("weighting", ["decay", "product"])
@pytest.mark.parametrize("kl_share", [1.0, 0.0, 0.3])
@settings(max_examples=8, deadline=None)
@given(blocks=st.integers(1, 9), block=st.integers(2, 6), seed=st.integers(0, 999), at_once=st.integers(1, 60))
def test_value_and_gradient_are_those_of_the_definition(weighting, kl_share, blocks, block, seed, at_once):
    drafted, head, clean, targets, trained = case(blocks, block, seed)
    config = LossConfig(kl_share, weighting, decay=3.0)
    loss = draft_loss(drafted, Columns(head), clean, targets, trained, config, 7.0, at_once)
    (2 * loss).backward()
    found, drafted.grad = drafted.grad, None
    plain = plain_loss((drafted @ head.T).view(blocks, block, VOCAB), (clean @ head.T)[targets], trained, config, 7.0)
    (2 * plain).backward()
    # Sums over the vocabulary are gathered in fp32.
    torch.testing.assert_close(loss.double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, drafted.grad, rtol=1e-5, atol=1e-7)


def test_rows_tell_how_well_they_agree():
    _, head, clean, targets, _ = case(5, 4, 0)
    same = clean[targets].view(-1, HIDDEN).clone()
    same[0] = -same[0]

    def apart(kl_share: float) -> Tensor:
        """The distance of each row by itself, unweighted."""
        config = LossConfig(kl_share, decay=float("inf"), first_slot=1.0)
        each = torch.eye(20, dtype=torch.bool).view(20, 5, 4)
        return torch.stack([draft_loss(same, Columns(head), clean, targets, row, config, 1.0) for row in each])

    p = (clean @ head.T)[targets].softmax(-1)
    q = (same @ head.T).softmax(-1).view_as(p)
    overlap = torch.minimum(p, q).sum(-1).flatten()
    torch.testing.assert_close(1 - apart(0.0).double(), overlap, rtol=1e-5, atol=1e-5)
    assert apart(1.0)[0] > 0.1
    assert apart(1.0)[1:].abs().max() < 1e-5


def test_slots_that_hardly_weigh_cost_nothing():
    drafted, head, clean, targets, _ = case(3, 16, 1)
    config = LossConfig(decay=1.0)
    trained = torch.ones(3, 16, dtype=torch.bool)
    loss = draft_loss(drafted, Columns(head), clean, targets, trained, config, 1.0)
    loss.backward()
    skipped = config.profile(16) < NEGLIGIBLE
    assert skipped.any()
    logits = (drafted @ head.T).view(3, 16, VOCAB), (clean @ head.T)[targets]
    torch.testing.assert_close(loss.double(), plain_loss(*logits, trained & ~skipped, config, 1.0), rtol=1e-6, atol=0)
    assert plain_loss(*logits, trained, config, 1.0) > loss * (1 + 1e-5)
    assert drafted.grad.view(3, 16, HIDDEN)[:, skipped].eq(0).all()
    assert drafted.grad.view(3, 16, HIDDEN)[:, ~skipped].ne(0).all()


def test_bf16_stays_close_to_the_definition():
    drafted, head, clean, targets, trained = case(20, 8, 2, torch.float32)
    plain = plain_loss((drafted @ head.T).view(20, 8, VOCAB), (clean @ head.T)[targets], trained, LossConfig(), 20.0)
    plain.backward()
    expected, low = drafted.grad, drafted.detach().bfloat16().requires_grad_(True)
    loss = draft_loss(low, Columns(head.bfloat16()), clean.bfloat16(), targets, trained, LossConfig(), 20.0)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert F.cosine_similarity(low.grad.float().flatten(), expected.flatten(), dim=0) > 0.999


def test_no_block_with_a_target_is_a_loss_of_zero():
    drafted, head, clean, targets, _ = case(2, 4, 3)
    loss = draft_loss(drafted, Columns(head), clean, targets, torch.zeros(2, 4, dtype=torch.bool), LossConfig(), 1.0)
    loss.backward()
    assert loss == 0
    assert drafted.grad.eq(0).all()


def test_a_part_of_the_vocabulary_stands_for_all_of_it():
    """The mean over many draws is the whole vocabulary's gradient; a single draw points the same way."""
    draw, vocab = torch.Generator().manual_seed(5), 4000
    head = 0.3 * torch.randn(vocab, HIDDEN, generator=draw)
    clean = torch.randn(12, HIDDEN, generator=draw)
    drafted = (clean[torch.arange(24) % 12] + 0.7 * torch.randn(24, HIDDEN, generator=draw)).requires_grad_(True)
    targets, trained = (torch.arange(24) % 12).view(6, 4), torch.ones(6, 4, dtype=torch.bool)
    tokens = (clean @ head.T).argmax(-1)
    vocabulary = Vocabulary(corpus_of([(np.arange(500), np.ones(500, bool))]), head, 500)

    def gradient(columns: Columns) -> tuple[float, Tensor]:
        drafted.grad = None
        loss = draft_loss(drafted, columns, clean, targets, trained, LossConfig(), 6.0)
        loss.backward()
        return loss.item(), drafted.grad.flatten()

    loss, whole = gradient(Columns(head))
    rng = np.random.default_rng(0)
    sizes = {len(vocabulary.draw(tokens, rng).head) for _ in range(3)}
    assert sizes == {len(set(range(500)) | set(tokens.tolist())) + 125}
    assert vocabulary.columns == 500 + 125
    found = [gradient(vocabulary.draw(tokens, rng)) for _ in range(40)]
    assert sum(each for each, _ in found) / 40 == pytest.approx(loss, rel=0.1)
    mean = torch.stack([slope for _, slope in found]).mean(0)
    assert F.cosine_similarity(mean, whole, dim=0) > 0.97
    assert min(F.cosine_similarity(slope, whole, dim=0) for _, slope in found) > 0.6


@pytest.mark.parametrize("frequent", [0, 60, 97, 1000])
def test_where_a_part_saves_nothing_all_of_the_vocabulary_counts(frequent):
    head = torch.randn(VOCAB, HIDDEN)
    corpus = corpus_of([(np.arange(9), np.ones(9, bool))])
    vocabulary = Vocabulary(corpus, head, frequent)
    columns = vocabulary.draw(torch.arange(3), np.random.default_rng(0))
    assert columns.head is head
    assert vocabulary.columns == VOCAB
    assert columns.raised is None
