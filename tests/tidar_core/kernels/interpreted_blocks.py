"""The trainer's attention kernels against plain torch, interpreted, out and gradient. Run by
`test_triton_interpreted.py`, in a process where TRITON_INTERPRET=1 was set before triton was imported."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.convert.trained import random_documents, tiny_base
from tidar_core.convert import fused
from tidar_core.convert.blocks import draw_blocks, pack_documents
from tidar_core.convert.drafter import trainable
from tidar_core.convert.forward import gpu_attends, run_clean, run_masks
from tidar_core.convert.fused import block_error, proven
from tidar_core.kernels.triton_blocks import TILE_MOST, TILE_ROWS, BlockAttentionSizes, block_tiles, supports
from tidar_core.model.weights import named_tensors

pytest_plugins = "tests.tidar_core.kernels.interpreter"
pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
SIZES = [
    BlockAttentionSizes(heads, kv_heads, head_dim, slots, causal)
    for heads, kv_heads, head_dim, slots in (
        (6, 2, 16, 8), (2, 2, 32, 5), (8, 1, 16, 16), (2, 1, 16, 2), (7, 1, 64, 8)
    )
    for causal in (False, True)
]  # fmt: skip


@pytest.fixture(autouse=True)
def proven_anew():
    proven.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_result_and_gradient_are_plain_torchs(sizes, dtype):
    assert block_error(sizes, dtype, CPU, ((300, 24), (70, 9), (3, 2), (150, 1))) <= TOLERANCE[dtype]


@settings(deadline=None)
@given(data=st.data(), slots=st.integers(1, 16), group=st.integers(1, 8))
def test_every_block_lies_in_one_tile_of_its_document(data, slots, group):
    counts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    lengths = [data.draw(st.integers(count, 200)) for count in counts]
    document = np.repeat(np.arange(len(counts)), counts)
    context = np.concatenate([np.linspace(1, length, count) for length, count in zip(lengths, counts, strict=True)])
    context, starts = context.astype(np.int64), np.cumsum([0, *lengths[:-1]])
    sizes = BlockAttentionSizes(group, 1, 16, slots, False)
    assert supports(sizes, torch.bfloat16)
    made = block_tiles(document, context, starts, sizes, CPU)
    assert made.context.tolist() == context.tolist()
    taken = []
    for first, rows, start, fewest, most, *_ in made.tiles.tolist():
        assert first % slots == rows % slots == 0
        assert 0 < rows * group <= TILE_ROWS
        blocks = np.arange(first // slots, (first + rows) // slots)
        assert (starts[document[blocks]] == start).all()
        assert (fewest, most) == (context[blocks].min(), context[blocks].max())
        taken += blocks.tolist()
    assert sorted(taken) == list(range(len(context)))
    longest = made.tiles[:, TILE_MOST.value].tolist()
    assert longest == sorted(longest, reverse=True)


def test_what_does_not_fit_a_tile_is_not_supported():
    assert not supports(BlockAttentionSizes(16, 1, 16, 16, False), torch.bfloat16)
    assert not supports(BlockAttentionSizes(8, 8, 256, 8, False), torch.bfloat16)
    assert not supports(BlockAttentionSizes(8, 8, 64, 8, False), torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("within_block", ["bidirectional", "causal"])
def test_training_by_kernels_is_training_in_plain_torch(tmp_path, architecture, within_block, monkeypatch, caplog):
    """Hidden states of mask rows, and the gradient of every tensor of the drafter; in fp32, which only the interpreter
    has room for."""
    monkeypatch.setattr(fused, "supports", lambda sizes, dtype: True)
    tiny = tiny_base(tmp_path, architecture)
    pack = pack_documents(random_documents(3, longest=150), CPU)
    blocks = draw_blocks(pack, 20, 4, 1024, np.random.default_rng(0))
    found = []
    for base in (tiny.base, replace(tiny.base, attends=gpu_attends())):
        adapter = trainable(replace(tiny.adapter, slot_head=None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a GPU, FlexAttention is its plain definition
            hidden = run_masks(base, adapter, run_clean(base, pack), blocks, within_block)
        hidden.square().sum().backward()
        found.append({"hidden": hidden.detach(), **{name: each.grad for name, each in named_tensors(adapter)}})
    assert "FlexAttention" not in caplog.text
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_kernels_that_are_wrong_or_fail_are_not_used(monkeypatch, caplog):
    sizes, right = SIZES[0], fused.block_attention
    assert proven(sizes, torch.float16, CPU)
    proven.cache_clear()
    monkeypatch.setattr(fused, "block_attention", lambda *arguments: right(*arguments) * 1.1)
    assert not proven(sizes, torch.float16, CPU)
    assert "off by" in caplog.text
    proven.cache_clear()
    monkeypatch.setattr(fused, "block_attention", lambda *arguments: 1 / 0)
    assert not proven(sizes, torch.float16, CPU)
    assert "ZeroDivisionError" in caplog.text
