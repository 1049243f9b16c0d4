"""The compile gate: every Triton kernel variant in use becomes machine code for sm_90 that fits and spills nothing."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(3600),  # of what tests of servers leave idle
]
ROOT = Path(__file__).parents[3]
RESERVED = 1024  # bytes of shared memory that each program takes besides its own, of 228 KiB
REGISTERS = 1 << 16  # of a multiprocessor; each thread has a multiple of eight
TRAINING = ("attend_blocks", "attend_blocks_back")
PRODUCTS = ("linear", "rotated_linear", "added_linear", "gated_linear")
HEAVY = {*PRODUCTS, "expert_linear", "attend_splits"}
EXPERTS = {"choose", "list_rows", "expert_linear", "add_shares"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    settings["TRITON_DISABLE_LINE_INFO"] = "1"  # takes a sixth of the time and changes no instruction
    command = [sys.executable, "-m", "tests.tidar_core.kernels.compiled_variants"]
    done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_variant_fits_a_multiprocessor_and_spills_nothing(compiled, capsys):
    from tidar_core.kernels.triton_tiles import SHARED_MEMORY

    most = max(one["shared"] for one in compiled), max(one["registers"] for one in compiled)
    with capsys.disabled():
        print(f"\n  {len(compiled)} variants for sm_90: at most {most[0]} B shared, {most[1]} registers", end="")
    assert len({one["name"] for one in compiled}) == len(compiled)
    assert [one["name"] for one in compiled if one["shared"] > SHARED_MEMORY] == []
    assert [one["name"] for one in compiled if one["stack"] > 0] == []


def test_a_rows_sums_have_one_order_whatever_the_step(compiled):
    """A product has variants for few rows and for many, with an adapter and without: whether the parts of a row's
    squares lie alike in the threads of all of them is the compiler's choice."""
    orders, rows = defaultdict(set), defaultdict(set)
    for one in compiled:
        if one["name"].split()[0] in PRODUCTS and one["sums"]:
            sizes = re.findall(r"\S+=8bit|\b(?:N|K|BLOCK_N|BLOCK_K|SPLITS|PARTS)=\d+", one["name"])
            weight = " ".join([*one["name"].split()[:2], *sizes])
            orders[weight].add(tuple(one["sums"]))
            rows[weight].add(re.search(r"BLOCK_M=(\d+)", one["name"])[1])
    assert [weight for weight, found in orders.items() if len(found) > 1] == []
    assert [found for found in rows.values() if found == {"64", "128"}][11:], "little is compared"


def test_hopper_reads_wide_and_multiplies_with_its_own_instruction(compiled):
    """16-byte asynchronous copies of weights, keys and values; 16-bit products by the matrix unit, and by its
    warpgroup instruction unless a head is so large that 64 rows of it would not fit the registers."""
    heavy = [one for one in compiled if one["name"].split()[0] in HEAVY]
    assert {one["name"].split()[0] for one in heavy} == HEAVY
    assert [one["name"] for one in heavy if one["wide_copies"] == 0] == []
    bf16 = [one for one in heavy if " bf16 " in one["name"]]
    assert [one["name"] for one in bf16 if one["matrix_instructions"] == 0] == []
    small = [one for one in bf16 if "HEAD_DIM=256" not in one["name"]]
    assert [one["name"] for one in small if one["warpgroup_instructions"] == 0] == []


def test_what_comes_next_is_on_its_way_while_a_tile_is_computed_with(compiled):
    """Two groups of copies at least (keys and values, or rows and weights) may be under way behind those that are
    waited for, wherever numbers are of 16 bits or fewer: else each tile would pay memory's latency anew."""
    heavy = [one for one in compiled if one["name"].split()[0] in HEAVY]
    assert [one["name"] for one in heavy if " fp32 " not in one["name"] and one["copies_ahead"] < 2] == []


def test_products_take_the_shared_memory_that_is_reckoned_with(compiled):
    """Within a few KiB for what is exchanged at the end: `tiles_beside` counts places by it."""
    import torch

    from tidar_core.kernels.triton_tiles import GemmTiles, shared_memory

    looked = 0
    for one in compiled:
        if one["name"].split()[0] in PRODUCTS and " bf16 " in one["name"] and "8bit" not in one["name"]:
            sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", one["name"])}
            sizes["rank"] = sizes["BLOCK_RANK"] if sizes["HAS_LOW_RANK"] else 0
            named = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "warps", "stages")
            reckoned = shared_memory(GemmTiles(*(sizes[name] for name in named)), torch.bfloat16, sizes["rank"])
            looked += sizes["rank"] > 0
            assert reckoned <= one["shared"] <= reckoned + 4096, (one["name"], reckoned, one["shared"])
    assert looked > 20


