"""All layers as one call give the bits that they give one by one."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.tidar_core.engines import tiny_engine
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.config import EngineConfig
from tidar_core.engine import load_engine
from tidar_core.engine.warmup import _plan, with_own_pages
from tidar_core.kernels.ops import rotary_tables
from tidar_core.layout import Shape, full_shape
from tidar_core.model.decoder import all_layers

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
SHAPES = {"a long prompt": (70, 90, Shape()), "one row": (101, 1, Shape()), "drafts": (101, 1, full_shape(4, 3))}


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {"bias": True}),
        ("llama", {"tied": False, "heads": 3, "kv_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("smollm3", {}),
        ("cwm", {}),
        ("gemma", {}),
    ],
)
def test_one_call_is_all_layers(tmp_path, architecture, more, dtype):
    model = tiny_checkpoint(tmp_path / "model", architecture, **more)
    adapter = tiny_adapter(tmp_path / "adapter", model, rank=16)
    engine = load_engine(EngineConfig(str(model), str(adapter), dtype, "cpu"))
    runner = with_own_pages(engine._runner)
    assert runner.ops.bind_layers is not None, "a compiler is there, and its kernels are not"
    rotary = rotary_tables(runner.config, runner.device)
    apart = all_layers(replace(runner.ops, bind_layers=None), runner.config, runner.weights, runner.adapter, rotary)
    generator = torch.Generator().manual_seed(1)
    for tensor in (runner.cache.keys, runner.cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    cache = replace(runner.cache, keys=runner.cache.keys.clone(), values=runner.cache.values.clone())
    tokens = [(13 * i + 5) % 500 for i in range(200)]
    for start, known, shape in SHAPES.values():
        plan = _plan(tokens, start, known, shape.drafts, shape, list(range(1, 15)))
        batch = runner.batch([plan])
        together = runner.forward(batch)
        one_by_one = replace(runner, cache=cache, layers=apart).forward(batch)
        assert torch.equal(together, one_by_one)
        assert torch.equal(runner.cache.keys, cache.keys)
        assert torch.equal(runner.cache.values, cache.values)


@needs_compiler
def test_an_adapter_that_cannot_be_packed_runs_one_by_one(tmp_path):
    engine = tiny_engine(tmp_path, rank=4)
    runner = engine._runner
    assert runner.ops.bind_layers is not None, "a compiler is there, and its kernels are not"
    assert runner.ops.bind_layers(runner.weights, runner.adapter, rotary_tables(runner.config, runner.device)) is None
