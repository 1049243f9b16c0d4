"""Every Triton kernel against its torch oracle, interpreted. Run by `test_triton_interpreted.py`, in a process where
TRITON_INTERPRET=1 was set before triton was imported."""

from dataclasses import replace
from itertools import chain, combinations
from typing import get_args

import pytest
import torch
import triton
import triton.language as tl

from tests.tidar_core.kernels.test_kernels import model_config
from tests.tidar_core.kernels.test_succession import FORMS, carried_rows_match, decisions_match
from tidar_core.bench.checking import in_8_bits, numbers_of
from tidar_core.config import Activation
from tidar_core.kernels import triton_attention, triton_gemm
from tidar_core.kernels.ops import KVCache, Ops, QKNorm, StepRows, empty_cache, rotary_tables
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.kernels.triton_gemm import exact_linear, product_planner
from tidar_core.kernels.triton_ops import supports, triton_ops
from tidar_core.kernels.triton_tiles import GemmTiles
from tidar_core.layout import BlockForm, Shape, mask_rows
from tidar_core.model.float8 import rounded
from tidar_core.model.weights import LowRank

pytest_plugins = "tests.tidar_core.kernels.interpreter"
pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request):
    return request.param


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error <= TOLERANCE[dtype], float(error)


MASKS = BlockForm()


