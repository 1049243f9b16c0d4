"""What checks of kernels are made of: their outcome, their sizes, and steps with pages to run kernels on."""

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tidar_core.config import ModelConfig
from tidar_core.engine.batch import build_batch, inputs_of
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import KVCache, StepRows, empty_cache
from tidar_core.layout import BlockForm, Shape
from tidar_core.model.float8 import to_float8
from tidar_core.request import Request, SamplingParams, page_numbers
from tidar_core.request import Sequence as EngineSequence

MESSAGE_CHARACTERS = 400  # characters of what raised
ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. error: max|Δ| / max|oracle|; 0 or 1 where bits or tokens are equal or not."""

    kernel: str
    case: str
    dtype: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN never passes

    def as_record(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


T = TypeVar("T")


def each_or_failed(name: str, dtype: torch.dtype, items: Iterator[T]) -> Iterator[T | Check]:
    """The checks or measures of `items` until one raises. That one becomes a failed check, whose case is the end of its
    message; the traceback goes to stderr. AcceleratorError is raised on: after it a device computes nothing any
    more."""
    try:
        yield from items
    except torch.AcceleratorError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        yield Check(name, f"{type(error).__name__}: {str(error)[-MESSAGE_CHARACTERS:]}", str(dtype)[6:], math.nan, 0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that are checked: contexts of sequences, row counts of products, rank of the adapter, block length, and
    the number of experts for models without any."""

    contexts: tuple[int, ...] = (1, 16, 129, 511, 1030, 4000)
    rows: tuple[int, ...] = (1, 3, 64, 65, 300)
    rank: int = 32
    block: int = 8
    page_size: int = 16
    experts: int = 60


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|Δ| / max|expected|; NaN where either has one."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def step_rows(contexts: Sequence[int], shape: Shape, page_size: int, device: torch.device) -> tuple[StepRows, int]:
    """One step of sequences with contexts[i] committed positions each, all in the same shape, on pages of their own,
    scattered; and the number of pages with the trash page."""
    counts = [-(-(context + shape.verify_rows + shape.block) // page_size) for context in contexts]
    order = (1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))).tolist()
    plans, taken = [], 0
    for context, count in zip(contexts, counts, strict=True):
        request = Request("bench", (1,), SamplingParams(max_tokens=1))
        sequence = EngineSequence(request, 0.0, [], pages=page_numbers(order[taken : taken + count]))
        plans.append(SequencePlan(sequence, context, (1,), (1,) * shape.drafts, shape, emits=True))
        taken += count
    batch = build_batch(plans, page_size, lambda size: size, BlockForm())
    return inputs_of(batch.numbers.to(device), batch.size).rows, taken + 1


def random_cache(
    config: ModelConfig, layers: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    cache = empty_cache(replace(config, layers=layers), pages, page_size, dtype, device)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def in_8_bits(cache: KVCache) -> KVCache:
    """Pages as the kernels keep them in 8 bits."""
    keys, key_scales = to_float8(cache.keys.transpose(-1, -2))
    values, value_scales = to_float8(cache.values)
    return KVCache(keys.transpose(-1, -2).contiguous(), values, key_scales, value_scales, cache.windows)


def numbers_of(cache: KVCache, dtype: torch.dtype) -> KVCache:
    """The numbers that pages in 8 bits stand for."""
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    keys = cache.keys.float() * cache.key_scales[..., None, :]
    values = (cache.values.float() * cache.value_scales[..., None]).to(dtype)
    return KVCache(keys.to(dtype), values, windows=cache.windows)


def some_rows(rows: StepRows, some: slice) -> StepRows:
    """A step of some rows of another step: verify rows, or all of its mask rows."""
    names = ("positions", "sequence", "context_end", "tail_start", "tail_end")
    columns = {name: getattr(rows, name)[some].clone() for name in names}
    slots = rows.write_slots[some].clone()
    return replace(rows, verify=len(slots), **columns, write_slots=slots)
