"""What an engine finds out about itself before it serves: whether its rows are exact, and what they cost."""

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from math import inf

import numpy as np
import torch
from torch import Tensor

from tidar_core.engine.batch import Batch
from tidar_core.engine.drafting import GRAPHED, pick_drafts
from tidar_core.engine.flight import launch
from tidar_core.engine.graphs import narrow_buckets
from tidar_core.engine.runner import Runner
from tidar_core.engine.scheduler import SequencePlan
from tidar_core.engine.step_cost import StepCost, curve_at
from tidar_core.error_text import first_line
from tidar_core.kernels.ops import GuessedSlots, empty_cache
from tidar_core.layout import PLAIN, Shape, full_shape
from tidar_core.model.decoder import BASE_ALONE, mlp
from tidar_core.request import Request, SamplingParams, Sequence, page_numbers
from tidar_core.sampling.token_rule import Rules, TokenRule
from tidar_core.transfer import on_device

PROBE_MULTIPLES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 64)
PROBE_MULTIPLES_GPU = (*PROBE_MULTIPLES, 65, 130)  # whose kernels have other tiles for more than 64 rows
MOST_PROBED = 8  # drafts up to which each number of them is probed, before every outcome; of more the last alone
COST_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
COST_ROWS_GPU = (*COST_ROWS, 192, 256)
COST_PAGES, CONTEXT_ROWS = 24, 8  # pages of context, and rows that have them, where its price is measured
TRIAL_BYTES = 128 << 20  # most that the pages for it take
REPEATS, FEWEST_REPEATS = 5, 2
ENOUGH_SECONDS = 0.5  # of one thing: long runs tell as much in fewer, and are most of what a first start computes
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=64, temperature=0.6, top_k=20, top_p=0.95)


