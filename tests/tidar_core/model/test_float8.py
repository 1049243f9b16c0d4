"""Base matrices in 8-bit floating point: what is kept of a number, the same everywhere, and served."""

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.tidar_core.kernels.test_kernels import model_config
from tests.tidar_core.ways import decode_ways
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import answer_all
from tidar_core.bench.exact import compare_ways, greedy_params, sampled_params
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import load_engine, ops_choice
from tidar_core.model import float8
from tidar_core.model.float8 import FLOAT8, packed, rounded, to_float8

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1e-20, 1e-4, 0.02, 1.0, 300.0, 1e20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_a_number_keeps_four_bits_of_itself(size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(7, 48, generator=generator) * size).to(dtype)
    weight[3] = 0
    weight[4] = 448.0 * 2.0**-9
    values, scales = to_float8(weight)
    assert values.dtype == FLOAT8
    assert (torch.frexp(scales)[0] == 0.5).all(), "powers of two"
    kept, exact = values.double() * scales.double()[:, None], weight.double()
    assert ((kept - exact).abs() <= exact.abs() / 16 + scales.double()[:, None] * 2.0**-10).all()
    largest = values.double().abs().amax(dim=1)
    assert (largest[[0, 1, 2, 4, 5, 6]] >= 224).all(), "no scale is larger than it must be"
    assert largest.isfinite().all()
    assert torch.equal(rounded(weight).double(), kept), "its own dtype has the number too"
    assert torch.equal(rounded(rounded(weight)), rounded(weight))
    memory = packed(weight)
    assert torch.equal(memory.float(), values.float())
    behind = memory.view(torch.uint8).as_strided((4 * len(memory),), (1,), memory.numel())
    assert torch.equal(behind.view(torch.float32), scales)


def test_experts_are_packed_as_matrices_are_and_one_by_one(monkeypatch):
    weight = torch.randn(5, 8, 48, generator=torch.Generator().manual_seed(0))
    memory, sizes = packed(weight), []

    def noted(rows):
        sizes.append(rows.numel())
        return to_float8(rows)

    monkeypatch.setattr(float8, "to_float8", noted)
    again = packed(weight)
    assert max(sizes) == 8 * 48
    values, scales = to_float8(weight)
    for found in (memory, again):
        assert torch.equal(found.float(), values.float())
        behind = found.view(torch.uint8).as_strided((4 * 5 * 8,), (1,), found.numel())
        assert torch.equal(behind.view(torch.float32), scales.flatten())


def test_an_engine_serves_the_rounded_model(tmp_path):
    """The answers of a checkpoint whose matrices were rounded before; embedding, head and norms are as they were."""
    model = tiny_checkpoint(tmp_path / "model", "qwen2", tied=False)
    adapter = tiny_adapter(tmp_path / "adapter", model, rank=16)
    lines: list[str] = []
    engine = load_engine(EngineConfig(str(model), str(adapter), "float8", "cpu"), lines.append)
    assert engine.info.dtype == "float8"
    assert any(
        "float8 saves no memory and no time here: weights are rounded to it and kept in bfloat16" in line
        for line in lines
    )
    prompts = [tuple(range(5 + i, 30 + 3 * i)) for i in range(4)]
    answers = [
        [answer.tokens for answer in answer_all(engine, prompts, [greedy_params(24, mode)] * 4)]
        for mode in ("off", "full")
    ]
    assert answers[0] == answers[1]

    path = model / "model.safetensors"
    tensors = load_file(path)
    matrices = [name for name in tensors if any(f".{part}.weight" in name for part in MATRICES)]
    before = {name: tensors[name].bfloat16() for name in matrices}
    after = {name: rounded(tensor) for name, tensor in before.items()}
    assert not any(torch.equal(before[name], after[name]) for name in matrices)
    save_file(tensors | after, path, {"format": "pt"})
    other = load_engine(EngineConfig(str(model), "none", "bfloat16", "cpu"))
    assert [answer.tokens for answer in answer_all(other, prompts, [greedy_params(24, "off")] * 4)] == answers[0]


