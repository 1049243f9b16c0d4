"""The Triton kernels for mixtures of experts against the reference, interpreted. Run by `test_triton_interpreted.py`,
in a process where TRITON_INTERPRET=1 was set before triton was imported."""

import pytest
import torch

from tests.tidar_core.kernels.test_kernels import model_config
from tidar_core.config import Experts
from tidar_core.kernels import triton_experts
from tidar_core.kernels.experts import Routed, choose
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.kernels.triton_experts import expert_tiles, route
from tidar_core.kernels.triton_ops import triton_ops
from tidar_core.model.float8 import FLOAT8, packed, rounded
from tidar_core.model.mixtures import router_rows

pytest_plugins = "tests.tidar_core.kernels.interpreter"
pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
HIDDEN, INNER = 72, 40  # whole tiles of neither
KINDS = {
    "softmax": Experts(8, 3, INNER, ()),
    "softmax, whole scores, a gated shared MLP": Experts(60, 4, INNER, (), renormalised=False, shared_gated=True),
    "sigmoid, biased, scaled": Experts(13, 6, INNER, (), "sigmoid", biased=True, scale=1.5),
    "sigmoid, one, of all": Experts(1, 1, INNER, (), "sigmoid", renormalised=False),
    "all of a few": Experts(4, 4, INNER, (), scale=0.5),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error <= TOLERANCE[dtype], float(error)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_rows_go_where_the_reference_sends_them(kind, dtype, dots_row_by_row):
    ops = triton_ops(model_config(), dtype, CPU)
    x, router = (9 * random(11, HIDDEN)).to(dtype), random(router_rows(kind), HIDDEN, seed=1).to(dtype)
    bias = random(1, kind.count, seed=2)[0] if kind.biased else None
    expected, found = REFERENCE_OPS.route(x, router, bias, kind), ops.route(x, router, bias, kind)
    assert torch.equal(found.experts, expected.experts)
    close(found.shares, expected.shares, torch.float32)
    assert (found.shared is None) == (expected.shared is None) == (not kind.shared_gated)
    alone = ops.route(x[7:8].clone(), router, bias, kind)
    assert torch.equal(alone.experts, found.experts[7:8])
    assert torch.equal(alone.shares, found.shares[7:8])
    if found.shared is not None and expected.shared is not None and alone.shared is not None:
        close(found.shared, expected.shared, torch.float32)
        assert torch.equal(alone.shared, found.shared[7:8])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_ties_and_what_is_not_a_number_have_an_order(kind):
    """Of equal ones the first; a NaN before all, and whatever there is, as many different experts as ever."""
    logits = 3 * random(7, router_rows(kind))
    logits[0] = 0.5
    logits[1] = logits[1].round()
    logits[2] = torch.nan
    logits[3, kind.count // 2] = torch.nan
    logits[4, kind.count - 1] = torch.inf
    logits[5] = -torch.inf
    logits[6, 1:] = -torch.inf
    bias = torch.zeros(kind.count) if kind.biased else None
    found, expected = route(lambda x, router: logits, False, logits, logits, bias, kind), choose(logits, bias, kind)
    assert torch.equal(found.experts, expected.experts)
    bad = expected.shares.isnan().any(dim=1)
    assert torch.equal(found.shares.isnan().any(dim=1), bad)
    close(found.shares[~bad], expected.shares[~bad], torch.float32)


def routed(rows: int, kind: Experts, among: int) -> Routed:
    """Random experts among the last ones of all."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, among, generator=generator)
    experts = scores.topk(kind.chosen).indices + kind.count - among
    return Routed(experts, torch.rand(rows, kind.chosen, generator=generator), None)


CASES = {
    "one row": (1, Experts(60, 2, INNER, ()), 60, "silu"),
    "few rows at each, no list": (5, Experts(7, 3, INNER, ()), 7, "gelu_tanh"),
    "as many entries as a tile of fp32 holds, at fewer experts": (8, Experts(3, 2, INNER, ()), 3, "silu"),
    "few rows at each": (23, Experts(7, 3, INNER, ()), 7, "gelu_tanh"),
    "all rows to the last": (70, Experts(3, 1, INNER, ()), 1, "silu"),
    "more rows than a tile, some experts without": (24, Experts(5, 2, INNER, ()), 2, "silu"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_experts_are_mixed_as_by_the_reference(case, dtype, monkeypatch):
    """Entries are listed part by part, as those of many rows are."""
    monkeypatch.setattr(triton_experts, "LISTED_TOGETHER", 16)
    rows, kind, among, activation = case
    ops, way = triton_ops(model_config(), dtype, CPU), routed(rows, kind, among)
    x = (9 * random(rows, HIDDEN)).to(dtype)
    gate_up = random(kind.count, 2 * INNER, HIDDEN, seed=1).to(dtype)
    down = random(kind.count, HIDDEN, INNER, seed=2).to(dtype)
    close(
        ops.mix_experts(x, way, gate_up, down, activation),
        REFERENCE_OPS.mix_experts(x, way, gate_up, down, activation),
        dtype,
    )
    assert ops.mix_experts(x[:0], Routed(way.experts[:0], way.shares[:0], None), gate_up, down, activation).shape == (
        0, HIDDEN,
    )  # fmt: skip


@pytest.mark.parametrize("in_8_bits", [False, True], ids=["", "8 bits"])
def test_a_row_has_the_same_bits_alone_and_among_others(in_8_bits, dtype, dots_row_by_row):
    """More rows than a tile has at one expert, one of them not a number; and the numbers that 8 bits stand for."""
    kind = Experts(3, 2, INNER, ())
    rows = expert_tiles(2 * INNER, HIDDEN, FLOAT8 if in_8_bits else dtype).rows + 3
    ops, way = triton_ops(model_config(), dtype, CPU, float8=in_8_bits), routed(rows, kind, 3)
    x = (9 * random(rows, HIDDEN)).to(dtype)
    x[4, 5] = torch.nan
    gate_up = random(kind.count, 2 * INNER, HIDDEN, seed=1).to(dtype)
    down = random(kind.count, HIDDEN, INNER, seed=2).to(dtype)
    meant = (rounded(gate_up), rounded(down)) if in_8_bits else (gate_up, down)
    gate_up, down = ops.pack(gate_up), ops.pack(down)
    together = ops.mix_experts(x, way, gate_up, down, "silu")
    expected = REFERENCE_OPS.mix_experts(x, way, *meant, "silu")
    assert together[4].isnan().all()
    others = torch.arange(rows) != 4
    close(together[others], expected[others], dtype)
    for row in (0, rows - 1):
        some = slice(row, row + 1)
        alone = Routed(way.experts[some].clone(), way.shares[some].clone(), None)
        assert torch.equal(ops.mix_experts(x[some].clone(), alone, gate_up, down, "silu"), together[some])


def test_experts_in_8_bits_have_their_scales_behind_all_of_them():
    values = packed(random(3, 4, 8))
    scales = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage())[3 * 4 * 8 :].view(torch.float32)
    assert torch.equal(values.float() * scales.view(3, 4, 1), rounded(random(3, 4, 8)))
