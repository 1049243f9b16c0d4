"""Training's own kernels on a CPU: mask rows' attention against plain torch, and what runs where they do not fit."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.trained import random_documents, tiny_base
from tidar_core.config import ModelConfig
from tidar_core.convert import forward
from tidar_core.convert.attention import CleanKV, mask_attention
from tidar_core.convert.blocks import draw_blocks, pack_documents
from tidar_core.convert.cpu_masks import cpu_mask_attention
from tidar_core.convert.forward import PLAIN, cpu_ways
from tidar_core.convert.ops import PLAIN_ROWS
from tidar_core.kernels.cpu_build import CompileError
from tidar_core.kernels.cpu_training import mask_ops, row_ops, supports_masks, supports_rows
from tidar_core.kernels.ops import rotary_tables
from tidar_core.layout import WithinBlock

NO_NORMS = SimpleNamespace(layers=[SimpleNamespace(q_norm=None, k_norm=None)] * 2)  # heads go as they are


def shape(kv_heads: int, groups: int, head_dim: int, window: int | None) -> ModelConfig:
    """Two layers, of which the second has the window."""
    heads = kv_heads * groups
    return ModelConfig(
        "llama", 64, heads * head_dim, 64, 2, heads, kv_heads, head_dim, 1e-5, 1e4, 256, True, False, False, False,
        False, (2,), window=window, windowed=(1,) if window else (),
    )  # fmt: skip


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
        for way in (mask_attention, partial(cpu_mask_attention, mask_ops())):
            attention = way(config, NO_NORMS, rotary, pack, CleanKV(keys, values), blocks, within_block)
            qkv = rows.clone().requires_grad_(True)
            out = attention(layer, qkv)
            out.backward(slope)
            found.append((out.detach(), qkv.grad))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def test_far_scores_and_gates_are_finite() -> None:
    """What overflows on the way to a share of 0 or 1 is such a share."""
    rows = row_ops(torch.float32)
    far = torch.tensor([[-3e38, -1e4, -100.0, -88.0, 88.0, 100.0, 1e4, 3e38] * 2 + [1.0] * 16])
    for activation in ("silu", "gelu_tanh"):
        for ours, theirs in (
            (rows.gate(far, activation), PLAIN_ROWS.gate(far, activation)),
            (rows.gate_slope(far, far[:, 16:], activation), PLAIN_ROWS.gate_slope(far, far[:, 16:], activation)),
        ):
            finite = theirs.isfinite()
            torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-5, atol=1e-30)


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

    monkeypatch.setattr(forward, "row_ops", no_compiler)
    said: list[str] = []
    assert cpu_ways(tiny_base(tmp_path).base.config, torch.float32, said.append) == (PLAIN, PLAIN_ROWS)
    assert said == ["training without compiled kernels, which is slower: no C++ compiler (g++ or clang++) on PATH"]
