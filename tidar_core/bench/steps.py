"""`tidar bench steps`: what a step costs by its rows and its context, and how soon a long prompt is read.

Random weights at the shapes of real models, one CUDA graph a case: what is timed is the device. Up to 72 rows are one
sequence, 8 of them verified and the others mask rows in whole proposals, as the draft policy has them; more are several
such sequences. This is the paper's picture of free token slots (arXiv 2511.08923, section 1), on this GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidar_core.bench.checking import Check, each_or_failed, in_8_bits, random_cache, step_rows
from tidar_core.bench.measures import RANK, Extent, Subject, again, measure_ceilings, seconds_a_call
from tidar_core.bench.shapes import STEP_SHAPES, random_adapter, random_weights
from tidar_core.config import ConfigError, EngineConfig, ModelConfig
from tidar_core.engine.batch import build_batch, inputs_of
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.kernels.ops import KVCache, Layers, Ops, StepRows, rotary_tables
from tidar_core.kernels.rules import all_zero
from tidar_core.kernels.triton_gemm import PREFETCH_BYTES
from tidar_core.kernels.triton_ops import has_float8, triton_ops
from tidar_core.kernels.triton_sampling import pick_whole
from tidar_core.layout import BlockForm, Shape
from tidar_core.model.decoder import all_layers
from tidar_core.model.float8 import FLOAT8
from tidar_core.model.weights import ModelWeights, pack_model
from tidar_core.request import Request, SamplingParams, Sequence, page_numbers

BLOCK = 8
ADAPTER_ROWS = 64  # where the adapter's own share is measured


def _proposals(count: int) -> Shape:
    return Shape(7, tuple(range(1, count + 1)), BLOCK)


GRID: tuple[tuple[int, Shape], ...] = (
    (1, Shape()), (1, Shape(3)), (1, Shape(7)), (1, _proposals(1)), (1, _proposals(2)), (1, _proposals(3)),
    (1, _proposals(5)), (1, _proposals(7)), (2, _proposals(5)), (2, _proposals(7)), (3, _proposals(7)),
    (4, _proposals(8)),
)  # fmt: skip
"""Sequences and the shape of each: 1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192 and 288 rows."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """share: of the time that reading the weights once takes at the measured bandwidth. adapter: whether mask rows
    passed through one."""

    shape: str
    context: int
    rows: int
    verify: int
    mask: int
    adapter: bool
    microseconds: float
    share: float

    @property
    def summary(self) -> str:
        """One line for the log."""
        return f"{self.rows} rows, context {self.context}: {self.microseconds:.0f} µs, {self.share:.0%}"


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The time to read a prompt in chunks and pick the first token behind it."""

    shape: str
    tokens: int
    chunk: int
    milliseconds: float

    @property
    def summary(self) -> str:
        """One line for the log."""
        return f"{self.tokens} tokens of a prompt: {self.milliseconds:.1f} ms"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How products are made (`triton_ops`), and whether weights and K/V are in 8 bits."""

    exact: bool = True
    prefetch_bytes: int = PREFETCH_BYTES
    float8: bool = False


@dataclass(frozen=True, slots=True)
class _Model:
    """Random weights of a subject's shape."""

    ops: Ops
    config: ModelConfig
    weights: ModelWeights
    layers: Layers
    layers_drafting: Layers

    def bytes(self, rows: int) -> float:
        """Bytes of the weights that a step of `rows` rows reads; of the experts, as many as random rows go through."""
        experts = self.config.experts
        share = 1.0 if experts is None else 1 - (1 - experts.chosen / experts.count) ** rows
        head, layers = self.weights.head, self.weights.layers
        always = [m for layer in layers for m in (layer.qkv, layer.o, layer.router) if m is not None]
        inner = [m for layer in layers for m in (layer.gate_up, layer.down)]
        return sum(map(_bytes, (*always, head))) + share * sum(map(_bytes, inner))

    def whole_step(self, rows: StepRows, cache: KVCache, tokens: Tensor, drafting: bool) -> Tensor:
        """The greedy token of every verify row."""
        layers = self.layers_drafting if drafting else self.layers
        return self.greedy(layers(self.weights.embedding[tokens], rows, cache)[: rows.verify])

    def pages(self, count: int, page_size: int) -> KVCache:
        """Random pages of all layers, in 8 bits where the weights are."""
        like = self.weights.embedding
        cache = random_cache(self.config, self.config.layers, count, page_size, like.dtype, like.device)
        return in_8_bits(cache) if self.weights.layers[0].qkv.dtype == FLOAT8 else cache

    def greedy(self, hidden: Tensor) -> Tensor:
        return pick_whole(self.ops.head(hidden, self.weights.head), all_zero(len(hidden), hidden.device))


def _bytes(matrix: Tensor) -> int:
    return matrix.numel() * matrix.element_size()


