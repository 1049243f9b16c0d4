"""How near each kernel is to what the GPU can do: two ceilings, and each kernel's share of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from tidar_core.bench.checking import Check, each_or_failed, random_cache, step_rows
from tidar_core.bench.reading import read_all
from tidar_core.bench.shapes import projections
from tidar_core.config import ModelConfig
from tidar_core.kernels.ops import KVCache, Ops, StepRows, rotary_tables
from tidar_core.kernels.rules import rule_numbers
from tidar_core.kernels.triton_sampling import pick_kept, pick_whole
from tidar_core.layout import Shape
from tidar_core.model.weights import LowRank
from tidar_core.request import SamplingParams
from tidar_core.sampling.token_rule import TokenRule

RANK = 32
FULL = Shape(7, tuple(range(1, 8)), 8)  # 8 verify rows and 56 mask rows
REPEATS = 7
PICKS = {
    "sampled": SamplingParams(max_tokens=1),
    "top-p": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9),
    "top-k and top-p": SamplingParams(max_tokens=1, temperature=0.6, top_p=0.95, top_k=20),
}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. cold_bytes: how many bytes of weights or K/V are walked through, so that nothing comes out
    of a cache. calls: how often a work is called that reads too little for that."""

    rows: tuple[int, ...] = (1, 8, 64, 288)
    contexts: tuple[int, ...] = (512, 4096, 32768)
    read_bytes: int = 4 << 30
    cold_bytes: int = 256 << 20
    matrix: int = 8192
    page_size: int = 16
    calls: int = 8