@pytest.mark.parametrize("kernel", ["attend_splits", "expert_linear"])
def test_two_programs_share_a_multiprocessor(compiled, kernel):
    from tidar_core.kernels.triton_ops import PROGRAMS_A_PROCESSOR
    from tidar_core.kernels.triton_tiles import SHARED_MEMORY

    programs = [one for one in compiled if one["name"].startswith(kernel)]
    room = (SHARED_MEMORY + RESERVED) // PROGRAMS_A_PROCESSOR - RESERVED
    threads = {one["name"]: 32 * int(re.search(r"warps=(\d+)", one["name"])[1]) for one in programs}
    most = REGISTERS // PROGRAMS_A_PROCESSOR
    assert [one["name"] for one in programs if one["shared"] > room] == []
    assert [one["name"] for one in programs if -(-one["registers"] // 8) * 8 * threads[one["name"]] > most] == []


def test_the_trainers_attention_copies_ahead_and_multiplies_by_warpgroups(compiled):
    training = [one for one in compiled if one["name"].split()[0] in TRAINING]
    assert {one["name"].split()[0] for one in training} == set(TRAINING)
    assert [one["name"] for one in training if one["copies_ahead"] < 2 or one["wide_copies"] == 0] == []
    assert [one["name"] for one in training if one["matrix_instructions"] > one["warpgroup_instructions"]] == []


def test_a_kernel_that_begins_early_waits_before_it_touches_memory(compiled):
    early = [one for one in compiled if one["before_wait"] is not None]
    kinds = {one["name"].split()[0] for one in early}
    others = {"add_norm", "rotate_and_store", "plan", "merge", "gate_rows"}
    assert kinds == HEAVY | EXPERTS | others
    assert [one["name"] for one in early if one["before_wait"] != 0] == []
    assert any(one["before_wait"] is None for one in compiled), "steps of many rows stand in line"


def test_products_ask_for_weights_before_they_need_them(compiled):
    """Those of a layer for the next one's as well; in steps of many rows, which stand in line, none does."""
    products = [one for one in compiled if one["name"].split()[0] in PRODUCTS]
    early = [one for one in products if one["before_wait"] is not None]
    assert [one["name"] for one in early if one["prefetches"] == 0] == []
    assert [one["name"] for one in products if one not in early and one["prefetches"]] == []
    in_layers = [one for one in early if not one["name"].startswith("linear")]
    assert in_layers
    assert [one["name"] for one in in_layers if "PREFETCH_LINES=0 " in one["name"]] == []


@pytest.mark.parametrize("mask", [0, 56])
@pytest.mark.parametrize(("shape", "one_by_one", "launches"), [(0, False, 6), (2, False, 7), (0, True, 10)])
def test_how_many_launches_a_layer_is(shape, one_by_one, launches, mask):
    """With or without the adapter; Qwen3's norm of heads is one more. The attention's plan is made once a step."""
    import torch

    from tests.tidar_core.kernels.launches import step_launches
    from tidar_core.bench.shapes import SHAPES

    config = list(SHAPES.values())[shape]
    steps = (
        step_launches(config, torch.bfloat16, 16, 8, mask, layers=layers, one_by_one=one_by_one) for layers in (1, 3)
    )
    names = [[launch.variant.kernel.__name__ for launch in step] for step in steps]
    assert len(names[1]) - len(names[0]) == 2 * launches
    assert names[1].count("_plan") == names[0].count("_plan") == 1


@pytest.mark.parametrize(("rows", "launches"), [(1, 12), (8, 12), (9, 13), (64, 13)])
def test_how_many_launches_a_layer_of_experts_is(rows, launches):
    """Their entries are listed where one tile does not hold them all, and only there."""
    import torch

    from tests.tidar_core.kernels.launches import step_launches
    from tidar_core.bench.shapes import QWEN3_30B_A3B

    steps = (step_launches(QWEN3_30B_A3B, torch.bfloat16, 16, rows, 0, layers=layers) for layers in (1, 3))
    one, three = ([launch.variant.kernel.__name__ for launch in step] for step in steps)
    assert len(three) - len(one) == 2 * launches
    assert three.count("_list_rows") == (3 if rows > 8 else 0)


@pytest.mark.parametrize(("shape", "one_by_one"), [(0, False), (2, False), (0, True)])
def test_launches_overlap_unless_told_not_to(shape, one_by_one):
    import torch

    from tests.tidar_core.kernels.launches import step_launches
    from tidar_core.bench.shapes import SHAPES

    config = list(SHAPES.values())[shape]
    for overlap_launches in (True, False):
        launches = step_launches(
            config, torch.bfloat16, 16, 8, 56, overlap_launches=overlap_launches, one_by_one=one_by_one
        )
        assert {launch.variant.overlaps for launch in launches} == {overlap_launches}


def test_the_bench_says_in_one_line_what_it_needs(monkeypatch):
    import torch

    from tidar_core.bench.kernels import run_kernel_bench
    from tidar_core.config import ConfigError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU") as caught:
        run_kernel_bench(print)
    assert "\n" not in str(caught.value)
