"""The slot head: what it adds, and drafts that follow from one another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.convert.trained import TinyBase, random_documents, tiny_base
from tidar_core.convert.blocks import draw_blocks, pack_documents
from tidar_core.convert.drafter import with_slot_head
from tidar_core.convert.forward import run_clean, run_masks, run_slot_head
from tidar_core.engine.drafting import pick_drafts
from tidar_core.engine.runner import Runner
from tidar_core.kernels.cpu import cpu_ops
from tidar_core.kernels.ops import GuessedSlots, empty_cache
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model import slot_head
from tidar_core.model.decoder import all_layers
from tidar_core.model.weights import SlotHead
from tidar_core.request import SamplingParams
from tidar_core.sampling.picking import pick_tokens
from tidar_core.sampling.token_rule import TokenRule

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(tiny: TinyBase, request: pytest.FixtureRequest) -> Runner:
    base = tiny.base
    ops = REFERENCE_OPS if request.param == "reference" else cpu_ops(base.config, torch.float32)
    layers = all_layers(REFERENCE_OPS, base.config, base.weights, tiny.adapter, base.rotary)
    cache = empty_cache(base.config, 2, 16, torch.float32, CPU)
    return Runner(ops, base.config, base.weights, tiny.adapter, cache, layers, base.weights.head)


def told(head: SlotHead, hidden: torch.Tensor, before: list[torch.Tensor]) -> list[torch.Tensor]:
    """By definition, one proposal at a time: what slots 1, 2, … say when `before` is known. hidden: [slots, hidden]."""
    state, found = torch.zeros(head.out.shape[1]), []
    for own, word in zip(hidden, before, strict=False):
        state = F.silu(head.hidden @ own + head.token @ word + head.state @ state)
        found.append(own + head.out @ state)
    return found


def test_the_trainer_corrects_slots_by_the_documents_tokens(tiny: TinyBase) -> None:
    documents = random_documents(3)
    pack = pack_documents(documents, CPU)
    blocks = draw_blocks(pack, 5, 4, 1024, np.random.default_rng(0))
    head, words = tiny.adapter.slot_head, tiny.base.weights.embedding
    assert head is not None
    alone = torch.arange(len(blocks)) % 2 == 1
    with torch.no_grad():
        clean = run_clean(tiny.base, pack)
        hidden = run_masks(tiny.base, tiny.adapter, clean, blocks, "bidirectional")
        found = run_slot_head(tiny.base, tiny.adapter, clean, blocks, hidden, alone).view(len(blocks), 4, -1)
    for index, own in enumerate(hidden.view(len(blocks), 4, -1)):
        tokens = documents[blocks.document[index]][0]
        context = int(blocks.context[index])
        before = [words[tokens[place]] for place in range(context, min(context + 3, len(tokens)))]
        expected = [own[0], *(own[1:] if alone[index] else told(head, own[1:], before))]
        torch.testing.assert_close(found[index][: len(expected)], torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_new_slot_head_changes_nothing_yet_and_learns(tiny: TinyBase) -> None:
    fresh = with_slot_head(tiny.adapter, tiny.base.weights.embedding, 16, seed=0).slot_head
    assert fresh is not None
    hidden, before = torch.randn(2, 3, 4, tiny.base.config.hidden_size)
    out = fresh.out.clone().requires_grad_(True)
    learning = SlotHead(fresh.hidden, fresh.token, fresh.state, out)
    found = slot_head.corrected(learning, hidden, before)
    assert torch.equal(found, hidden)
    found[:, 1:].sum().backward()
    assert out.grad is not None
    assert out.grad.abs().max() > 0


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    heat=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 999),
)
def test_drafts_follow_from_one_another(
    runner: Runner, tiny: TinyBase, counts: list[int], heat: float, seed: int
) -> None:
    vocab, draw = tiny.base.config.vocab_size, torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(counts), tiny.base.config.hidden_size, generator=draw)
    anchors = torch.randint(vocab, (len(counts),), generator=draw)
    rules = [TokenRule(SamplingParams(1, temperature=heat, seed=seed), 7 * row) for row in range(sum(counts))]
    head, weights, row = tiny.adapter.slot_head, tiny.base.weights, 0
    expected: list[int] = []
    assert head is not None
    for anchor, count in zip(anchors.tolist(), counts, strict=True):
        before, drafts = [weights.embedding[anchor]], []
        for slot in range(count):
            says = told(head, hidden[row : row + count], before)[slot]
            drafts.append(int(pick_tokens((weights.head @ says)[None], [rules[row + slot]])))
            before.append(weights.embedding[drafts[-1]])
        expected += drafts
        row += count
    with pytest.MonkeyPatch.context() as patch:  # all tokens are candidates: then the choice is that of the definition
        patch.setattr("tidar_core.engine.drafting.CANDIDATES", vocab)
        patch.setattr("tidar_core.kernels.cpu_slots.CANDIDATES", vocab)
        drafted = pick_drafts(runner, GuessedSlots(hidden, hidden @ weights.head.t(), rules, anchors, counts))
        assert drafted.tolist() == expected


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(1, 1500), wanted=st.integers(1, 40), seed=st.integers(0, 999), ties=st.booleans())
def test_the_best_candidate_of_a_few_is_taken(
    runner: Runner, tiny: TinyBase, vocab: int, wanted: int, seed: int, ties: bool
) -> None:
    head, words = tiny.adapter.slot_head, tiny.base.weights.embedding
    assert head is not None
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tiny.base.config.hidden_size, generator=draw)
    logits = 3 * torch.randn(1, vocab, generator=draw)
    if ties:
        logits = logits.round()
    vocabulary = torch.randn(vocab, hidden.shape[1], generator=draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidar_core.engine.drafting.CANDIDATES", wanted)
        patch.setattr("tidar_core.kernels.cpu_slots.CANDIDATES", wanted)
        some = replace(runner, vocabulary=vocabulary)
        slots = GuessedSlots(hidden, logits.clone(), [TokenRule(GREEDY, 1)], torch.tensor([5]), [1])
        first = int(pick_drafts(some, slots))
    least = logits[0].topk(min(wanted, vocab)).values[-1]
    says = logits[0] + vocabulary @ (told(head, hidden, [words[5]])[0] - hidden[0])
    sure = logits[0] > least  # which of equals is a candidate is left open
    assert logits[0, first] >= least
    assert not sure.any() or says[first] >= says[sure].max() - 1e-4
