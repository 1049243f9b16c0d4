"""The products of a layer with what they do besides: the numbers, and a row's bits among other rows."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.bench.checking import (
    ALLOWED,
    Check,
    Sizes,
    random_cache,
    relative_error,
    some_rows,
    step_rows,
)
from tidar_core.bench.shapes import projections
from tidar_core.config import ModelConfig
from tidar_core.kernels import reference
from tidar_core.kernels.ops import KVCache, StepRows, rotary_tables
from tidar_core.kernels.triton_gemm import PlanProduct, product_planner
from tidar_core.kernels.triton_layers import Normed, added_linear, gated_linear, rotated_linear
from tidar_core.kernels.triton_ops import tiles_of
from tidar_core.layout import full_shape
from tidar_core.model.weights import LowRank


@dataclass(frozen=True, slots=True)
class _Case:
    """A step of a layer: what its products are made for, and the rows that they get. pages: that its cache needs."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    sizes: Sizes
    plan: PlanProduct
    step: StepRows
    pages: int

    @property
    def rows(self) -> int:
        return len(self.step.positions)

    @property
    def first_mask_row(self) -> int:
        return self.step.verify

    @property
    def alone(self) -> tuple[int, int]:
        """The rows that are computed by themselves as well: one that is verified, and a mask row."""
        return self.first_mask_row // 2, self.rows - 1

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device) * shape[-1] ** -0.5

    def checks(self, kernel: str, parts: dict[str, tuple[Tensor, Tensor]], same: bool) -> Iterator[Check]:
        """Each part of what came beside what was expected; same: whether the rows alone had the same bits."""
        name = str(self.dtype)[6:]
        for part, (actual, expected) in parts.items():
            error = relative_error(actual, expected)
            yield Check(kernel, f"{self.rows} rows{part}", name, error, ALLOWED[self.dtype])
        yield Check(kernel, "bits of a row alone", name, float(not same), 0.0)


@dataclass(frozen=True, slots=True)
class _Product:
    """A projection's weight, its bias, and the adapter's part."""

    weight: Tensor
    bias: Tensor
    low_rank: LowRank

    def expected(self, x: Tensor, first_mask_row: int) -> Tensor:
        """In float64, for rows x [rows, ins] of any dtype."""
        low_rank = LowRank(self.low_rank.a.double(), self.low_rank.b.double())
        return reference.linear(x.double(), self.weight.double(), self.bias.double(), low_rank, first_mask_row)


def check_layers(config: ModelConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """The products of one layer at a model's shape, with an adapter, on fresh random inputs."""
    step, pages = step_rows(sizes.contexts, full_shape(sizes.block, sizes.block - 1), sizes.page_size, device)
    case = _Case(config, dtype, device, sizes, product_planner(tiles_of(device, dtype)), step, pages)
    residual = 3 * torch.randn(case.rows, config.hidden_size, dtype=dtype, device=device)
    norm = torch.rand(config.hidden_size, dtype=dtype, device=device)
    for projection in ("o", "down"):
        normed = yield from _check_added(case, projection, residual, norm)
    # What the last of these left is what the other two read.
    yield from _check_gated(case, normed)
    yield from _check_rotated(case, normed)


def _product(case: _Case, projection: str) -> _Product:
    outs, ins = projections(case.config)[projection]
    weight, bias = case.random(outs, ins), case.random(1, outs)[0]
    return _Product(weight, bias, LowRank(case.random(case.sizes.rank, ins), case.random(outs, case.sizes.rank)))


def _one(normed: Normed, row: int) -> Normed:
    """A row alone, at an address of its own."""
    return Normed(normed.x[row : row + 1].clone(), normed.squares[row : row + 1].clone())


def _whole(case: _Case, normed: Normed) -> Tensor:
    """What the product behind the norm is to read, in float64."""
    scale = torch.rsqrt(normed.squares.double().sum(1, keepdim=True) / case.config.hidden_size + case.config.norm_eps)
    return normed.x.double() * scale


def _check_added(case: _Case, projection: str, residual: Tensor, norm: Tensor) -> Generator[Check, None, Normed]:
    """The product that is added to the residual, and the norm behind it; gives what that leaves."""
    product, first = _product(case, projection), case.first_mask_row
    x = torch.randn(case.rows, product.weight.shape[1], dtype=case.dtype, device=case.device)

    def added(x: Tensor, first_mask_row: int, total: Tensor) -> Normed:
        return added_linear(case.plan, x, product.weight, product.bias, product.low_rank, first_mask_row, total, norm)

    total = residual.clone()
    normed = added(x, first, total)
    same = True
    for row in case.alone:
        own = residual[row : row + 1].clone()
        alone, among = added(x[row : row + 1].clone(), int(row < first), own), _one(normed, row)
        same = same and torch.equal(own, total[row : row + 1])
        same = same and torch.equal(alone.x, among.x) and torch.equal(alone.squares, among.squares)
    y = product.expected(x, first)
    expected, expected_total = reference.add_norm(y, residual.double(), norm.double(), case.config.norm_eps)
    found = {", sum": (total, expected_total), "": (_whole(case, normed), expected)}
    yield from case.checks(f"added {projection}", found, same)
    return normed


def _check_gated(case: _Case, normed: Normed) -> Iterator[Check]:
    product, first = _product(case, "gate_up"), case.first_mask_row

    def gated(rows: Normed, first_mask_row: int) -> Tensor:
        return gated_linear(
            case.plan, rows, product.weight, product.bias, product.low_rank, first_mask_row, case.config.norm_eps
        )

    together = gated(normed, first)
    same = all(torch.equal(gated(_one(normed, row), int(row < first))[0], together[row]) for row in case.alone)
    expected = reference.gate(product.expected(_whole(case, normed), first), "silu")
    yield from case.checks("gated", {"": (together, expected)}, same)


def _check_rotated(case: _Case, normed: Normed) -> Iterator[Check]:
    """The product whose keys and values go to pages: those of a row alone are the same as well."""
    product, config = _product(case, "qkv"), case.config
    cache = random_cache(config, 2, case.pages, case.sizes.page_size, case.dtype, case.device)
    rotary = rotary_tables(config, case.device)
    wide_cache = KVCache(cache.keys.double(), cache.values.double())

    def rotated(rows: Normed, step: StepRows) -> Tensor:
        return rotated_linear(
            case.plan, rows, product.weight, product.bias, product.low_rank, config.norm_eps, step, rotary, cache, 1
        )

    together = rotated(normed, case.step)
    y = product.expected(_whole(case, normed), case.first_mask_row)
    expected = reference.rotate_and_store(y, case.step, rotary, wide_cache, 1, None)
    row, kept = case.alone[0], KVCache(cache.keys.clone(), cache.values.clone())
    again = rotated(_one(normed, row), some_rows(case.step, slice(row, row + 1)))[0]
    same = (
        torch.equal(again, together[row])
        and torch.equal(cache.keys, kept.keys)
        and torch.equal(cache.values, kept.values)
    )
    found = {
        "": (together, expected),
        ", keys": (cache.keys, wide_cache.keys),
        ", values": (cache.values, wide_cache.values),
    }
    yield from case.checks("rotated", found, same)
