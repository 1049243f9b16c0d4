"""Training's own kernels on a CPU: mask rows' attention against plain torch, and what runs where they do not fit."""

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.trained import random_documents, tiny_base
from tidar_core.config import Activation, ModelConfig
from tidar_core.convert import forward
from tidar_core.convert.attention import CleanKV, chunks_of, mask_attention
from tidar_core.convert.blocks import draw_blocks, pack_documents
from tidar_core.convert.cpu_masks import cpu_mask_attention
from tidar_core.convert.forward import PLAIN, cpu_ways
from tidar_core.convert.ops import PLAIN_ROWS
from tidar_core.kernels.cpu_build import CompileError, compiled_library
from tidar_core.kernels.cpu_training import MaskChunk, MaskHeads, mask_ops, row_ops, supports_masks, supports_rows
from tidar_core.kernels.ops import rotary_tables
from tidar_core.layout import WithinBlock

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
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
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([16, 32, 48, 64, 80, 128])),
    block=st.integers(2, 16),
    per_document=st.integers(1, 40),
    window=st.sampled_from([None, 1, 5, 40]),
    within_block=st.sampled_from(["bidirectional", "causal"]),
    seed=st.integers(0, 999),
)
def test_attention_and_its_gradient_are_those_of_plain_torch(
    heads: tuple[int, int, int], block: int, per_document: int, window: int | None, within_block: WithinBlock, seed: int
) -> None:
    config, draw = shape(*heads, window), torch.Generator().manual_seed(seed)
    pack = pack_documents(random_documents(3, seed, longest=120), torch.device("cpu"))
    blocks = draw_blocks(pack, per_document, block, config.max_positions, np.random.default_rng(seed))
    if not len(blocks):
        return
    kv_heads, _, size = heads
    keys, values = ([torch.randn(kv_heads, len(pack.tokens), size, generator=draw) for _ in range(2)] for _ in range(2))
    rows = torch.randn(len(blocks.positions), (config.heads + 2 * kv_heads) * size, generator=draw)
    slope = torch.randn(len(rows), config.heads * size, generator=draw)
    rotary = rotary_tables(config, torch.device("cpu"))
    for layer in range(2):
        found = []
        for way in (mask_attention, partial(cpu_mask_attention, mask_ops(compiled_library()))):
            attention = way(config, NO_NORMS, rotary, pack, CleanKV(keys, values), blocks, within_block)
            qkv = rows.clone().requires_grad_(True)
            out = attention(layer, qkv)
            out.backward(slope)
            found.append((out.detach(), qkv.grad))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@needs_compiler
def test_far_gates_are_finite() -> None:
    """What overflows on the way to a share of 0 or 1 is such a share."""
    rows = row_ops(compiled_library(), torch.float32)
    far = torch.tensor([[-3e38, -1e4, -100.0, -88.0, 88.0, 100.0, 1e4, 3e38] * 2 + [1.0] * 16])
    for activation in get_args(Activation):
        for ours, theirs in (
            (rows.gate(far, activation), PLAIN_ROWS.gate(far, activation)),
            (rows.gate_slope(far, far[:, 16:], activation), PLAIN_ROWS.gate_slope(far, far[:, 16:], activation)),
        ):
            finite = theirs.isfinite()
            torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-5, atol=1e-30)


def shares_of(scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The shares of one block of 2 slots with one head, whose scores among each other are own [2, 2], and over clean
    keys scores [2, keys]."""
    heads, ops = MaskHeads(2, 1, 1, 16, 2), mask_ops(compiled_library())
    q, k = torch.zeros(2, 1, 2, 16)
    q[0, :, :2], k[0, :, :2] = own, torch.eye(2)
    laid = torch.cat((torch.zeros(1, 2, 2), scores[None]), -1)
    ends = torch.tensor([scores.shape[1]], dtype=torch.int32)
    ops.shares(laid, q, k, None, ends, False, heads, MaskChunk(0, 1, scores.shape[1]))
    return laid[0]


@needs_compiler
def test_shares_of_far_scores_are_nothing_and_of_no_number_are_none() -> None:
    """What is not normal would make the products behind it slow; a loss that is no number must be seen."""
    draw = torch.Generator().manual_seed(0)
    scores, own = 40 * torch.randn(2, 2000, generator=draw), torch.tensor([[0.0, 1.0], [-90.0, 90.0]])
    found, expected = shares_of(scores, own), torch.cat((own, scores), 1).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-37)
    assert (found[found != 0] >= torch.finfo(torch.float32).tiny).all()
    assert (found == 0).any()
    scores[1, 40] = torch.nan
    found = shares_of(scores, own)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@needs_compiler
def test_rows_of_another_dtype_and_blocks_without_room_are_refused() -> None:
    with pytest.raises(TypeError, match=r"rows of torch\.bfloat16 for kernels of torch\.float32"):
        row_ops(compiled_library(), torch.float32).norm(torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(16), 1e-5)
    pack = pack_documents(random_documents(1), torch.device("cpu"))
    blocks = draw_blocks(pack, 4, 17, 256, np.random.default_rng(0))
    with pytest.raises(ValueError, match="blocks of 17 slots, where 16 have room"):
        list(chunks_of(pack, blocks))


@needs_compiler
def test_what_does_not_fit_is_plain(tmp_path) -> None:
    config = tiny_base(tmp_path).base.config
    assert supports_rows(config, torch.bfloat16)
    assert supports_masks(config, torch.float32)
    assert not supports_rows(replace(config, intermediate_size=40), torch.float32)
    assert not supports_rows(config, torch.float16)
    assert not supports_masks(replace(config, head_dim=24), torch.float32)
    attends, rows = cpu_ways(config, torch.bfloat16, print)
    assert attends == PLAIN
    assert rows is not PLAIN_ROWS


def test_without_a_compiler_training_goes_on_in_plain_torch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*given: object) -> None:
        raise CompileError("no C++ compiler (g++ or clang++) on PATH")

    monkeypatch.setattr(forward, "compiled_library", no_compiler)
    said: list[str] = []
    assert cpu_ways(tiny_base(tmp_path).base.config, torch.float32, said.append) == (PLAIN, PLAIN_ROWS)
    assert said == ["training without compiled kernels, which is slower: no C++ compiler (g++ or clang++) on PATH"]
