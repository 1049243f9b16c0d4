"""Base matrices in 8 bits: the product as it is defined, a row's bits its own, no token changed by drafts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.test_kernels import model_config
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.exact import compare_ways, decode_ways, greedy_params, sampled_params
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.kernels.cpu import CompileError, cpu_ops
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank


def int8_ops(dtype: torch.dtype) -> Ops:
    try:
        return cpu_ops(model_config(), dtype, int8=True)
    except CompileError as error:
        pytest.skip(f"no compiled CPU kernels here: {error}")


def whole_numbers(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] as whole numbers from -127 to 127, and a scale for each group of inputs [rows, groups]."""
    groups = x.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(dim=2) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (groups * inverse[..., None]).round().clamp(-127, 127), scales


def defined_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the product is by definition, in fp64: whole numbers times whole numbers, times both scales."""
    group = next(size for size in (64, 32, 16) if x.shape[1] % size == 0)
    rows, row_scales = whole_numbers(x, group)
    outputs, scales = whole_numbers(weight, weight.shape[1])
    sums = torch.einsum("rgk,ogk->rog", rows.double(), outputs.double().view(len(weight), -1, group))
    return (sums * row_scales.double()[:, None]).sum(2) * scales.double().flatten()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 12, 13, 40]),
    columns=st.sampled_from([48, 64, 96, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_the_product_is_what_its_definition_says(rows, columns, dtype, size, seed):
    ops = int8_ops(dtype)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator) * size).to(dtype)
    x[:, :16] *= 30  # some inputs are much larger than the others, as in real models
    x[-1, -16:] = 0
    weight = torch.randn(160, columns, generator=generator).to(dtype)
    weight[3] = 0
    found, expected = ops.head(x, ops.pack(weight)), defined_product(x, weight)
    assert ((found - expected).abs().max() / expected.abs().max()) < 2e-6
    near = REFERENCE_OPS.linear(x.double(), weight.double(), None, None, rows)
    assert ((found - near).abs().max() / near.abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_apart_and_the_adapter_is_not_rounded(dtype):
    ops = int8_ops(dtype)
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    x, weight, bias, low_rank = random(100, 64), random(320, 64), random(320), LowRank(random(32, 64), random(320, 32))
    packed, adapter = ops.pack(weight), LowRank(ops.pack_adapter(low_rank.a), ops.pack_adapter(low_rank.b))
    whole = ops.linear(x, packed, bias, adapter, 60)
    expected = defined_product(x, weight) + bias.double()
    expected[60:] += x[60:].double() @ low_rank.a.double().t() @ low_rank.b.double().t()
    assert ((whole - expected).abs().max() / expected.abs().max()) < (1e-6 if dtype is torch.float32 else 1e-2)
    for row in (0, 37, 59, 60, 99):
        alone = ops.linear(x[row : row + 1].contiguous(), packed, bias, adapter, 1 if row < 60 else 0)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(bad):
    ops = int8_ops(torch.bfloat16)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 5] = bad
    logits = ops.head(x, ops.pack(torch.ones(32, 64, dtype=torch.bfloat16)))
    assert logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


def test_drafts_and_batch_change_no_token(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    config = EngineConfig(
        str(model), str(tiny_adapter(tmp_path / "adapter", model, rank=16)), dtype="int8", device="cpu"
    )
    engine = load_engine(config)
    assert engine.info.exact
    assert engine.info.dtype == "int8"
    prompts = [tuple(range(5 + i, 30 + 3 * i)) for i in range(6)]
    for rule in (greedy_params, sampled_params):
        ways = decode_ways(engine, prompts, lambda mode, rule=rule: rule(40, mode), len(prompts))
        assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
    other = load_engine(replace(config, dtype="bfloat16"))
    assert other.info.arithmetic != engine.info.arithmetic


def test_where_it_cannot_be_it_is_said(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", hidden=60)
    with pytest.raises(ConfigError, match="the int8 kernels do not fit this model's sizes: use --dtype bfloat16"):
        load_engine(EngineConfig(str(model), "none", dtype="int8", device="cpu"))