def test_pages_that_are_rounded_change_no_token_with_drafts_or_batch(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", "qwen3")
    adapter = tiny_adapter(tmp_path / "adapter", model, rank=16)
    lines: list[str] = []
    config = EngineConfig(str(model), str(adapter), "bfloat16", "cpu", kv_dtype="float8")
    engine = load_engine(config, lines.append)
    assert engine.info.exact
    assert engine.info.arithmetic.endswith(", float8 K/V")
    assert any("float8 K/V saves no memory here: it is rounded and kept in bfloat16" in line for line in lines)
    assert "K/V in float8" in lines[-1]
    prompts = [tuple(range(5 + i, 30 + 3 * i)) for i in range(6)]
    for rule in (greedy_params, sampled_params):
        ways = decode_ways(engine, prompts, lambda mode, rule=rule: rule(40, mode), len(prompts))
        assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
    cache = engine._runner.cache
    assert torch.equal(rounded(cache.values[:, 1:]), cache.values[:, 1:])
    assert torch.equal(rounded(cache.keys[:, 1:].transpose(-1, -2)), cache.keys[:, 1:].transpose(-1, -2))
    other = load_engine(replace(config, kv_dtype="model"))
    decode_ways(other, prompts, lambda mode: greedy_params(40, mode), len(prompts))
    assert not torch.equal(rounded(other._runner.cache.values[:, 1:]), other._runner.cache.values[:, 1:])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_products_that_are_not_exact_have_no_float8():
    config = EngineConfig(dtype="float8", exact=False)
    device = torch.device("meta")
    with pytest.raises(ConfigError, match="--no-exact multiplies by torch's products, which have no float8"):
        ops_choice.ops_for(config, model_config(), torch.bfloat16, device, lambda line: None)
    exact = ops_choice.ops_for(replace(config, exact=True), model_config(), torch.bfloat16, device, lambda line: None)
    assert exact.pack(torch.ones(16, 32)).dtype == FLOAT8
    assert exact.pack_head(torch.ones(16, 32)).dtype == torch.float32


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_gpu_that_has_none_rounds_and_says_so(monkeypatch):
    from tidar_core.kernels import triton_ops

    monkeypatch.setattr(triton_ops, "tiles_of", lambda device, dtype: {})
    monkeypatch.setattr(triton_ops, "programs_at_once", lambda device: 1)
    config, dtype, lines = EngineConfig(dtype="float8", kv_dtype="float8"), torch.bfloat16, []
    weight = torch.randn(16, 32, dtype=dtype)
    for capability, in_8_bits in (((8, 9), True), ((8, 6), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=capability: here)
        made = ops_choice.ops_for(config, model_config(), dtype, torch.device("cuda"), lines.append)
        ops, pages = ops_choice.in_8_bits(config, made, dtype, lines.append)
        assert pages == (FLOAT8 if in_8_bits else dtype)
        assert torch.equal(ops.pack(weight).float(), packed(weight).float() if in_8_bits else rounded(weight).float())
        said = [] if in_8_bits else ["float8 saves no memory and no time", "float8 K/V saves no memory"]
        assert [line.partition(" here: ")[0] for line in lines] == said


def test_without_triton_it_is_computed_as_bfloat16(monkeypatch):
    monkeypatch.setitem(sys.modules, "tidar_core.kernels.triton_ops", None)
    monkeypatch.delattr("tidar_core.kernels.triton_ops", raising=False)
    lines: list[str] = []
    ops = ops_choice.ops_for(
        EngineConfig(dtype="float8"), model_config(), torch.bfloat16, torch.device("meta"), lines.append
    )
    assert ops is ops_choice.REFERENCE_OPS
    assert "triton is not installed" in lines[0]
