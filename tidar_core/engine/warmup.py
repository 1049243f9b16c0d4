"""What an engine finds out about itself before it serves: whether its rows are exact, and what they cost."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from tidar_core.engine.batch import Batch, build_batch
from tidar_core.engine.draft_policy import StepCost
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.layout import Shape, WithinBlock, full_shape
from tidar_core.request import Request, SamplingParams, Sequence
from tidar_core.sampling import TokenRule, pick_tokens

PROBE_MULTIPLES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 64)
COST_ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 3
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def _plan(tokens: list[int], start: int, known: int, drafts: int, shape: Shape, pages: list[int]) -> SequencePlan:
    """`known` tokens from `start` on and `drafts` behind them, on pages that nobody else uses at warm-up."""
    sequence = Sequence(Request("warm-up", tuple(tokens), GREEDY), 0.0, tokens, computed=start, pages=pages)
    end = start + known
    return SequencePlan(sequence, start, tuple(tokens[start:end]), tuple(tokens[end : end + drafts]), shape, emits=True)


def _batch(runner: Runner, plans: list[SequencePlan], within_block: WithinBlock) -> Batch:
    return build_batch(plans, runner.cache.page_size, runner.ops.row_multiple, within_block, runner.device)


def rows_are_exact(runner: Runner, block_length: int, within_block: WithinBlock) -> bool:
    """Bitwise probes of the loaded model's own operations: does a row's result depend on its batch?

    First every weight shape and the head with one row among many row counts, then whole passes: the same text
    computed at once, in chunks, and verified as drafts beside other sequences and mask rows.
    """
    return _products_are_exact(runner) and _passes_are_exact(runner, block_length, within_block)


@torch.inference_mode()
def _products_are_exact(runner: Runner) -> bool:
    layer, config = runner.weights.layers[0], runner.config
    generator = torch.Generator().manual_seed(0)
    products: list[tuple[Callable[[Tensor], Tensor], int]] = [
        (lambda x, w=weight, b=bias: runner.ops.linear(x, w, b, None, x.shape[0]), inputs)  # type: ignore[misc]
        for weight, bias, inputs in (
            (layer.qkv, layer.qkv_bias, config.hidden_size),
            (layer.o, layer.o_bias, config.heads * config.head_dim),
            (layer.gate_up, layer.gate_up_bias, config.hidden_size),
            (layer.down, layer.down_bias, config.intermediate_size),
        )
    ]
    head = (lambda x: runner.ops.head(x, runner.weights.head), config.hidden_size)
    for product, inputs in (*products, head):
        # fewer row counts for the head: it is as large as many layers
        multiples = PROBE_MULTIPLES[:: 4 if product is head[0] else 1]
        counts = [multiple * runner.ops.row_multiple for multiple in multiples]
        x = torch.randn(counts[-1], inputs, generator=generator).to(runner.device, runner.weights.embedding.dtype)
        whole = product(x)
        for rows in counts:
            start = (7 * rows) % (counts[-1] - rows + 1)
            if not torch.equal(product(x[start : start + rows].contiguous()), whole[start : start + rows]):
                return False
    return True


def _passes_are_exact(runner: Runner, block_length: int, within_block: WithinBlock) -> bool:
    page, vocab = runner.cache.page_size, runner.config.vocab_size
    length = min(3 * page - 3, runner.config.max_positions - 2)
    text = [(31 * i + 7) % vocab for i in range(length)]
    other = [(17 * i + 3) % vocab for i in range(length)]
    pages, other_pages = [1, 2, 3], [4, 5, 6]

    def hidden(*plans: SequencePlan) -> Tensor:
        return runner.forward(_batch(runner, list(plans), within_block))

    whole = hidden(_plan(text, 0, length, 0, Shape(), pages))[:length]
    for chunk in (1, 5, page):
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            rows = hidden(_plan(text, start, count, 0, Shape(), pages))[:count]
            if not torch.equal(rows, whole[start : start + count]):
                return False
    block = block_length if runner.adapter is not None else 0
    for drafts in range(max(1, block)):
        shape = full_shape(block, drafts) if block else Shape(drafts)
        start = length - drafts - 1
        beside = _plan(other, 0, length - block, 0, Shape(0, (1,), block) if block else Shape(), other_pages)
        rows = hidden(beside, _plan(text, start, 1, drafts, shape, pages))[length - block :][: drafts + 1]
        if not torch.equal(rows, whole[start:]):
            return False
    return True


def measure_cost(runner: Runner, block_length: int, within_block: WithinBlock) -> StepCost:
    """Median seconds of whole passes at a few row counts, on pages that nobody else uses yet."""
    page = runner.cache.page_size
    total = runner.cache.keys.shape[1] - 1
    context = min(8 * page, total * page, runner.config.max_positions) - 1
    text = [(13 * i + 5) % runner.config.vocab_size for i in range(context)]
    pages = list(range(1, -(-context // page) + 1))

    def plans(verify: int, mask: int) -> list[SequencePlan]:
        """One-row sequences, as in decoding, all on the same pages: only their number matters here."""
        shape = Shape(0, (1,), block_length) if mask else Shape()
        start = context - max(1, block_length) - 1
        return [_plan(text, start, 1, 0, shape if i * block_length < mask else Shape(), pages) for i in range(verify)]

    trunk = [_seconds(runner, _batch(runner, plans(rows, 0), within_block)) for rows in COST_ROWS]
    head = [_pick_seconds(runner, rows) for rows in COST_ROWS]
    adapter = [0.0] * len(COST_ROWS)
    if runner.adapter is not None and block_length:
        base = StepCost(COST_ROWS, tuple(trunk), tuple(head), tuple(adapter))
        for index, rows in enumerate(COST_ROWS):
            sequences = max(1, round(rows / block_length))
            batch = _batch(runner, plans(sequences, sequences * block_length), within_block)
            without = base.seconds(batch.rows.verify + len(batch.slots), 0, 0) - base.head[0]
            adapter[index] = max(0.0, _seconds(runner, batch) - without)
    return StepCost(COST_ROWS, tuple(trunk), tuple(head), tuple(adapter))


def _timed(runner: Runner, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        began = time.perf_counter()
        work()
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _seconds(runner: Runner, batch: Batch) -> float:
    return _timed(runner, lambda: runner.forward(batch))


def _pick_seconds(runner: Runner, rows: int) -> float:
    hidden = torch.randn(rows, runner.config.hidden_size).to(runner.device, runner.weights.embedding.dtype)
    rules = [TokenRule(GREEDY, 1)] * rows
    return _timed(runner, lambda: pick_tokens(runner.scores(hidden, range(rows)), rules))
