"""The kernels for mixtures of experts against their oracle, as in `kernel_checks.py`; made-up experts where a model has
none."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tidar_core.bench.checking import ALLOWED, Check, Sizes, relative_error
from tidar_core.config import Experts, ModelConfig
from tidar_core.kernels import reference
from tidar_core.kernels.experts import Routed, choose
from tidar_core.kernels.ops import Ops
from tidar_core.kernels.triton_ops import has_float8
from tidar_core.model.float8 import packed, rounded
from tidar_core.model.mixtures import router_rows


def check_experts(
    ops: Ops, config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Iterator[Check]:
    """Rows routed in both ways, and mixed: the numbers, and a row's bits among other rows."""
    experts = config.experts or Experts(sizes.experts, 4, 3 * config.hidden_size // 8, ())
    plain = replace(experts, scores="softmax", renormalised=False, biased=False, shared_gated=True)
    biased = replace(experts, scores="sigmoid", renormalised=True, biased=True, scale=1.5, shared_gated=False)
    for kind in (plain, biased):
        yield from _check_route(ops, kind, config.hidden_size, dtype, device)
    yield from _check_mixing(ops, biased, config.hidden_size, dtype, device, sizes)


def _check_route(ops: Ops, kind: Experts, hidden: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    name, case = str(dtype)[6:], f"{kind.scores}, 7 rows"
    x = torch.randn(7, hidden, dtype=dtype, device=device)
    router = torch.randn(router_rows(kind), hidden, dtype=dtype, device=device) * hidden**-0.5
    bias = torch.rand(kind.count, device=device) if kind.biased else None

    def numbers(routed: Routed) -> Tensor:
        """The share of every expert, and of the MLP for all rows."""
        shares = torch.zeros(len(routed.shares), kind.count, device=device).scatter(1, routed.experts, routed.shares)
        return shares if routed.shared is None else torch.cat((shares, routed.shared), dim=1)

    found = ops.route(x, router, bias, kind)
    error = relative_error(numbers(found), numbers(reference.route(x, router, bias, kind)))
    yield Check("route", case, name, error, ALLOWED[torch.float32])
    alone = ops.route(x[3:4].clone(), router, bias, kind)
    same = torch.equal(numbers(alone), numbers(found)[3:4]) and torch.equal(alone.experts, found.experts[3:4])
    yield Check("route", f"{kind.scores}, bits of a row alone", name, float(not same), 0.0)


def _check_mixing(
    ops: Ops, kind: Experts, hidden: int, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Iterator[Check]:
    name, count = str(dtype)[6:], max(sizes.rows)
    x = torch.randn(count, hidden, dtype=dtype, device=device)
    gate_up, down = (
        torch.randn(kind.count, outs, ins, dtype=dtype, device=device) * ins**-0.5
        for outs, ins in ((2 * kind.inner, hidden), (hidden, kind.inner))
    )
    routed = choose(torch.randn(count, kind.count, device=device), None, kind)
    ways = [("mix_experts", (gate_up, down), (gate_up, down))]
    if dtype.itemsize == 2 and has_float8(device):
        ways.append(("mix_experts, 8 bits", (packed(gate_up), packed(down)), (rounded(gate_up), rounded(down))))
    for kernel, (first, second), meant in ways:
        whole = ops.mix_experts(x, routed, first, second, "silu")
        wide_first, wide_second = (some.double() for some in meant)
        expected = reference.REFERENCE_OPS.mix_experts(x.double(), routed, wide_first, wide_second, "silu")
        yield Check(kernel, f"{count} rows", name, relative_error(whole, expected), ALLOWED[dtype])
        same = True
        for rows in sizes.rows:
            start = 7 * rows % (count - rows + 1)
            some = slice(start, start + rows)
            own = Routed(routed.experts[some].clone(), routed.shares[some].clone(), None)
            same = same and torch.equal(ops.mix_experts(x[some].clone(), own, first, second, "silu"), whole[some])
        yield Check(kernel, f"bits at {sizes.rows} rows", name, float(not same), 0.0)
