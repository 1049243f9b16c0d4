"""Base matrices in 8 and 4 bits: the product as it is defined, a row's bits its own, no token changed by drafts."""

import re
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidar_core.kernels.processors import PROCESSORS, ops_for
from tests.tidar_core.kernels.test_kernels import model_config
from tests.tidar_core.ways import decode_ways
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.exact import compare_ways, greedy_params, sampled_params
from tidar_core.config import ConfigError, EngineConfig, RoundedDType
from tidar_core.engine import load_engine
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank

Q4_1 = GGMLQuantizationType.Q4_1


def rounded_ops(dtype: torch.dtype, kind: RoundedDType, processor: str = "native") -> Ops:
    return ops_for(processor, model_config(), dtype, kind)


def whole_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] as whole numbers from -127 to 127, and a scale for each group of inputs [rows, groups]."""
    groups = x.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(dim=2) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (groups * inverse[..., None]).round().clamp(-127, 127), scales


def kept_weights(weight: torch.Tensor, kind: RoundedDType) -> torch.Tensor:
    """What is left of a matrix [out, in] once it is kept in fewer bits, in fp64."""
    if kind == "int8":
        whole, scales = whole_rows(weight, weight.shape[1])
        return (whole.double() * scales.double()[..., None]).flatten(1)
    groups = weight.float().unflatten(1, (-1, 32))
    least = groups.amin(dim=2, keepdim=True).half()
    step = ((groups.amax(dim=2, keepdim=True) - least.float()) / 15).half().float()
    whole = torch.where(step > 0, (groups - least.float()) / step, 0.0).round().clamp(0, 15)
    return (whole.double() * step.double() + least.double()).flatten(1)


def defined_product(x: torch.Tensor, weight: torch.Tensor, kind: RoundedDType) -> torch.Tensor:
    """What the product is by definition, in fp64: the rounded rows times the weights as they are kept."""
    rows, scales = whole_rows(x, group_of(x.shape[1], kind))
    return (rows.double() * scales.double()[..., None]).flatten(1) @ kept_weights(weight, kind).t()


def group_of(columns: int, kind: RoundedDType) -> int:
    """Inputs of a row that share a scale."""
    return 32 if kind == "int4" else next(size for size in (64, 32, 16) if columns % size == 0)


def most_off(x: torch.Tensor, weight: torch.Tensor, kind: RoundedDType) -> torch.Tensor:
    """How far rounding by at most half a step, of rows and of weights, can take the product from the exact one."""
    group = group_of(x.shape[1], kind)
    off_x = x.double().unflatten(1, (-1, group)).abs().amax(dim=2).repeat_interleave(group, 1) / 254
    if kind == "int8":
        off_weight = (weight.double().abs().amax(dim=1, keepdim=True) / 254).expand_as(weight)
    else:  # half of a fifteenth of what the group spans, and what fp16 takes from its step and its minimum
        groups = weight.double().unflatten(1, (-1, 32))
        least, span = groups.amin(dim=2), groups.amax(dim=2) - groups.amin(dim=2)
        off_weight = (span / 30 + 2**-10 * (span + least.abs())).repeat_interleave(32, 1)
    return off_x @ weight.double().abs().t() + (x.double().abs() + off_x) @ off_weight.t()


def product_alone(ops: Ops, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, ops.pack(weight), None, None, len(x))


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 12, 13, 40]),
    columns=st.sampled_from([48, 64, 96, 576]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_the_product_is_what_its_definition_says(kind, processor, rows, columns, size, seed):
    ops = rounded_ops(torch.float32, kind, processor)
    columns = columns if kind == "int8" else columns // 32 * 32
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * size
    x[:, :16] *= 30  # some inputs are much larger than the others, as in real models
    x[-1, -16:] = 0
    weight = torch.randn(160, columns, generator=generator)
    weight[3] = 0
    weight[4] = 0.25
    weight[5] += 5
    found, expected = product_alone(ops, x, weight), defined_product(x, weight, kind)
    assert ((found - expected).abs().max() / expected.abs().max()) < 4e-6
    near = REFERENCE_OPS.linear(x.double(), weight.double(), None, None, rows)
    assert ((found - near).abs() <= 1.001 * most_off(x, weight, kind)).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_head_is_kept_in_eight_bits(kind):
    ops = rounded_ops(torch.bfloat16, kind)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(count, 96, generator=generator).to(torch.bfloat16) for count in (5, 160))
    found, expected = ops.head(x, ops.pack_head(weight)), defined_product(x, weight, "int8")
    assert ((found - expected).abs().max() / expected.abs().max()) < 2e-6


def test_weights_of_a_four_bit_file_keep_its_numbers():
    """What Q4_1 stores comes out within the rounding to bf16 that the loader does anyway."""
    generator = torch.Generator().manual_seed(2)
    stored = dequantize(quantize(torch.randn(64, 96, generator=generator).numpy(), Q4_1), Q4_1)
    weight = torch.from_numpy(stored).to(torch.bfloat16)
    near = (kept_weights(weight, "int4") - torch.from_numpy(stored)).abs()
    assert near.max() < 2**-7 * weight.abs().max()
    ops = rounded_ops(torch.float32, "int4")
    ones = torch.eye(96)  # rounds to itself
    assert torch.allclose(
        product_alone(ops, ones, weight.float()).t().double(), kept_weights(weight, "int4"), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_rows_keep_apart_and_the_adapter_is_not_rounded(processor, dtype, kind):
    ops = rounded_ops(dtype, kind, processor)
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    x, weight, bias, low_rank = random(100, 64), random(320, 64), random(320), LowRank(random(32, 64), random(320, 32))
    packed, adapter = ops.pack(weight), LowRank(ops.pack_adapter(low_rank.a), ops.pack_adapter(low_rank.b))
    whole = ops.linear(x, packed, bias, adapter, 60)
    expected = defined_product(x, weight, kind) + bias.double()
    expected[60:] += x[60:].double() @ low_rank.a.double().t() @ low_rank.b.double().t()
    assert ((whole - expected).abs().max() / expected.abs().max()) < (1e-6 if dtype is torch.float32 else 1e-2)
    for row in (0, 37, 59, 60, 99):
        alone = ops.linear(x[row : row + 1].contiguous(), packed, bias, adapter, 1 if row < 60 else 0)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_what_is_not_finite_shows(processor, bad, kind):
    ops = rounded_ops(torch.bfloat16, kind, processor)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 5] = bad
    y = product_alone(ops, x, torch.ones(32, 64, dtype=torch.bfloat16))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_drafts_and_batch_change_no_token(tmp_path, kind):
    model = tiny_checkpoint(tmp_path / "model")
    config = EngineConfig(str(model), str(tiny_adapter(tmp_path / "adapter", model, rank=16)), dtype=kind, device="cpu")
    engine = load_engine(config)
    assert engine.info.exact
    assert engine.info.dtype == kind
    prompts = [tuple(range(5 + i, 30 + 3 * i)) for i in range(6)]
    for rule in (greedy_params, sampled_params):
        ways = decode_ways(engine, prompts, lambda mode, rule=rule: rule(40, mode), len(prompts))
        assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
    other = load_engine(replace(config, dtype="bfloat16"))
    assert other.info.arithmetic != engine.info.arithmetic


@pytest.mark.parametrize(
    ("kind", "sizes", "line"),
    [
        ("int8", {"hidden": 60}, "the int8 kernels do not fit this model's sizes: use --dtype bfloat16"),
        ("int4", {"hidden": 60}, "the int4 kernels do not fit this model's sizes: use --dtype bfloat16"),
        (
            "int4",
            {"intermediate": 176},
            "int4 cannot be used here (int4 needs matrices whose sizes are multiples of 32)",
        ),
    ],
)
def test_where_it_cannot_be_it_is_said(tmp_path, kind, sizes, line):
    model = tiny_checkpoint(tmp_path / "model", **sizes)
    with pytest.raises(ConfigError, match=re.escape(line)):
        load_engine(EngineConfig(str(model), "none", dtype=kind, device="cpu"))