def with_own_pages(runner: Runner) -> Runner:
    """The same model over a small cache of its own, so that warm-up touches no page of the engine's."""
    cache, page = runner.cache, runner.cache.page_size
    probes = 2 * -(-_probe_length(runner) // page)
    page_bytes = 2 * cache.keys[:, 0].numel() * cache.keys.element_size()
    measured = max(COST_PAGES, min(CONTEXT_ROWS * COST_PAGES, TRIAL_BYTES // page_bytes))
    pages = max(probes, measured) + 1
    graphs = None if runner.graphs is None else runner.graphs.fresh()
    return replace(
        runner, cache=empty_cache(runner.config, pages, page, cache.keys.dtype, runner.device), graphs=graphs
    )


def _plan(
    tokens: list[int],
    start: int,
    known: int,
    drafts: int,
    shape: Shape,
    pages: list[int],
    params: SamplingParams = GREEDY,
) -> SequencePlan:
    """`known` tokens from `start` on and `drafts` behind them."""
    sequence = Sequence(
        Request("warm-up", tuple(tokens), params), 0.0, tokens, computed=start, pages=page_numbers(pages)
    )
    end = start + known
    return SequencePlan(sequence, start, tuple(tokens[start:end]), tuple(tokens[end : end + drafts]), shape, emits=True)


def _decoding(runner: Runner, sequences: int, drafting: int, context: int) -> Batch:
    """One-row sequences, as in decoding, the first `drafting` of them with a proposal; each on pages of its own as far
    as they go, and with a text of its own, since where there are experts rows alike would all go to the same."""
    page, vocab = runner.cache.page_size, runner.config.vocab_size
    own = cycle(range(1, runner.cache.keys.shape[1]))
    shapes = [Shape(0, (1,), runner.block_length)] * drafting + [PLAIN] * (sequences - drafting)

    def plan(number: int, shape: Shape) -> SequencePlan:
        text = [(13 * i + 101 * number + 5) % vocab for i in range(context)]
        return _plan(text, context - 1, 1, 0, shape, list(islice(own, -(-context // page))))

    return runner.batch([plan(number, shape) for number, shape in enumerate(shapes)])


def rows_are_exact(runner: Runner) -> bool:
    """Bitwise probes of the loaded model's own operations: does a row's result depend on its batch?

    First every weight shape and the head with one row among many row counts, then whole passes: the same text
    computed at once, in chunks, and verified as drafts beside other sequences and mask rows.
    """
    return _products_are_exact(runner) and _passes_are_exact(runner)


@torch.inference_mode()
def _products_are_exact(runner: Runner) -> bool:
    layers, config = runner.weights.layers, runner.config
    generator = torch.Generator().manual_seed(0)
    dense = next((layer for layer in layers if layer.router is None), None)
    matrices = [
        (layers[0].qkv, layers[0].qkv_bias, config.hidden_size),
        (layers[0].o, layers[0].o_bias, config.heads * config.head_dim),
    ]
    if dense is not None:
        matrices.append((dense.gate_up, dense.gate_up_bias, config.hidden_size))
        matrices.append((dense.down, dense.down_bias, config.intermediate_size))
    products: list[tuple[Callable[[Tensor], Tensor], int]] = [
        (lambda x, w=weight, b=bias: runner.ops.linear(x, w, b, None, x.shape[0]), inputs)  # type: ignore[misc]
        for weight, bias, inputs in matrices
    ]
    mixture = next((layer for layer in layers if layer.router is not None), None)
    if mixture is not None:
        mixed = partial(mlp, runner.ops, config, mixture, BASE_ALONE)
        products.append((lambda x: mixed(x, x.shape[0]), config.hidden_size))
    head = (lambda x: runner.ops.head(x, runner.weights.head), config.hidden_size)
    multiples = PROBE_MULTIPLES_GPU if runner.device.type == "cuda" else PROBE_MULTIPLES
    for product, inputs in (*products, head):
        # fewer row counts for the head: it is as large as many layers
        some = (*multiples[::4], multiples[-1]) if product is head[0] else multiples
        counts = [multiple * runner.ops.row_multiple for multiple in some]
        x = torch.randn(counts[-1], inputs, generator=generator).to(runner.device, runner.weights.embedding.dtype)
        whole = product(x)
        for rows in counts:
            start = (7 * rows) % (counts[-1] - rows + 1)
            if not torch.equal(product(x[start : start + rows].contiguous()), whole[start : start + rows]):
                return False
    return True


def _probe_length(runner: Runner) -> int:
    """Tokens of the text whose passes are probed: more than two pages; on a GPU more than tiles of either kind hold."""
    length = 2 * runner.cache.page_size + runner.block_length + 5
    return max(length, PROBE_MULTIPLES_GPU[-1] + 5) if runner.device.type == "cuda" else length


def _passes_are_exact(runner: Runner) -> bool:
    vocab, page, block = runner.config.vocab_size, runner.cache.page_size, runner.block_length
    length = min(_probe_length(runner), runner.config.max_positions - block)
    if length <= block:
        return True  # no room for a draft behind a token
    text = [(31 * i + 7) % vocab for i in range(length)]
    other = [(17 * i + 3) % vocab for i in range(length)]
    count = -(-length // page)
    pages, other_pages = list(range(1, count + 1)), list(range(count + 1, 2 * count + 1))

    def hidden(*plans: SequencePlan) -> Tensor:
        return runner.forward(runner.batch(plans)).clone()  # a graph's result does not last

    whole = hidden(_plan(text, 0, length, 0, PLAIN, pages))[:length]
    for chunk in (1, 5, page):
        for start in range(0, length, chunk):
            rows = min(chunk, length - start)
            if not torch.equal(hidden(_plan(text, start, rows, 0, PLAIN, pages))[:rows], whole[start : start + rows]):
                return False
    for drafts in range(max(1, block)):
        if MOST_PROBED < drafts < block - 1:
            continue
        shape = full_shape(block, drafts) if block else Shape(drafts)
        if drafts > MOST_PROBED:
            shape = Shape(drafts, (1, drafts + 1), block)
        start = length - drafts - 1
        here = _plan(text, start, 1, drafts, shape, pages)
        beside = _plan(other, 0, length - block, 0, Shape(0, (1,), block) if block else PLAIN, other_pages)
        companies: list[tuple[SequencePlan, ...]] = [(beside, here)]
        if runner.device.type == "cuda" or not drafts:
            companies.append((here,))  # few rows, some of them mask rows: kernels may have other tiles then
        for plans in companies:
            first = sum(len(plan.known) for plan in plans[:-1])
            if not torch.equal(hidden(*plans)[first : first + drafts + 1], whole[start:]):
                return False
    return True


def measure_cost(runner: Runner) -> StepCost:
    """Seconds of whole passes at a few row counts, with next to no context, and what context adds."""
    block = runner.block_length
    cost_rows = COST_ROWS_GPU if runner.device.type == "cuda" else COST_ROWS
    context, longer = _contexts(runner)

    def batch(sequences: int, drafting: int, context: int = context) -> Batch:
        return _decoding(runner, sequences, drafting, context)

    def passes(*batches: Batch) -> list[float]:
        return _timed(runner, [partial(runner.forward, each) for each in batches])

    # Mask rows come in whole proposals: the adapter is measured at those counts and read off between them.
    proposals = sorted({max(1, round(rows / block)) for rows in cost_rows}) if block else []
    found = passes(*(batch(rows, 0) for rows in cost_rows), *(batch(count, count) for count in proposals))
    trunk, drafting = _rising(found[: len(cost_rows)]), found[len(cost_rows) :]
    head = _rising(_timed(runner, [_picking(runner, rows) for rows in cost_rows]))

    # What a token of context adds. c sequences of one row: c (reading + attending); one sequence of 1 + b rows:
    # reading + (1 + b) attending.
    further = max(1, longer - context)
    several, one = (CONTEXT_ROWS, 0), (1, 1 if block else 0)
    near_several, far_several, near_one, far_one = passes(
        batch(*several), batch(*several, longer), batch(*one), batch(*one, longer)
    )
    one_row = max(0.0, far_several - near_several) / further / CONTEXT_ROWS
    more_rows = max(0.0, (far_one - near_one) / further - one_row)
    attending = min(one_row, more_rows / block) if block else one_row
    base = StepCost(cost_rows, trunk, head, (0.0,) * len(cost_rows), one_row - attending, attending)
    if not block:
        return base
    extra = tuple(
        max(0.0, seconds - base.trunk_seconds(count * (1 + block)))
        for count, seconds in zip(proposals, drafting, strict=True)
    )
    between = curve_at(tuple(count * block for count in proposals), extra, np.array(cost_rows))
    return replace(base, adapter=tuple(between.tolist()))


def check_cost(runner: Runner, cost: StepCost) -> list[tuple[float, float]]:
    """Pairs (seconds by `cost`, seconds now) of a few works: passes of few, more and many rows, without and with mask
    rows, one behind longer texts, and a head. Works that other programs disturbed when the cost was measured turn out
    faster now than the others do."""
    block = runner.block_length
    context, longer = _contexts(runner)
    few, more, many = (cost.rows[len(cost.rows) * quarters // 4] for quarters in (0, 2, 3))
    sizes = [(few, 0), (more, 0), (many, 0)]
    if block:
        sizes += [(count, count) for count in (1, max(1, round(many / (1 + block))))]
    before = [cost.trunk_seconds(count + masks * block) + cost.adapter_seconds(masks * block) for count, masks in sizes]
    further = (longer - context) * CONTEXT_ROWS * (cost.reading + cost.attending)
    before.append(cost.trunk_seconds(CONTEXT_ROWS) + further)
    batches = [_decoding(runner, count, masks, context) for count, masks in sizes]
    batches.append(_decoding(runner, CONTEXT_ROWS, 0, longer))
    now = _timed(runner, [partial(runner.forward, batch) for batch in batches])
    now += _timed(runner, [_picking(runner, more)])  # apart, as it was measured: between passes its caches are cold
    return list(zip([*before, cost.head_seconds(more)], now, strict=True))


def _contexts(runner: Runner) -> tuple[int, int]:
    """The two context lengths, in tokens, between which the price of context is measured: next to none, and much."""
    page, room = runner.cache.page_size, runner.config.max_positions - runner.block_length - 1
    context = max(1, min(page, room))
    return context, max(context, min(COST_PAGES * page, room))


def capture_graphs(runner: Runner, progress: Callable[[int, int], None], report: Callable[[str], None]) -> None:
    """Captures the graphs of all steps behind texts that are not very long, and of picking their drafts; those of
    longer texts are captured once they are common. What is computed on the way goes to the trash page. progress gets
    (graphs done, graphs in all); report gets a line where memory does not hold all of them, or CUDA refuses."""
    if runner.graphs is None:
        return
    graphs, block = runner.graphs.at_once(), runner.block_length
    *rising, largest = narrow_buckets(graphs.reach, block)
    # The others use the largest's memory again; where that is all there is, the small ones are the commonest.
    todo: list[Callable[[], object]] = [partial(runner.capture, size) for size in (largest, *rising)]
    if runner.adapter is not None and runner.adapter.slot_head is not None:  # else proposals are drafted without one
        proposals = GRAPHED[: bisect_left(GRAPHED, graphs.reach.sequences) + 1]
        drafting = replace(runner, graphs=graphs)
        todo += [partial(_drafting, drafting, count, slots) for slots in range(1, block) for count in proposals]
    there = 0
    for done, work in enumerate(todo):
        try:
            work()
            there += 1
        except RuntimeError as error:
            if done or not isinstance(error, torch.OutOfMemoryError):
                why = first_line(error)
                report(f"{there} of {len(todo)} CUDA graphs are there, the others come when they are common: {why}")
                return
        progress(done + 1, len(todo))


def fly_once(runner: Runner, cost: StepCost) -> None:
    """Launches a step and the one behind it on the trash page, greedy and sampled, so that their kernels are compiled
    before the engine serves."""
    shape = Shape(0, (1,), runner.block_length) if runner.block_length else PLAIN
    for params in (GREEDY, SAMPLED):
        plan = _plan([1], 0, 1, 0, shape, [0], params)
        first = launch(runner, [plan], cost, None)
        behind = plan._replace(known=(0,))  # the anchor's place in what the first step leaves
        launch(runner, [behind], cost, (first, [0])).land()


def picking_seconds(runner: Runner, proposals: int, slots: int) -> float:
    """Seconds that picking the drafts of `proposals` proposals takes, `slots` each, once they are scored."""
    guessed = _guessed(runner, proposals, slots)
    (seconds,) = _timed(runner, [lambda: pick_drafts(runner, guessed)])
    return seconds


def _drafting(runner: Runner, proposals: int, slots: int) -> object:
    """Drafts of so many proposals, whatever they say."""
    return pick_drafts(runner, _guessed(runner, proposals, slots))


def _guessed(runner: Runner, proposals: int, slots: int) -> GuessedSlots:
    rows = proposals * slots
    # No two scores alike: to find the best of many that are takes several times as long.
    random = torch.randn(rows, runner.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = random.to(runner.device, runner.weights.embedding.dtype)
    logits, rules = runner.scores(hidden, range(rows)), [TokenRule(GREEDY, 1)] * rows
    anchors = on_device([0] * proposals, runner.device)
    return GuessedSlots(hidden, logits, rules, anchors, [slots] * proposals)


def _timed(runner: Runner, works: Items[Callable[[], object]]) -> list[float]:
    """Seconds of the fastest of a few runs of each work: whatever else the machine does only adds to them. The works
    take turns, so that another program's busy moment does not fall on one of them alone."""
    best, spent = [inf] * len(works), [0.0] * len(works)
    for turn in range(REPEATS + 1):
        for index, work in enumerate(works):
            if turn > FEWEST_REPEATS and spent[index] > ENOUGH_SECONDS:
                continue
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            began = time.perf_counter()
            work()
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            seconds = time.perf_counter() - began
            spent[index] += seconds
            if turn:  # the first finds cold caches
                best[index] = min(best[index], seconds)
    return best


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """The curve, each point lowered to the least of those behind it: more rows never cost less."""
    return tuple(min(seconds[index:]) for index in range(len(seconds)))


def _picking(runner: Runner, rows: int) -> Callable[[], object]:
    hidden = torch.randn(rows, runner.config.hidden_size).to(runner.device, runner.weights.embedding.dtype)
    rules = Rules([TokenRule(GREEDY, 1)] * rows)  # as they are where steps follow each other
    return lambda: runner.ops.pick(runner.scores(hidden, range(rows)), rules)
