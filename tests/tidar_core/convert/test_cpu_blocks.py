"""Attention in training on a CPU against plain torch: values, gradients, and what is refused."""

import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.convert.trained import random_documents
from tidar_core.config import ModelConfig
from tidar_core.convert.attention import CleanKV, clean_attention, mask_attention
from tidar_core.convert.blocks import draw_blocks, pack_documents
from tidar_core.convert.cpu_blocks import cpu_clean_attention, cpu_mask_attention
from tidar_core.kernels.cpu_blocks import block_ops, seen_blocks
from tidar_core.kernels.cpu_build import compiled_library
from tidar_core.kernels.ops import Rotary, rotary_tables
from tidar_core.layout import WithinBlock

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
HEADS = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 7, 17]), st.sampled_from([16, 48, 64, 80, 128, 256]))
NO_NORMS = SimpleNamespace(layers=[SimpleNamespace(q_norm=None, k_norm=None)] * 2)  # heads go as they are


def shape(kv_heads: int, groups: int, head_dim: int, window: int | None) -> ModelConfig:
    """Two layers, of which the second has the window."""
    heads = kv_heads * groups
    return ModelConfig(
        "llama", 64, heads * head_dim, 64, 2, heads, kv_heads, head_dim, 1e-5, 1e4, 256, True, False, False, False,
        False, (2,), window=window, windowed=(1,) if window else (),
    )  # fmt: skip


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    heads=HEADS,
    block=st.integers(2, 16),
    per_document=st.integers(1, 40),
    window=st.sampled_from([None, 1, 5, 40]),
    within_block=st.sampled_from(["bidirectional", "causal"]),
    seed=st.integers(0, 999),
)
def test_mask_rows_attend_as_in_plain_torch_and_so_does_the_gradient(
    heads: tuple[int, int, int], block: int, per_document: int, window: int | None, within_block: WithinBlock, seed: int
) -> None:
    config, draw = shape(*heads, window), torch.Generator().manual_seed(seed)
    pack = pack_documents(random_documents(3, seed, longest=120), torch.device("cpu"))
    blocks = draw_blocks(pack, per_document, block, config.max_positions, np.random.default_rng(seed))
    if not len(blocks):
        return
    kv_heads, _, size = heads
    laid = torch.randn(2, 2, len(pack.tokens), kv_heads, size, generator=draw).transpose(2, 3)
    clean = CleanKV(list(laid[0]), list(laid[1]))
    rows = torch.randn(len(blocks.positions), (config.heads + 2 * kv_heads) * size, generator=draw)
    slope = torch.randn(len(rows), config.heads * size, generator=draw)
    rotary = rotary_tables(config, torch.device("cpu"))
    for layer in range(2):
        found = []
        for way in (mask_attention, partial(cpu_mask_attention, block_ops(compiled_library("training")))):
            attention = way(config, NO_NORMS, rotary, pack, clean, blocks, within_block)
            qkv = rows.clone().requires_grad_(True)
            out = attention(layer, qkv)
            out.backward(slope)
            found.append((out.detach(), qkv.grad))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    heads=HEADS,
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 5, 40]),
    seed=st.integers(0, 999),
)
def test_clean_rows_attend_as_in_plain_torch(
    heads: tuple[int, int, int], lengths: list[int], window: int | None, seed: int
) -> None:
    config, draw = shape(*heads, window), torch.Generator().manual_seed(seed)
    pack = pack_documents([(np.zeros(each, np.int64), np.ones(each, bool)) for each in lengths], torch.device("cpu"))
    kv_heads, _, size = heads
    qkv = torch.randn(len(pack.tokens), (config.heads + 2 * kv_heads) * size, generator=draw)
    rotary, found = rotary_tables(config, torch.device("cpu")), []
    for way in (clean_attention, partial(cpu_clean_attention, block_ops(compiled_library("training")))):
        clean = CleanKV([], [])
        attention = way(config, NO_NORMS, rotary, pack, clean)
        found.append([attention(layer, qkv) for layer in range(2)] + clean.keys + clean.values)
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def shares_of(scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The shares of one block of 2 slots with one head, whose scores among each other are own [2, 2], and over clean
    keys scores [2, keys]."""
    config, (_, count) = shape(1, 1, 16, None), scores.shape
    unturned = Rotary(torch.ones(2, 8), torch.zeros(2, 8))
    # A slot asks along an axis of its own, so that a key's coordinates are its scores, but for the scale.
    qkv, keys = torch.zeros(2, 3, 16), torch.zeros(1, count, 16)
    qkv[:, 0, :2], qkv[:, 1, :2], keys[0, :, :2] = torch.eye(2), 4 * own.T, 4 * scores.T
    blocks = seen_blocks(config, *(np.array([each]) for each in (0, 2, 0, count)), causal=False)
    ops, rows = block_ops(compiled_library("training")), qkv.view(2, 48)
    _, shares = ops.attend(config, rows, unturned, keys, torch.zeros_like(keys), blocks, True)
    laid = shares.view(2, -1)
    assert (laid[:, 2:16] == 0).all()
    assert (laid[:, 16 + count :] == 0).all()
    return torch.cat((laid[:, :2], laid[:, 16 : 16 + count]), 1)


@needs_compiler
def test_shares_of_far_scores_are_nothing() -> None:
    """What is not normal would make the products behind it slow."""
    draw = torch.Generator().manual_seed(0)
    scores, own = 40 * torch.randn(2, 2000, generator=draw), torch.tensor([[0.0, 1.0], [-90.0, 90.0]])
    found, expected = shares_of(scores, own), torch.cat((own, scores), 1).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-37)
    assert (found[found != 0] >= torch.finfo(torch.float32).tiny).all()
    assert (found == 0).any()


@needs_compiler
def test_a_row_of_no_number_is_seen_and_is_nobody_elses() -> None:
    """A loss that is no number must be seen."""
    config, ops = shape(1, 1, 16, None), block_ops(compiled_library("training"))
    rows, keys = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)), torch.ones(1, 40, 16)
    rows[1, 3] = torch.nan  # of its query alone
    blocks = seen_blocks(config, *(np.array([each]) for each in (0, 2, 0, 40)), causal=False)
    out, _ = ops.attend(config, rows, Rotary(torch.ones(2, 8), torch.zeros(2, 8)), keys, keys, blocks, False)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@needs_compiler
def test_what_the_kernels_do_not_read_is_refused() -> None:
    config, ops = shape(1, 1, 16, None), block_ops(compiled_library("training"))
    blocks = seen_blocks(config, *(np.array([each]) for each in (0, 2, 0, 40)), causal=False)
    rows, laid, turning = torch.ones(2, 48), torch.ones(1, 40, 16), rotary_tables(config, torch.device("cpu"))
    with pytest.raises(TypeError, match="the heads of a row side by side"):
        ops.attend(config, rows, turning, laid, torch.ones(1, 16, 40).transpose(1, 2), blocks, False)
    with pytest.raises(TypeError, match="the heads of a row side by side"):
        ops.attend(config, rows, turning, torch.ones(2, 40, 16), laid, blocks, False)
    with pytest.raises(TypeError, match="rows of fp32, one behind the other"):
        ops.attend(config, torch.ones(48, 2).T, turning, laid, laid, blocks, False)


@needs_compiler
def test_blocks_without_room_are_refused() -> None:
    config, pack = shape(1, 1, 16, None), pack_documents(random_documents(1), torch.device("cpu"))
    blocks = draw_blocks(pack, 4, 17, 256, np.random.default_rng(0))
    rotary = rotary_tables(config, torch.device("cpu"))
    for way in (mask_attention, partial(cpu_mask_attention, block_ops(compiled_library("training")))):
        with pytest.raises(ValueError, match="blocks of 17 slots, where 16 have room"):
            way(config, NO_NORMS, rotary, pack, CleanKV([], []), blocks, "bidirectional")