def step_rows(sequences, page: int, form=MASKS) -> tuple[StepRows, list[int]]:
    """Rows of sequences given as (p, shape), all verify rows first; and the pages that they own."""
    width = -(-max(p + shape.drafts + 1 for p, shape in sequences) // page)
    table = 1 + torch.randperm(len(sequences) * width, generator=torch.Generator().manual_seed(5))
    table = table.to(torch.int32).view(len(sequences), width)
    rows, slots, owned, mask_row = [], [], [], 0
    for index, (p, shape) in enumerate(sequences):
        for position in range(p, p + shape.drafts + 1):
            rows.append((position, index, position + 1, 0, 0))
            slots.append(int(table[index, position // page]) * page + position % page)
        owned += table[index, : -(-(p + shape.drafts + 1) // page)].tolist()
    for index, (p, shape) in enumerate(sequences):
        made = mask_rows(shape.proposals, shape.block, form)
        rows += [
            (p + row.offset, index, p + row.context_offset, mask_row + row.tail_start, mask_row + row.tail_end)
            for row in made
        ]
        mask_row += len(made)
    columns = torch.tensor(rows, dtype=torch.int32).t()
    return StepRows(
        len(slots), *(c.contiguous() for c in columns), table, torch.tensor(slots, dtype=torch.int32)
    ), owned


def random_cache(config, pages: int, page: int, owned: list[int], dtype, generator) -> KVCache:
    """Random pages; NaN in those that nobody owns, the trash page among them."""
    cache = empty_cache(config, pages, page, dtype, CPU)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(torch.nan)
        tensor[:, owned] = torch.randn(tensor[:, owned].shape, generator=generator).to(dtype)
    return cache


def attention_case(sequences, sizes, dtype, page=16, form=MASKS):
    """Ops, qkv, rows and cache of a case; K/V behind each context are NaN."""
    heads, kv_heads, head_dim = sizes
    config = model_config(heads, kv_heads, head_dim)
    assert supports(config, page)
    rows, owned = step_rows(sequences, page, form)
    generator = torch.Generator().manual_seed(1)
    cache = random_cache(config, rows.page_table.numel() + 1, page, owned, dtype, generator)
    for index, (p, shape) in enumerate(sequences):
        end = p + shape.drafts + 1
        if end % page:
            last = int(rows.page_table[index, end // page])
            cache.keys[:, last, :, :, end % page :] = torch.nan
            cache.values[:, last, :, end % page :] = torch.nan
    qkv = torch.randn(len(rows.positions), (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    return triton_ops(config, dtype, CPU), qkv, rows, cache


def check_attention(ops: Ops, qkv, rows, cache, dtype) -> None:
    expected = REFERENCE_OPS.attend(qkv, rows, cache, 1)
    assert expected.isfinite().all()
    close(ops.attend(qkv, rows, cache, 1), expected, dtype)


ALL_SETS = [
    (7 * drafts, Shape(drafts, chosen, 4 if chosen else 0))
    for drafts in range(4)
    for chosen in chain.from_iterable(combinations(range(1, drafts + 2), size) for size in range(drafts + 2))
]
CASES = {
    "one row, empty context": ([(0, Shape())], (6, 1, 32), 16),
    "contexts on page borders": ([(16, Shape(0, (1,), 4)), (31, Shape(1, (2,), 3)), (15, Shape())], (4, 2, 16), 16),
    "contexts on split borders": ([(127, Shape(1)), (1023, Shape(2, (1, 3), 2)), (128, Shape())], (9, 3, 64), 64),
    "a tail longer than a chunk": ([(40, Shape(0, (1,), 20)), (3, Shape(0, (1,), 16))], (3, 1, 128), 32),
    "head size 256": ([(70, Shape(1, (1, 2), 2)), (0, Shape())], (2, 1, 256), 32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_matches_the_oracle(case, dtype):
    sequences, sizes, page = case
    check_attention(*attention_case(sequences, sizes, dtype, page), dtype)


@pytest.mark.parametrize("window", [1, 3, 130, 300])
@pytest.mark.parametrize("case", ["contexts on split borders", "a tail longer than a chunk"])
def test_attention_in_a_window_matches_the_oracle(case, window, dtype):
    """Windows that end within a split, before its first key or before all the context that mask rows have."""
    sequences, sizes, page = CASES[case]
    ops, qkv, rows, cache = attention_case(sequences, sizes, dtype, page)
    check_attention(ops, qkv, rows, replace(cache, windows=(0, window)), dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_over_pages_in_8_bits_matches_the_oracle(case, dtype):
    sequences, sizes, page = case
    ops, qkv, rows, cache = attention_case(sequences, sizes, dtype, page)
    kept = in_8_bits(cache)
    expected = REFERENCE_OPS.attend(qkv, rows, numbers_of(kept, dtype), 1)
    assert expected.isfinite().all()
    close(ops.attend(qkv, rows, kept, 1), expected, dtype)


@pytest.mark.parametrize("form", [BlockForm(), BlockForm("causal"), BlockForm(slot_0="anchor", labels="shifted")])
def test_every_proposal_set_of_block_4_in_one_step(form):
    """30 sequences, 294 rows, 6 query heads for one K/V head; each kind of slot attention in one dtype."""
    dtype = torch.float16 if form == BlockForm() else torch.float32
    case = attention_case(ALL_SETS, (6, 1, 32), dtype, form=form)
    assert len(case[1]) == 294
    check_attention(*case, dtype)


def some_rows(rows: StepRows, verify: range, mask: range) -> StepRows:
    """A step of some rows alone; their tails are counted from the first mask row that stays."""
    index = torch.tensor([*verify, *(rows.verify + k for k in mask)])
    columns = {name: getattr(rows, name)[index] for name in ("positions", "sequence", "context_end")}
    tails = {name: (getattr(rows, name)[index] - mask.start).clamp_min(0) for name in ("tail_start", "tail_end")}
    return replace(rows, verify=len(verify), **columns, **tails)


@pytest.mark.parametrize("window", [0, 200])
def test_a_rows_attention_does_not_depend_on_the_batch(dtype, window, dots_row_by_row):
    """Bit for bit: beside whom, in which tile and part of it, and in which plan a row is attended changes nothing."""
    sequences = [(1040, Shape(3, (2,), 3)), (5, Shape(1)), (300, Shape(1, (1, 2), 3))]
    ops, qkv, rows, cache = attention_case(sequences, (6, 2, 32), dtype)
    cache = replace(cache, windows=(0, window))
    together = ops.attend(qkv, rows, cache, 1)
    for verify, mask in ((range(3, 4), range(0)), (range(5, 6), range(0)), (range(6, 8), range(6, 9))):
        alone = some_rows(rows, verify, mask)
        index = [*verify, *(rows.verify + k for k in mask)]
        assert torch.equal(ops.attend(qkv[index], alone, cache, 1), together[index])


def test_many_rows_are_attended_part_by_part(dtype, monkeypatch, dots_row_by_row):
    ops, qkv, rows, cache = attention_case([(140, Shape()), (90, Shape(69))], (2, 1, 16), dtype)
    whole = ops.attend(qkv, rows, cache, 1)
    monkeypatch.setattr(triton_attention, "LARGEST_PART", 64)
    cut = triton_attention.paged_attend(2, 1, 16, dtype, 3)
    assert torch.equal(cut(qkv, rows, cache, 1), whole)


def test_a_step_may_be_replayed_over_other_contents(dtype):
    """What a captured graph does: the same tensors hold another step of as many rows and pages."""
    ops, qkv, rows, cache = attention_case([(150, Shape(1)), (20, Shape(0, (1,), 3))], (4, 2, 16), dtype)
    _, _, later, other = attention_case([(30, Shape()), (150, Shape(1, (1,), 3))], (4, 2, 16), dtype)
    ops.attend(qkv, rows, cache, 0)
    for name in ("positions", "sequence", "context_end", "tail_start", "tail_end", "page_table", "write_slots"):
        getattr(rows, name).copy_(getattr(later, name))
    for layer in (0, 1):
        close(ops.attend(qkv, rows, other, layer), REFERENCE_OPS.attend(qkv, later, other, layer), dtype)


def test_split_counts_agree_with_the_oracle():
    for keys in (0, 1, 128, 129, 1024, 1025, 3072, 3073, 40960):
        starts = [128 * i for i in range(8)] + [1024 + 256 * i for i in range(8)] + [3072 + 512 * i for i in range(80)]
        assert triton_attention.split_count(keys) == sum(start < keys for start in starts)


def test_tiles_of_a_sequence_meet_at_each_split():
    """Every tile has every split of its sequence's longest row, and tiles that read the same keys are neighbours."""
    _, _, rows, _ = attention_case([(400, Shape(9)), (0, Shape()), (120, Shape(20))], (4, 2, 16), torch.float32)
    tile = 4
    (part,) = triton_attention._plan_parts(rows, tile, 1024, triton_attention.split_count(448), {"OVERLAP": False})
    columns = [
        triton_attention.ITEM_ROW,
        triton_attention.ITEM_ROWS,
        triton_attention.ITEM_SPLIT,
        triton_attention.ITEM_SEQUENCE,
        triton_attention.ITEM_END,
    ]
    listed = [tuple(item) for item in part.items[: int(part.count), [one.value for one in columns]].tolist()]
    expected = []
    for sequence in range(3):
        mine = (rows.sequence == sequence).nonzero().flatten().tolist()
        leads = [(first, mine[at : at + tile]) for at, first in enumerate(mine) if at % tile == 0]
        splits = triton_attention.split_count(int(rows.context_end[mine].max()))
        expected += [
            (first, len(some), split, sequence, int(rows.context_end[some].max()))
            for split in range(splits)
            for first, some in leads
        ]
    assert listed == expected


def test_keys_and_values_in_8_bits_are_those_of_the_definition():
    """Heads of all sizes, one of zeros, and some that are not finite, which shows as NaN."""
    ops, qkv, rows, cache = attention_case([(5, Shape(3))], (2, 2, 32), torch.float32)
    heads = qkv.view(len(qkv), 6, 32)
    heads[0] *= torch.tensor([1.0, 1.0, 1e-30, 1e4, 448.0, 0.0])[:, None]
    heads[1, 4] = torch.linspace(-1.75, 1.75, 32) * 2**8
    heads[2, 5, 3] = torch.inf
    heads[3, 4, 0] = torch.nan
    kept = in_8_bits(KVCache(torch.zeros_like(cache.keys), torch.zeros_like(cache.values)))
    rotary = rotary_tables(model_config(2, 2, 32), CPU)
    actual = ops.rotate_and_store(qkv, rows, rotary, kept, 1, None).view(len(qkv), 6, 32)
    page, offset = rows.write_slots // 16, rows.write_slots % 16
    found = numbers_of(kept, torch.float32)
    torch.testing.assert_close(
        found.keys[1][page, :, :, offset], rounded(actual[:, 2:4]), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(found.values[1][page, :, offset], rounded(actual[:, 4:]), rtol=0, atol=0, equal_nan=True)
    values = found.values[1][page, :, offset]
    assert values[2, 1].isnan().all()
    assert values[3, 0].isnan().tolist() == [True] + [False] * 31
    assert values[:2].isfinite().all()


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_pages_match_the_oracle(page, normed, dtype):
    sequences = [(page - 1, Shape(1, (1, 2), 2)), (0, Shape())]
    ops, qkv, rows, cache = attention_case(sequences, (6, 2, 32), dtype, page)
    for tensor in (cache.keys, cache.values):
        tensor.nan_to_num_()
    other = KVCache(cache.keys.clone(), cache.values.clone())
    generator = torch.Generator().manual_seed(2)
    norms = QKNorm(*(torch.randn(2, 32, generator=generator) * 0.3 + 1).to(dtype), 1e-6) if normed else None
    rotary = rotary_tables(model_config(6, 2, 32), CPU)
    expected = REFERENCE_OPS.rotate_and_store(qkv.clone(), rows, rotary, cache, 1, norms)
    close(ops.rotate_and_store(qkv, rows, rotary, other, 1, norms), expected, dtype)
    close(other.keys, cache.keys, dtype)
    close(other.values, cache.values, dtype)


def test_norm_and_activation_match_the_oracle(dtype):
    ops = triton_ops(model_config(), dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    x = (4 * torch.randn(3, 576, generator=generator)).to(dtype)
    residual, weight = (
        torch.randn(3, 576, generator=generator).to(dtype),
        torch.rand(576, generator=generator).to(dtype),
    )
    for before in (None, residual):
        expected = REFERENCE_OPS.add_norm(x, before, weight, 1e-5)
        actual = ops.add_norm(x, None if before is None else before.clone(), weight, 1e-5)
        close(actual[0], expected[0], dtype)
        assert torch.equal(actual[1], expected[1])
        assert torch.equal(
            ops.add_norm(x[1:2], None if before is None else before[1:2], weight, 1e-5)[0], actual[0][1:2]
        )
    steep = torch.linspace(-300, 300, 2 * 1050).view(1, -1).repeat(2, 1).to(dtype)
    for activation in get_args(Activation):
        close(ops.gate(steep, activation), REFERENCE_OPS.gate(steep, activation), dtype)
        close(ops.gate(steep / 100, activation), REFERENCE_OPS.gate(steep / 100, activation), dtype)
    assert ops.add_norm(torch.full((1, 64), torch.nan, dtype=dtype), None, weight[:64], 1e-5)[0].isnan().all()


TILES = {
    "whole": GemmTiles(16, 32, 32, 1, 4, 2),
    "cut along K": GemmTiles(32, 64, 32, 3, 4, 2),
}


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize(("outs", "ins"), [(72, 100), (64, 96)])
def test_products_match_the_oracle_and_keep_rows_apart(tiles, outs, ins, dtype, dots_row_by_row):
    """Sizes that tiles do and do not divide; the adapter on mask rows; a row's bits among any others."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    linear = exact_linear(product_planner({(outs, ins): tiles}))
    x, weight, bias = 8 * random(37, ins), random(outs, ins), random(1, outs)[0]
    low_rank = LowRank(random(20, ins), random(outs, 20))
    plain = linear(x, weight, None, None, 0)
    close(plain, REFERENCE_OPS.linear(x, weight, None, None, 0), dtype)
    drafted = linear(x, weight, None, low_rank, 21)
    close(drafted, REFERENCE_OPS.linear(x, weight, None, low_rank, 21), dtype)
    assert torch.equal(drafted[:21], plain[:21])
    assert not torch.equal(drafted[21:], plain[21:])
    assert torch.equal(linear(x[23:24], weight, None, low_rank, 0), drafted[23:24])
    biased = linear(x[5:9], weight, bias, low_rank, 4)
    close(biased, REFERENCE_OPS.linear(x[5:9], weight, bias, None, 0), dtype)
    assert torch.equal(linear(x[8:9], weight, bias, None, 1), biased[3:])


def test_tiles_of_many_rows_keep_rows_apart_as_those_of_few_do(dtype, dots_row_by_row):
    """Two tiles of 64 rows are one where there are more, and 130 rows two of these."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    plan = product_planner({(48, 96): GemmTiles(64, 32, 32, 2, 4, 4)})
    linear, x, weight, low_rank = (
        exact_linear(plan),
        8 * random(130, 96),
        random(48, 96),
        LowRank(random(20, 96), random(48, 20)),
    )
    launches = [plan(x[:rows], weight, None, low_rank, 0) for rows in (64, 65, 130)]
    assert [launch.grid for launch in launches] == [(1, 2, 2), (1, 2, 2), (2, 2, 2)]
    assert [launch.named["BLOCK_M"] for launch in launches] == [64, 128, 128]
    many = linear(x, weight, None, low_rank, 70)
    close(many, REFERENCE_OPS.linear(x, weight, None, low_rank, 70), dtype)
    for rows in (slice(0, 64), slice(3, 4), slice(60, 69), slice(66, 130), slice(129, 130)):
        assert torch.equal(linear(x[rows], weight, None, low_rank, max(0, 70 - rows.start)), many[rows])


@triton.jit
def mark(pointers):
    tl.atomic_add(pointers, 1)


@triton.jit
def ask(matrix, LINES: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    triton_gemm.prefetch_shared(matrix, LINES, N, BLOCK_N, SPLITS)


@pytest.mark.parametrize("lines", [0, 1, 5, 6, 40, 97])
def test_programs_share_the_lines_that_they_ask_for(lines, monkeypatch):
    """Every line by somebody, nothing behind the last; programs of further rows ask for none of them."""
    monkeypatch.setattr(triton_gemm, "prefetch", mark)
    words = triton_gemm.LINE.value // 4
    asked = torch.zeros(100, words, dtype=torch.int32)
    ask[(2, 3, 2)](asked, LINES=lines, N=40, BLOCK_N=16, SPLITS=2)
    assert (asked[:lines, 0] > 0).all()
    assert asked[:, 1:].sum() == asked[lines:].sum() == 0


def test_an_adapter_too_wide_for_one_launch(dtype):
    generator = torch.Generator().manual_seed(5)
    x, weight, a, b = (
        torch.randn(s, generator=generator).to(dtype) / 8 for s in ((4, 64), (32, 64), (160, 64), (32, 160))
    )
    ops = triton_ops(model_config(), dtype, CPU)
    close(ops.linear(x, weight, None, LowRank(a, b), 1), REFERENCE_OPS.linear(x, weight, None, LowRank(a, b), 1), dtype)
    logits = ops.head(x, weight)
    assert logits.dtype == torch.float32
    close(logits, x.float() @ weight.float().t(), torch.float32)


@pytest.mark.parametrize("seed", range(60))
def test_what_a_step_leaves_to_the_next_is_what_the_host_would(seed):
    ops = triton_ops(model_config(), torch.float32, CPU)
    carried_rows_match(ops, seed, FORMS[seed % len(FORMS)])
    decisions_match(ops, seed)
