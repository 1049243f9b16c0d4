"""Laying out a model for the CPU's products: the same bits a few rows at a time, and hardly more memory than it has."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidar_core.kernels import cpu_pack
from tidar_core.kernels.reference import as_it_is
from tidar_core.model.weights import AdapterWeights, LayerWeights, ModelWeights, OwnAttention, pack_adapter, pack_model

MEASURED = """
import torch
from tests.tidar_core.kernels.test_cpu_pack import model_of
from tidar_core.kernels.cpu_pack import pack_int8
from tidar_core.model.weights import pack_model

torch.set_num_threads(1)
memory = lambda kind: int(open("/proc/self/status").read().split(kind + ":")[1].split()[0])
before = memory("VmRSS")
weights = model_of(3, 2048)
unpacked = memory("VmRSS") - before
weights = pack_model(weights, pack_int8, pack_int8, pack_int8)
print((memory("VmHWM") - before) / unpacked)
"""


def model_of(layers: int, hidden: int) -> ModelWeights:
    def matrix(outs: int, ins: int) -> torch.Tensor:
        return torch.ones(outs, ins, dtype=torch.bfloat16)

    def layer() -> LayerWeights:
        norm = torch.ones(hidden)
        qkv, o, gate_up = matrix(2 * hidden, hidden), matrix(hidden, hidden), matrix(6 * hidden, hidden)
        return LayerWeights(norm, qkv, None, None, None, o, None, norm, gate_up, None, matrix(hidden, 3 * hidden), None)

    embedding = matrix(2 * hidden, hidden)
    return ModelWeights(embedding, tuple(layer() for _ in range(layers)), torch.ones(hidden), embedding)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_a_model_is_packed_in_little_more_memory_than_it_has():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.35


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (160, 96), (4096 + 48, 1024)])
@pytest.mark.parametrize("pack", [cpu_pack.pack_int8, cpu_pack.pack_int4])
def test_packing_by_slices_gives_the_bits_of_the_whole(pack, rows, columns, monkeypatch):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    sliced = pack(weight)
    monkeypatch.setattr(cpu_pack, "SLICE_WEIGHTS", weight.numel())
    assert torch.equal(sliced, pack(weight))
    monkeypatch.setattr(cpu_pack, "SLICE_WEIGHTS", 1)
    assert torch.equal(sliced, pack(weight))


def test_packing_takes_the_layers_and_leaves_embedding_and_head():
    weights, attention = model_of(2, 64), OwnAttention(torch.ones(128, 64), None, None, torch.ones(64, 64))
    packed = pack_model(weights, cpu_pack.pack, cpu_pack.pack, cpu_pack.pack)
    adapter = pack_adapter(AdapterWeights(torch.ones(4, 64), (), attention=(attention,)), cpu_pack.pack, cpu_pack.pack)
    assert adapter.attention is not None
    for before, after in zip((*weights.layers, attention), (*packed.layers, *adapter.attention), strict=True):
        assert (before.qkv.numel(), before.o.numel()) == (0, 0)
        assert (after.qkv.numel(), after.o.numel()) == (128 * 64, 64 * 64)
    assert packed.embedding is weights.embedding is weights.head
    assert packed.head.numel() == packed.embedding.numel() == 128 * 64


def test_what_needs_no_other_layout_stays():
    weights = model_of(1, 64)
    packed = pack_model(weights, as_it_is, as_it_is, as_it_is)
    assert packed.layers[0].down is weights.layers[0].down
    assert packed.layers[0].down.shape == (64, 192)