@dataclass(frozen=True, slots=True)
class Measure:
    """The time of one case. bytes: how much has to be read for it. share: of the measured read bandwidth, None where
    reading does not count."""

    shape: str
    kernel: str
    case: str
    microseconds: float
    bytes: int
    share: float | None

    def as_record(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """read: bytes a second of a plain reading kernel. multiply: bf16 FLOP a second of a large square product."""

    read: float
    multiply: float


def seconds_a_call(work: Callable[[int], object], calls: int, device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of one call among `calls` in a row: work(0), work(1), … On a GPU they are one graph, so that the device
    is timed and not the launching, and the median of several replays counts."""
    if device.type != "cuda":
        began = time.perf_counter()
        for call in range(calls):
            work(call)
        return (time.perf_counter() - began) / calls
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in range(min(3, calls)):
            work(call)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            work(call)
    times = []
    graph.replay()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times) / calls


def again(work: Callable[..., object], *args: object) -> Callable[[int], object]:
    """The work as a function of the call's number, which it does not use."""
    return lambda call: work(*args)


def measure_ceilings(device: torch.device, extent: Extent) -> Ceilings:
    """Both ceilings, on random data."""
    data = torch.randint(1 << 30, (extent.read_bytes // 4,), dtype=torch.int32, device=device)
    if int(read_all(data).sum()) != int(data.sum(dtype=torch.int64)):
        raise RuntimeError("the reading kernel did not read everything")
    read = extent.read_bytes / seconds_a_call(again(read_all, data), 2, device)
    size = extent.matrix
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    return Ceilings(read, 2 * size**3 / seconds_a_call(again(torch.matmul, a, b), 2, device))


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: operations at a model's shape, on a device with its ceilings."""

    name: str
    config: ModelConfig
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    ceilings: Ceilings
    extent: Extent

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def random_low_rank(self, outs: int, ins: int) -> LowRank:
        """An adapter's matrices for a weight [outs, ins], of the rank that is measured."""
        return LowRank(self.random(RANK, ins), self.random(outs, RANK))

    def measure(self, kernel: str, case: str, work: Callable[[int], object], calls: int, size: int) -> Measure:
        """The time of `work`, and the share of a reading kernel's bandwidth that `size` bytes in this time amount
        to."""
        seconds = seconds_a_call(work, calls, self.device)
        share = size / self.ceilings.read / seconds if size else None
        return Measure(self.name, kernel, case, 1e6 * seconds, size, share)


def measure_products(subject: Subject) -> Iterator[Measure]:
    """Every projection and the head at each number of rows, and with the adapter where there are several rows."""
    ops, config, extent = subject.ops, subject.config, subject.extent
    for projection, (outs, ins) in {**projections(config), "head": (config.vocab_size, config.hidden_size)}.items():
        size = outs * ins * subject.dtype.itemsize
        weights = [subject.random(outs, ins) for _ in range(1 + extent.cold_bytes // size)]
        adapters = [subject.random_low_rank(outs, ins) for _ in weights]
        for rows in extent.rows:
            x = subject.random(rows, ins)
            case = f"{projection}, {rows} rows"
            if projection == "head":
                yield subject.measure("head", case, partial(_nth_head, ops, x, weights), len(weights), size)
                continue
            plain = partial(_nth_product, ops, x, weights, [None])
            yield subject.measure("linear", case, plain, len(weights), size)
            if rows > 8:
                drafting = partial(_nth_product, ops, x, weights, adapters)
                yield subject.measure("linear", f"{case}, adapter on all but 8", drafting, len(weights), size)


def _nth_product(ops: Ops, x: Tensor, weights: list[Tensor], adapters: Sequence[LowRank | None], call: int) -> Tensor:
    return ops.linear(x, weights[call % len(weights)], None, adapters[call % len(adapters)], 8)


def _nth_head(ops: Ops, x: Tensor, weights: list[Tensor], call: int) -> Tensor:
    return ops.head(x, weights[call % len(weights)])


def measure_attention(subject: Subject) -> Iterator[Measure]:
    """One sequence at each context: one row, 16 rows, and a drafting step; the layers are walked through."""
    ops, config, extent = subject.ops, subject.config, subject.extent
    cases = {"1 row": Shape(), "16 rows": Shape(15), "8 + 56 rows": FULL}
    for context in extent.contexts:
        if context + 32 > config.max_positions:
            continue
        size = 2 * context * config.kv_heads * config.head_dim * subject.dtype.itemsize
        layers = 2 + extent.cold_bytes // size  # more than the model has, where a step reads its weights between two
        for case, shape in cases.items():
            rows, pages = step_rows([context], shape, extent.page_size, subject.device)
            cache = random_cache(config, layers, pages, extent.page_size, subject.dtype, subject.device)
            qkv = subject.random(len(rows.positions), (config.heads + 2 * config.kv_heads) * config.head_dim)
            ops.attend(qkv, rows, cache, 0)  # lists the work; the layers behind it only read the list
            work = partial(_nth_attend, ops, qkv, rows, cache)
            yield subject.measure("attend", f"{case}, context {context}", work, layers - 1, size)


def _nth_attend(ops: Ops, qkv: Tensor, rows: StepRows, cache: KVCache, call: int) -> Tensor:
    return ops.attend(qkv, rows, cache, 1 + call % (cache.keys.shape[0] - 1))


def measure_small(subject: Subject) -> Iterator[Measure]:
    """What stands between the products: too little to read for bandwidth to count."""
    ops, config, extent, device = subject.ops, subject.config, subject.extent, subject.device
    rotary = rotary_tables(config, device)
    for count in extent.rows:
        x, residual = subject.random(count, config.hidden_size), subject.random(count, config.hidden_size)
        rows, pages = step_rows([64] * count, Shape(), extent.page_size, device)
        cache = random_cache(config, 1, pages, extent.page_size, subject.dtype, device)
        qkv = subject.random(count, (config.heads + 2 * config.kv_heads) * config.head_dim)
        gate_up = subject.random(count, 2 * config.intermediate_size)
        logits = torch.randn(count, config.vocab_size, device=device)
        picks = {
            kind: rule_numbers([TokenRule(params, row) for row in range(count)], config.vocab_size, device)
            for kind, params in PICKS.items()
        }
        works = {
            "add_norm": again(ops.add_norm, x, residual, subject.random(config.hidden_size), 1e-5),
            "gate": again(ops.gate, gate_up, config.activation),
            "rotate_and_store": again(ops.rotate_and_store, qkv, rows, rotary, cache, 0, None),
            "attend, the list of work too": again(ops.attend, qkv, rows, cache, 0),
            "pick, sampled": again(pick_whole, logits, picks["sampled"]),
            "pick, top-p": again(pick_kept, logits, picks["top-p"], 0),
            "pick, top-k and top-p": again(pick_kept, logits, picks["top-k and top-p"], PICKS["top-k and top-p"].top_k),
        }
        for kernel, work in works.items():
            yield subject.measure(kernel, f"{count} rows", work, extent.calls, 0)


def measure_all(subject: Subject) -> Iterator[Measure | Check]:
    """Everything that is measured at one shape, each part as in `each_or_failed`."""
    for name, part in (("products", measure_products), ("attention", measure_attention), ("small", measure_small)):
        yield from each_or_failed(f"measuring {name}", subject.dtype, part(subject))
