"""The compiled CPU operations against their torch oracle, and each row's bits against the rest of the batch."""

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.tidar_core.kernels.processors import KINDS_OF_X86, PROCESSORS, flags_for, ops_for
from tidar_core.config import Activation, ModelConfig
from tidar_core.kernels import cpu_build
from tidar_core.kernels.cpu import supports
from tidar_core.kernels.ops import KVCache, QKNorm, StepRows, empty_cache, rotary_tables
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.model.weights import LowRank

PAGE = 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def model_config(heads=6, kv_heads=2, head_dim=32) -> ModelConfig:
    return ModelConfig(
        "llama", 512, 64, 128, 2, heads, kv_heads, head_dim, 1e-5, 10000.0, 512, True, False, False, False, False, (2,)
    )


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=PROCESSORS)
def ops(request, dtype):
    return ops_for(request.param, model_config(), dtype)


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ for x86")
@pytest.mark.parametrize("processor", KINDS_OF_X86)
def test_the_kernels_are_valid_for_every_kind_of_x86(processor):
    source = "\n".join((Path(cpu_build.__file__).parent / name).read_text() for name in cpu_build.SOURCES)
    parts = [f"-DPART_{part}" for part in get_args(cpu_build.Part)]
    done = subprocess.run(
        ["g++", *flags_for(processor), *parts, "-fsyntax-only", "-x", "c++", "-"],
        input=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error <= TOLERANCE[dtype], float(error)


def random_cache(config: ModelConfig, pages: int, dtype: torch.dtype, generator) -> KVCache:
    cache = empty_cache(config, pages, PAGE, dtype, torch.device("cpu"))
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def step_rows(contexts: list[int], verify: int, proposals: int, block: int, pages: int) -> StepRows:
    """`verify` verify rows and `proposals` x `block` mask rows behind each of the contexts, a sequence each."""
    per_sequence = pages // len(contexts)
    table = torch.arange(1, 1 + per_sequence * len(contexts), dtype=torch.int32).view(len(contexts), -1).flip(1)
    rows = []
    slots = []
    for index, context in enumerate(contexts):
        for i in range(verify):
            position = context + i
            rows.append((position, index, position + 1, 0, 0))
            slots.append(int(table[index, position // PAGE]) * PAGE + position % PAGE)
    mask_row = 0
    for index, context in enumerate(contexts):
        for a in range(1, proposals + 1):
            rows += [(context + a + s, index, context + a, mask_row, mask_row + block) for s in range(block)]
            mask_row += block
    columns = torch.tensor(rows, dtype=torch.int32).t().contiguous()
    return StepRows(
        verify * len(contexts), *(column.contiguous() for column in columns), table.contiguous(),
        torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip


ROW_NAMES = ("positions", "sequence", "context_end", "tail_start", "tail_end")
CASES = {
    "one row, empty context": ([0], 1, 0, 0),
    "context on a page border": ([16, 32], 1, 1, 4),
    "every outcome of block 4": ([37, 5, 0], 4, 4, 4),
    "288 rows": ([100, 64, 33, 7], 8, 8, 8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 1, 32), (9, 3, 64), (4, 4, 128), (5, 1, 16)])
def test_rotation_pages_and_attention_match_the_oracle(case, heads, kv_heads, head_dim, dtype, ops):
    contexts, verify, proposals, block = case
    generator = torch.Generator().manual_seed(1)
    config = model_config(heads, kv_heads, head_dim)
    rows = step_rows(contexts, verify, proposals, block, pages=40)
    cache = random_cache(config, 41, dtype, generator)
    other = replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(len(rows.positions), width, generator=generator).to(dtype)
    norms = QKNorm(torch.rand(head_dim, generator=generator).to(dtype), torch.ones(head_dim, dtype=dtype), 1e-6)
    rotary = rotary_tables(config, torch.device("cpu"))
    for qk_norm in (None, norms):
        expected = REFERENCE_OPS.rotate_and_store(qkv.clone(), rows, rotary, cache, 1, qk_norm)
        actual = ops.rotate_and_store(qkv.clone(), rows, rotary, other, 1, qk_norm)
        close(actual, expected, dtype)
        close(other.keys, cache.keys, dtype)
        close(other.values, cache.values, dtype)
    for window in (0, 1, 3, 16, 37):  # layer 1 of the two has it
        seen = replace(cache, windows=(0, window))
        close(ops.attend(expected, rows, seen, 1), REFERENCE_OPS.attend(expected, rows, seen, 1), dtype)


def test_norm_and_activation_match_the_oracle(dtype, ops):
    generator = torch.Generator().manual_seed(2)
    for rows, width in [(1, 64), (5, 576), (64, 576)]:
        x = (4 * torch.randn(rows, width, generator=generator)).to(dtype)
        residual = torch.randn(rows, width, generator=generator).to(dtype)
        weight = torch.rand(width, generator=generator).to(dtype)
        for before in (None, residual):
            expected = REFERENCE_OPS.add_norm(x, before, weight, 1e-5)
            actual = ops.add_norm(x, None if before is None else before.clone(), weight, 1e-5)
            close(actual[0], expected[0], dtype)
            assert torch.equal(actual[1], expected[1])
    steep = torch.cat((torch.linspace(-300, 300, 96), torch.linspace(-4, 4, 32))).repeat(3, 1).to(dtype)
    for activation in get_args(Activation):
        close(ops.gate(steep, activation), REFERENCE_OPS.gate(steep, activation), dtype)
        gate_up = torch.cat((steep, torch.ones_like(steep)), dim=1)
        close(ops.gate(gate_up, activation)[:, 96:], REFERENCE_OPS.gate(gate_up, activation)[:, 96:], dtype)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_activation_of_what_is_far_below_zero_is_zero(dtype, ops, activation):
    """As long as it is a number: e to the -x has none beyond 88, and what stood for it left a hundredth of -1e36."""
    far = [-3.38e38, -1e37, -1e36, -1e30, -1e5, -200, -90, -88.5, -88, -87, -80, 80, 88.5, 1e5, 3e38]
    gate = torch.tensor([*far, -torch.inf, torch.inf, *[0.0] * 15]).to(dtype)
    expected = REFERENCE_OPS.gate(torch.cat([gate, torch.ones_like(gate)])[None], activation)
    actual = ops.gate(torch.cat([gate, torch.ones_like(gate)])[None], activation)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    low = gate < 0
    low[len(far)] = False
    assert (actual[0, low].double() - expected[0, low].double()).abs().max() < 1e-33
    assert torch.equal(actual[0, len(far) - 4 : len(far)], expected[0, len(far) - 4 : len(far)])


@pytest.mark.parametrize("window", [0, 13, 64])
def test_a_rows_attention_does_not_depend_on_the_batch(dtype, ops, window):
    generator = torch.Generator().manual_seed(3)
    config = model_config(9, 3, 64)
    cache = replace(random_cache(config, 41, dtype, generator), windows=(window, 0))
    rows = step_rows([100, 64, 33, 7], 4, 2, 4, pages=40)
    qkv = torch.randn(len(rows.positions), 15 * 64, generator=generator).to(dtype)
    together = ops.attend(qkv, rows, cache, 0)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for row in range(rows.verify):
            alone = replace(
                rows,
                verify=1,
                **{name: getattr(rows, name)[row : row + 1].contiguous() for name in ROW_NAMES},
            )
            assert torch.equal(ops.attend(qkv[row : row + 1].contiguous(), alone, cache, 0)[0], together[row])
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [3e-20, 1e-30])
@pytest.mark.parametrize("context", [100, 700])
def test_what_is_too_small_to_be_normal_does_not_depend_on_the_batch(context, size, ops, dtype):
    """Where products, and the values themselves, are so small that some units take them for zero; of the longer context
    sums of chains cancel out."""
    generator = torch.Generator().manual_seed(9)
    cache = random_cache(model_config(9, 3, 64), 61, dtype, generator)
    cache.keys.mul_(size)
    cache.values.mul_(1e-38)
    rows = step_rows([context], 12, 0, 0, pages=60)
    qkv = size * torch.randn(12, 15 * 64, generator=generator).to(dtype)
    together = ops.attend(qkv, rows, cache, 0)
    assert together.any()
    for row in range(12):
        some = {name: getattr(rows, name)[row:][:1].contiguous() for name in ROW_NAMES}
        alone = ops.attend(qkv[row:][:1].contiguous(), replace(rows, verify=1, **some), cache, 0)
        assert torch.equal(alone, together[row:][:1])


@pytest.mark.parametrize(("context", "window"), [(700, 0), (1500, 530), (4300, 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (20, 1, 16)])
def test_a_long_contexts_attention_depends_on_neither_the_oracle_nor_the_batch(
    context, window, heads, kv_heads, head_dim, dtype, ops
):
    """Of so many keys that they are summed in several chains, and of rows whose scores do not fit together."""
    generator = torch.Generator().manual_seed(8)
    config = model_config(heads, kv_heads, head_dim)
    cache = replace(random_cache(config, 300, dtype, generator), windows=(window, 0))
    rows = step_rows([context, 5], 20, 1, 4, pages=560)
    rows = replace(rows, page_table=rows.page_table % 299 + 1)
    qkv = torch.randn(len(rows.positions), (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    together = ops.attend(qkv, rows, cache, 0)
    close(together, REFERENCE_OPS.attend(qkv, rows, cache, 0), dtype)
    for first, count in ((0, 1), (3, 2), (7, 9), (19, 1), (20, 3)):
        some = {name: getattr(rows, name)[first:][:count].contiguous() for name in ROW_NAMES}
        cut = replace(rows, verify=count, **some)
        assert torch.equal(ops.attend(qkv[first:][:count].contiguous(), cut, cache, 0), together[first:][:count])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(9, 3, 64, 0), (6, 1, 32, 0), (4, 4, 128, 0), (9, 3, 64, 100)]
)
def test_the_oracles_attention_does_not_depend_on_how_a_text_is_cut(heads, kv_heads, head_dim, window):
    """It is what serves where the kernels cannot be built."""
    generator = torch.Generator().manual_seed(5)
    cache = random_cache(model_config(heads, kv_heads, head_dim), 51, torch.float32, generator)
    cache = replace(cache, windows=(window, 0))
    qkv = torch.randn(800, (heads + 2 * kv_heads) * head_dim, generator=generator)
    whole = REFERENCE_OPS.attend(qkv, step_rows([0], 800, 0, 0, pages=50), cache, 0)
    before = torch.get_num_threads()
    for rows in (1, 1, 2, 3, 4, 7, 9, 16, 33, 64):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            start = int(torch.randint(0, 800 - rows, (1,), generator=generator))
            cut = REFERENCE_OPS.attend(qkv[start:][:rows], step_rows([start], rows, 0, 0, pages=50), cache, 0)
            assert torch.equal(cut, whole[start:][:rows]), (start, rows, threads)
    torch.set_num_threads(before)


def test_values_that_a_row_does_not_see_cannot_reach_it(dtype, ops):
    """Neighbouring rows of one sequence go together: what is no number in one's key is not seen by those before."""
    generator = torch.Generator().manual_seed(4)
    config = model_config(9, 3, 64)
    cache = random_cache(config, 41, dtype, generator)
    rows = step_rows([37], 8, 0, 0, pages=40)
    qkv = torch.randn(len(rows.positions), 15 * 64, generator=generator).to(dtype)
    clean = ops.attend(qkv, rows, cache, 0)
    place = int(rows.write_slots[5])
    cache.values[0, place // PAGE, :, place % PAGE] = torch.nan
    poisoned = ops.attend(qkv, rows, cache, 0)
    assert torch.equal(poisoned[:5], clean[:5])
    assert poisoned[5:].isnan().all()


def test_values_before_a_rows_window_cannot_reach_it(dtype, ops):
    """Of neighbouring rows some still see a key that others do not see any more."""
    generator = torch.Generator().manual_seed(4)
    cache = replace(random_cache(model_config(9, 3, 64), 41, dtype, generator), windows=(20, 0))
    rows = step_rows([37], 8, 0, 0, pages=40)
    qkv = torch.randn(len(rows.positions), 15 * 64, generator=generator).to(dtype)
    clean = ops.attend(qkv, rows, cache, 0)
    first_unseen = 40 - 19 - 1  # of the row at position 40
    page, offset = int(rows.page_table[0, first_unseen // PAGE]), first_unseen % PAGE
    cache.values[0, page, :, offset] = torch.nan
    poisoned = ops.attend(qkv, rows, cache, 0)
    assert torch.equal(poisoned[3:], clean[3:])
    assert poisoned[:3].isnan().all()


def test_not_a_number_stays_one(dtype, ops):
    x = torch.full((2, 64), torch.nan, dtype=dtype)
    assert ops.add_norm(x, None, torch.ones(64, dtype=dtype), 1e-5)[0].isnan().all()
    for activation in get_args(Activation):
        assert ops.gate(x, activation).isnan().all()


def test_sizes_that_the_kernels_do_not_fit_are_known():
    assert supports(model_config(), PAGE)
    assert not supports(model_config(), 32)
    assert not supports(replace(model_config(), head_dim=20), PAGE)


@pytest.mark.parametrize(("ins", "outs", "rank"), [(64, 96, 16), (160, 32, 32), (48, 64, 48), (32, 160, 80)])
def test_a_rows_products_do_not_depend_on_how_many_there_are(ins, outs, rank, dtype, ops):
    """Bit for bit, where the drafter begins among them too: rows that it touches, and rows that it does not."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weight, bias, x = ops.pack(random(outs, ins)), random(1, outs)[0], 8 * random(131, ins)
    drafter = LowRank(ops.pack_adapter(random(rank, ins)), ops.pack_adapter(random(outs, rank)))
    said, drafted = ops.linear(x, weight, bias, None, 131), ops.linear(x, weight, bias, drafter, 0)
    logits = ops.head(x, weight)
    assert not torch.equal(said, drafted)
    assert ops.linear(x[:0], weight, bias, drafter, 0).shape == (0, outs)
    for rows in (*range(1, 20), 31, 32, 33, 48, 49, 64, 65, 96, 130):
        some = x[:rows].clone()
        assert torch.equal(ops.head(some, weight), logits[:rows])
        for first in {0, 1, rows // 2, rows - 1, rows}:
            found = ops.linear(some, weight, bias, drafter, first)
            assert torch.equal(found[:first], said[:first]), (rows, first)
            assert torch.equal(found[first:], drafted[first:rows]), (rows, first)


@pytest.mark.parametrize(("ins", "outs", "rank"), [(64, 96, 16), (160, 32, 32), (48, 64, 80), (96, 640, 16)])
def test_products_do_not_depend_on_the_number_of_threads(ins, outs, rank, dtype, ops):
    """Bit for bit, whether each computes all of the drafter's narrow product or they share it, as many do."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weight, x = ops.pack(random(outs, ins)), random(70, ins)
    drafter = LowRank(ops.pack_adapter(random(rank, ins)), ops.pack_adapter(random(outs, rank)))
    for rows, first in [(1, 0), (19, 3), (70, 0), (70, 41), (70, 69)]:
        found = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(ops.linear(x[:rows], weight, None, drafter, first))
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("rank", [4, 16, 32])
def test_packed_products_match_the_oracle_and_keep_rows_apart(rank, dtype, ops):
    generator = torch.Generator().manual_seed(4)

    def random(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weight, bias = random(320, 64), random(1, 320)[0]
    low_rank = LowRank(random(rank, 64), random(320, rank))
    packed = LowRank(ops.pack_adapter(low_rank.a), ops.pack_adapter(low_rank.b))
    x = random(300, 64)
    for rows, first in [(1, 1), (1, 0), (3, 3), (13, 4), (40, 8), (300, 30)]:
        exact = REFERENCE_OPS.linear(
            x[:rows].double(),
            weight.double(),
            bias.double(),
            LowRank(*(t.double() for t in (low_rank.a, low_rank.b))),
            first,
        )
        for chosen, oracle in ((packed, exact), (None, REFERENCE_OPS.linear(x[:rows], weight, bias, None, rows))):
            close(ops.linear(x[:rows], ops.pack(weight), bias, chosen, first), oracle, dtype)
    logits = ops.head(x, ops.pack(weight))
    assert logits.dtype is torch.float32
    assert ops.row_multiple == 1
    close(logits, x.double() @ weight.double().t(), dtype)
    whole = ops.linear(x, ops.pack(weight), bias, packed, 100)
    for row in (0, 57, 99):
        assert torch.equal(ops.linear(x[row : row + 1], ops.pack(weight), bias, packed, 1)[0], whole[row])
        assert torch.equal(ops.head(x[row : row + 1], ops.pack(weight))[0], logits[row])
