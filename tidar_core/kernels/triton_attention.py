"""Paged attention in Triton: context in fixed splits, this step's mask rows, one merge.

Three kernels. `_plan` (one program, once a step) finds the runs of neighbouring rows that belong to one sequence and
lists what is to do: (tile of rows, split of keys). `_attend_splits` works off that list: the query heads of a K/V
head are packed with the rows of a tile (tile row m is step row m // group, head m % group), so that a sequence's
rows share every load of keys and values; its tiles are worked off side by side, split by split. `_merge` takes one row
and head, folds its splits in order, then the mask rows that it sees, and divides.

In layers with a window a tile skips the keys that none of its rows sees. Their splits are listed all the same, since
the list serves every layer; one that a row sees nothing of leaves a greatest score of -inf, by which the merge knows.

A row's bits depend on that row and its keys alone. Splits and key tiles lie at fixed absolute positions, whatever
the step looks like; a tile of keys that a row does not see leaves its maximum, sum and output as they were (times
one, plus zero); the merge reads splits in chunks of fixed size, and mask rows counted from the first one that the
row sees. Who shares a tile, how many programs there are and which of them did what changes nothing.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidar_core.kernels.ops import PARTIAL_BYTES, KVCache, StepRows
from tidar_core.kernels.triton_launch import LINE, launch_options, let_next_begin, wait_for_kernel_before
from tidar_core.kernels.triton_rows import scales_of

FIRST_SPLIT = tl.constexpr(128)  # keys of a short split; each level of splits is twice as long as the one before
SPLITS_A_LEVEL = tl.constexpr(8)
LEVELS = tl.constexpr(2)  # 8 splits of 128 keys, 8 of 256, then 512: parallel when short, few partials when long
SPLITS_AT_ONCE = tl.constexpr(16)  # that the merge folds
SLOTS_AT_ONCE = tl.constexpr(8)  # mask rows that the merge folds: a block, mostly
ITEM = tl.constexpr(8)  # numbers of an item in the list of work, of which these are used:
ITEM_ROW = tl.constexpr(0)  # the first row of the tile
ITEM_ROWS = tl.constexpr(1)
ITEM_SPLIT = tl.constexpr(2)
ITEM_SEQUENCE = tl.constexpr(3)
ITEM_END = tl.constexpr(4)  # the greatest context end of its rows
LARGEST_PART = 1024  # rows that one plan looks at
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tile sizes, the same for every step of a model. rows: query rows times group; keys: keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def attention_tiles(
    dtype: torch.dtype, head_dim: int, group: int, in_8_bits: bool = False, in_window: bool = False
) -> AttentionTiles:
    """The tiles for a model's sizes, as large as registers allow.

    64 rows fill one warpgroup's matrix instruction on Hopper. A stage is one tile of keys and values in shared memory:
    as many as let two programs share a multiprocessor.
    """
    least = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return AttentionTiles(least, 32, 4, 2)
    if in_8_bits and 64 < head_dim <= 128:
        return AttentionTiles(max(64, least), 32, 4, 5)  # with 64 keys their numbers in 16 bits want too many registers
    if head_dim <= 128:
        return AttentionTiles(max(64, least), 64, 4, 5 if head_dim <= 64 else 3)
    return AttentionTiles(max(32, least), 32, 8 if in_window else 4, 3)  # where windows begin wants registers too


def split_count(keys: int) -> int:
    """How many splits hold `keys` keys."""
    count, start, length = 0, 0, FIRST_SPLIT.value
    for _ in range(LEVELS.value):
        here = min(SPLITS_A_LEVEL.value, max(0, -(-(keys - start) // length)))
        count, start, length = count + here, start + SPLITS_A_LEVEL.value * length, 2 * length
    return count + max(0, -(-(keys - start) // length))


@triton.jit
def _split_start(split):
    """The first key of a split."""
    level = tl.minimum(split // SPLITS_A_LEVEL, LEVELS)
    within = split - level * SPLITS_A_LEVEL
    # Constants stand behind tensors: in front of one, some of Triton's interpreters take the product for a constant.
    return (((1 << level) - 1) * SPLITS_A_LEVEL + (within << level)) * FIRST_SPLIT


@triton.jit
def _split_count(keys):
    """`split_count` of each element."""
    level = keys * 0
    for passed in tl.static_range(1, LEVELS + 1):
        level += (keys > FIRST_SPLIT * SPLITS_A_LEVEL * ((1 << passed) - 1)).to(tl.int32)
    start = ((1 << level) - 1) * (FIRST_SPLIT * SPLITS_A_LEVEL)
    length = (1 << level) * FIRST_SPLIT
    return level * SPLITS_A_LEVEL + (keys - start + length - 1) // length


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sequence", "context_end"])
def _plan(
    sequence, context_end, scratch, items, count, rows,
    TILE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Lists the work of one step and counts it: items int32 [n, ITEM], one for each tile of rows and split of keys.

    sequence, context_end: int32 [rows]. A run is a stretch of rows of one sequence, cut into tiles of TILE rows. All
    tiles of a run have an item for each split of the longest among them, and those of one split lie side by side: they
    are worked off at about the same time and may find its keys in the cache. scratch: int32 [3 * BLOCK + LINE].
    """
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    row = tl.arange(0, BLOCK)
    live = row < rows
    mine = tl.load(sequence + row, mask=live, other=-1)
    before = tl.load(sequence + row - 1, mask=live & (row > 0), other=-1)
    end = tl.load(context_end + row, mask=live, other=0)
    starts = live & ((row == 0) | (mine != before))
    run = tl.cumsum(starts.to(tl.int32), 0) - 1
    # What atomics change shares no cache line with what is read before.
    run_start, greatest_of_tile, greatest_of_run = scratch, scratch + BLOCK + LINE, scratch + 2 * BLOCK + LINE
    tl.store(run_start + run, row, mask=starts)
    tl.store(run_start + tl.sum(starts.to(tl.int32), 0), rows)
    tl.store(greatest_of_tile + row, tl.full([BLOCK], 0, tl.int32))
    tl.store(greatest_of_run + row, tl.full([BLOCK], 0, tl.int32))
    tl.debug_barrier()
    start = tl.load(run_start + run, mask=live, other=0)
    stop = tl.load(run_start + run + 1, mask=live, other=0)
    tile = (row - start) // TILE
    first = start + tile * TILE
    tl.atomic_max(greatest_of_tile + first, end, mask=live, sem="relaxed")
    tl.atomic_max(greatest_of_run + start, end, mask=live, sem="relaxed")
    tl.debug_barrier()
    leads = live & (row == first)
    longest = tl.load(greatest_of_tile + row, mask=leads, other=0)
    splits = tl.where(live, _split_count(tl.load(greatest_of_run + start, mask=live, other=0)), 0)
    tiles = tl.where(live, (stop - start + TILE - 1) // TILE, 0)
    counts = tl.where(starts, tiles * splits, 0)
    place = tl.cumsum(counts, 0) - tiles * splits + tile
    for split in range(tl.max(splits, 0)):
        listed = leads & (split < splits)
        item = items + (place + split * tiles) * ITEM
        tl.store(item + ITEM_ROW, row, mask=listed)
        tl.store(item + ITEM_ROWS, tl.minimum(stop - row, TILE), mask=listed)
        tl.store(item + ITEM_SPLIT, split, mask=listed)
        tl.store(item + ITEM_SEQUENCE, mine, mask=listed)
        tl.store(item + ITEM_END, longest, mask=listed)
    tl.store(count, tl.sum(counts, 0))


@triton.jit(
    do_not_specialize=["table_width", "capacity", "first_row"],
    do_not_specialize_on_alignment=["positions", "context_end", "page_table"],
)
def _attend_splits(
    qkv, keys, values, key_scales, value_scales, positions, context_end, page_table, items, count, partial,
    partial_sums, scale, first_row, table_width, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of each listed tile of rows over one split of its context, one K/V head at a time.

    partial: fp32 [rows, heads, capacity, HEAD_DIM], not divided; partial_sums: fp32 [rows, heads, capacity, 2], the
    greatest score (times log2 e) and the sum of the weights. Rows count from `first_row`. WINDOW: how many positions a
    row sees, the last of them its own; 0 for all.
    """
    wait_for_kernel_before(OVERLAP)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    rounded: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_KEYS)
    for work in range(tl.program_id(0), tl.load(count) * KV_HEADS, tl.num_programs(0)):
        kv = work % KV_HEADS
        item = items + (work // KV_HEADS) * ITEM
        split = tl.load(item + ITEM_SPLIT)
        split_start = _split_start(split)
        stop = tl.minimum(_split_start(split + 1), tl.load(item + ITEM_END))
        table = page_table + tl.load(item + ITEM_SEQUENCE) * table_width
        row = tl.load(item + ITEM_ROW) + m // GROUP
        head = kv * GROUP + m % GROUP
        mine = m < tl.load(item + ITEM_ROWS) * GROUP
        end = tl.load(context_end + first_row + row, mask=mine, other=0)
        start = split_start
        if WINDOW:
            begin = tl.maximum(tl.load(positions + first_row + row, mask=mine, other=2**30) + 1 - WINDOW, 0)
            start = tl.maximum(start, tl.min(begin, 0) // BLOCK_KEYS * BLOCK_KEYS)
        at = (first_row + row).to(tl.int64) * WIDTH + head * HEAD_DIM
        q = tl.load(qkv + at[:, None] + d[None, :], mask=mine[:, None], other=0.0)

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0, tl.float32)
        mixed = tl.full([BLOCK_M, HEAD_DIM], 0, tl.float32)
        page = tl.load(table + (start + n) // PAGE, mask=(start + n) // PAGE < table_width, other=0)
        for first in range(start, stop, BLOCK_KEYS):
            key = tl.multiple_of(first, BLOCK_KEYS) + n
            # By hand: else the compiler spends stages on page numbers, and no keys come while others are computed with.
            ahead = (key + BLOCK_KEYS) // PAGE
            next_page = tl.load(table + ahead, mask=ahead < table_width, other=0)
            base = (page.to(tl.int64) * KV_HEADS + kv) * (PAGE * HEAD_DIM)
            k = tl.load(keys + (base + key % PAGE)[None, :] + d[:, None] * PAGE)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            if rounded:
                scale_at = (page * KV_HEADS + kv) * PAGE + key % PAGE
                scores = scores * tl.load(key_scales + scale_at)[None, :]
            seen = key[None, :] < end[:, None]
            if WINDOW:
                seen = seen & (key[None, :] >= begin[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            shrink = tl.exp2(best - level)
            # A key beyond the context may lie in memory that a failed request left full of NaN: never read there.
            v = tl.load(
                values + (base + key % PAGE * HEAD_DIM)[:, None] + d[None, :], mask=(key < stop)[:, None], other=0.0
            )
            total = total * shrink + tl.sum(weights, 1)
            if rounded:
                weights = weights * tl.load(value_scales + scale_at, mask=key < stop, other=0.0)[None, :]
            mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc=mixed * shrink[:, None], input_precision="ieee")
            best = higher
            page = next_page

        reached = mine & (end > split_start)
        place = (row.to(tl.int64) * HEADS + head) * capacity + split
        some = reached & (best > float("-inf")) if WINDOW else reached
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], mixed, mask=some[:, None])
        tl.store(partial_sums + place * 2, best, mask=reached)
        tl.store(partial_sums + place * 2 + 1, total, mask=reached)
    let_next_begin(OVERLAP)


@triton.jit
def _fold(best, total, mixed, scores, sums, values):
    """Adds a chunk to running results: best, total [heads], mixed [heads, d]; scores [heads, chunk] (-inf: not
    there), sums [heads, chunk] and values [heads or 1, chunk, d] as weighted by exp2(score)."""
    higher = tl.maximum(best, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(best - level)
    total = total * shrink + tl.sum(weights * sums, 1)
    mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * values, 1)
    return higher, total, mixed


@triton.jit(
    do_not_specialize=["verify", "capacity", "first_row"],
    do_not_specialize_on_alignment=["context_end", "tail_start", "tail_end"],
)
def _merge(
    qkv, context_end, tail_start, tail_end, partial, partial_sums, out,
    scale, first_row, verify, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and some heads of one K/V head: its splits in order, then the mask rows it sees, then the division.

    out: [rows, heads * d]; grid (rows, K/V heads, groups / BLOCK_HEADS).
    """
    let_next_begin(OVERLAP)
    wait_for_kernel_before(OVERLAP)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    kv = tl.program_id(1)
    row = first_row + tl.program_id(0)
    g = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, HEAD_DIM)
    c = tl.arange(0, SPLITS_AT_ONCE)
    present = g < GROUP
    head = kv * GROUP + g
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_HEADS], 0, tl.float32)
    mixed = tl.full([BLOCK_HEADS, HEAD_DIM], 0, tl.float32)

    splits, tail = _split_count(tl.load(context_end + row)), tl.load(tail_start + row)
    tail_length = tl.load(tail_end + row) - tail
    place = (tl.program_id(0).to(tl.int64) * HEADS + head) * capacity
    for first in range(0, splits, SPLITS_AT_ONCE):
        split = first + c
        live = present[:, None] & (split < splits)[None, :]
        at = place[:, None] + split[None, :]
        scores = tl.load(partial_sums + at * 2, mask=live, other=float("-inf"))
        sums = tl.load(partial_sums + at * 2 + 1, mask=live, other=0.0)
        if WINDOW:
            live = live & (scores > float("-inf"))
        values = tl.load(partial + at[:, :, None] * HEAD_DIM + d[None, None, :], mask=live[:, :, None], other=0.0)
        best, total, mixed = _fold(best, total, mixed, scores, sums, values)

    # Pairs of a head and a mask row lie side by side, so that a score is a sum within a few threads.
    pair = tl.arange(0, BLOCK_HEADS * SLOTS_AT_ONCE)
    pair_g = tl.program_id(2) * BLOCK_HEADS + pair // SLOTS_AT_ONCE
    query = row.to(tl.int64) * WIDTH + (kv * GROUP + pair_g) * HEAD_DIM
    slot = tl.arange(0, SLOTS_AT_ONCE)
    for first in range(0, tail_length, SLOTS_AT_ONCE):
        of_pair = first + pair % SLOTS_AT_ONCE
        q = tl.load(qkv + query[:, None] + d[None, :], mask=(pair_g < GROUP)[:, None], other=0.0)
        key = (verify + tail + of_pair).to(tl.int64) * WIDTH + (HEADS + kv) * HEAD_DIM
        k = tl.load(qkv + key[:, None] + d[None, :], mask=(of_pair < tail_length)[:, None], other=0.0)
        scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1).reshape(BLOCK_HEADS, SLOTS_AT_ONCE) * scale
        live = first + slot < tail_length
        value = (verify + tail + first + slot).to(tl.int64) * WIDTH + (HEADS + KV_HEADS + kv) * HEAD_DIM
        v = tl.load(qkv + value[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        scores = tl.where(live[None, :], scores, float("-inf"))
        best, total, mixed = _fold(best, total, mixed, scores, 1.0, v[None, :, :])
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    to = row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(out + to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=present[:, None])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a step: the first, how many, and the list of work for them on the device (`_plan`)."""

    first: int
    rows: int
    items: Tensor
    count: Tensor


def _plan_parts(rows: StepRows, tile: int, part_rows: int, capacity: int, launch: dict[str, Any]) -> tuple[_Part, ...]:
    device, total = rows.positions.device, len(rows.positions)
    parts = []
    for first in range(0, total, part_rows):
        here = min(part_rows, total - first)
        block = max(512, triton.next_power_of_2(here))
        scratch = torch.empty(3 * block + LINE.value, dtype=torch.int32, device=device)
        items = torch.empty(here * capacity, ITEM.value, dtype=torch.int32, device=device)
        count = torch.empty(1, dtype=torch.int32, device=device)
        _plan[(1,)](
            rows.sequence[first:], rows.context_end[first:], scratch, items, count, here,
            TILE=tile, BLOCK=block, num_warps=4, enable_fp_fusion=True, **launch,
        )  # fmt: skip
        parts.append(_Part(first, here, items, count))
    return tuple(parts)


def paged_attend(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, programs: int, *, overlap_launches: bool = True
) -> Callable[[Tensor, StepRows, KVCache, int], Tensor]:
    """`Ops.attend` for a model's sizes, `programs` at once on the device.

    The work is listed on the device when layer 0 is attended; the later layers read the same list. That makes one
    launch a step and two a layer, whose shapes depend on the numbers of rows and pages alone, so that a whole step can
    be captured as a graph and replayed over other contents of the same tensors.
    """
    group = heads // kv_heads
    tile_rows = attention_tiles(dtype, head_dim, group).rows // group
    scale = LOG2E * head_dim**-0.5
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    block_heads = min(8, 512 // head_dim, triton.next_power_of_2(group))
    # As few as spill nothing: the fewer, the more programs share a multiprocessor.
    merge_warps = max(2, block_heads * head_dim // (128 if head_dim <= 128 else 64))
    planned: tuple[StepRows, tuple[_Part, ...]] | None = None

    def attend(qkv: Tensor, rows: StepRows, cache: KVCache, layer: int) -> Tensor:
        nonlocal planned
        launch = launch_options(qkv.device, qkv.shape[0], overlap_launches)
        keys, values = cache.keys[layer], cache.values[layer]
        key_scales, value_scales = scales_of(cache, layer)
        window = cache.window(layer)
        tiles = attention_tiles(dtype, head_dim, group, cache.key_scales is not None, window > 0)
        table_width = rows.page_table.shape[1]
        capacity = max(1, split_count(table_width * cache.page_size))
        if planned is None or layer == 0 or planned[0] is not rows:
            row_bytes = heads * capacity * (head_dim + 2) * 4
            part_rows = min(LARGEST_PART, max(64, PARTIAL_BYTES // row_bytes // 64 * 64))
            planned = rows, _plan_parts(rows, tile_rows, part_rows, capacity, launch)
        out = torch.empty(qkv.shape[0], heads * head_dim, dtype=dtype, device=qkv.device)
        for part in planned[1]:
            partial = torch.empty(part.rows, heads, capacity, head_dim, dtype=torch.float32, device=qkv.device)
            sums = torch.empty(part.rows, heads, capacity, 2, dtype=torch.float32, device=qkv.device)
            _attend_splits[(min(programs, part.rows * capacity * kv_heads),)](
                qkv, keys, values, key_scales, value_scales, rows.positions, rows.context_end, rows.page_table,
                part.items, part.count, partial, sums, scale, part.first, table_width, capacity,
                PAGE=cache.page_size, WINDOW=window, BLOCK_M=tiles.rows, BLOCK_KEYS=tiles.keys, **sizes,
                num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, **launch,
            )  # fmt: skip
            _merge[(part.rows, kv_heads, triton.cdiv(group, block_heads))](
                qkv, rows.context_end, rows.tail_start, rows.tail_end, partial, sums, out,
                scale, part.first, rows.verify, capacity, **sizes, WINDOW=window, BLOCK_HEADS=block_heads,
                num_warps=merge_warps, enable_fp_fusion=True, **launch,
            )  # fmt: skip
            del partial, sums  # before the next part's
        return out

    return attend