def random_model(subject: Subject) -> _Model:
    """All layers of the subject's shape, and a drafter."""
    config, dtype, device = subject.config, subject.dtype, subject.device
    ops = subject.ops
    weights = pack_model(
        random_weights(config, config.layers, dtype, device), ops.pack, ops.pack_head, ops.pack_adapter
    )
    adapter = random_adapter(config, config.layers, RANK, BLOCK, dtype, device)
    alone, drafting = (
        all_layers(ops, config, weights, some, rotary_tables(config, device)) for some in (None, adapter)
    )
    return _Model(ops, config, weights, alone, drafting)


def measure_steps(
    subject: Subject, model: _Model, contexts: tuple[int, ...], grid: tuple[tuple[int, Shape], ...] = GRID
) -> Iterator[StepTime]:
    """Whole forward passes with head and argmax at each context that the model has room for."""
    config, device, page = subject.config, subject.device, subject.extent.page_size
    for context in contexts:
        if context + 2 * BLOCK > config.max_positions:
            continue
        for sequences, shape in grid:
            rows, pages = step_rows([context] * sequences, shape, page, device)
            cache = model.pages(pages, page)
            total = len(rows.positions)
            tokens = torch.randint(config.vocab_size, (total,), device=device)
            for drafting in (True, False) if total == ADAPTER_ROWS and shape.mask_rows else (shape.mask_rows > 0,):
                seconds = seconds_a_call(again(model.whole_step, rows, cache, tokens, drafting), 1, device)
                share = model.bytes(total) / subject.ceilings.read / seconds
                mask = total - rows.verify
                yield StepTime(subject.name, context, total, rows.verify, mask, drafting, 1e6 * seconds, share)
            del cache  # there is no room for it beside the next one


def measure_prefill(
    subject: Subject, model: _Model, lengths: tuple[int, ...], chunk: int = EngineConfig().known_rows
) -> Iterator[PrefillTime]:
    """Prompts of each length that the model has room for, read in chunks of as many rows as the engine reads a step;
    unlike the engine's, all of them are one graph."""
    config, device, page = subject.config, subject.device, subject.extent.page_size
    for length in lengths:
        if length > config.max_positions:
            continue
        pages = list(range(1, -(-length // page) + 1))
        cache = model.pages(len(pages) + 1, page)
        request = Request("bench", (1,), SamplingParams(max_tokens=1))
        steps = []
        for start in range(0, length, chunk):
            known = (1,) * min(chunk, length - start)
            plan = SequencePlan(
                Sequence(request, 0.0, [], pages=page_numbers(pages)), start, known, (), Shape(), emits=True
            )
            batch = build_batch([plan], page, lambda size: size, BlockForm())
            steps.append(inputs_of(batch.numbers.to(device), batch.size).rows)
        work = partial(_read_prompt, model, steps, cache, torch.ones(chunk, dtype=torch.int64, device=device))
        yield PrefillTime(subject.name, length, chunk, 1e3 * seconds_a_call(work, 1, device, 1))


def _read_prompt(model: _Model, steps: list[StepRows], cache: KVCache, tokens: Tensor, call: int) -> Tensor:
    hidden = tokens
    for rows in steps:
        hidden = model.layers(model.weights.embedding[tokens[: rows.verify]], rows, cache)
    return model.greedy(hidden[-1:])


@torch.inference_mode()
def run_step_bench(
    report: Callable[[str], None],
    shapes: tuple[str, ...],
    settings: StepSettings,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Steps and prompts at each shape as one record, each part as in `each_or_failed`; keep gets it after each case, as
    far as it is. Needs a GPU. Raises ConfigError where that has no float8."""
    device, extent = torch.device("cuda"), Extent()
    if settings.float8 and not settings.exact:
        raise ConfigError("torch's products have no float8: leave --float8 or --no-exact out")
    if settings.float8 and not has_float8(device):
        raise ConfigError("the kernels have no float8 on this GPU: leave --float8 out")
    ceilings = measure_ceilings(device, extent)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device), **asdict(settings),
        "ceilings": asdict(ceilings), "checks": [], "steps": [], "prefill": [],
    }  # fmt: skip
    for name in shapes:
        config = STEP_SHAPES[name]
        ops = triton_ops(config, torch.bfloat16, device, **asdict(settings))
        subject = Subject(name, config, ops, torch.bfloat16, device, ceilings, extent)
        model = random_model(subject)
        parts: dict[str, Iterator[StepTime | PrefillTime]] = {
            "steps": measure_steps(subject, model, extent.contexts),
            "prefill": measure_prefill(subject, model, extent.contexts[1:]),
        }
        for part, found in parts.items():
            for one in each_or_failed(f"{part} of {name}", subject.dtype, found):
                if isinstance(one, Check):
                    record["checks"].append(one.as_record())
                else:
                    record[part].append(asdict(one))
                    report(f"{name}: {one.summary}")
                keep(record)
        del model, parts, found
        torch.cuda.empty_cache()
    return record
