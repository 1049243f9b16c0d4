"""`tidar bench kernels` at toy size on interpreted kernels: what runs on a GPU is this code. Run by
`test_triton_interpreted.py`, in a process where TRITON_INTERPRET=1 was set before triton was imported."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from tidar_core.bench import kernel_checks, layer_checks
from tidar_core.bench.checking import Check, Sizes
from tidar_core.bench.expert_checks import check_experts
from tidar_core.bench.kernel_checks import check_kernels
from tidar_core.bench.kernels import show_kernel_bench
from tidar_core.bench.layer_checks import check_layers
from tidar_core.bench.measures import Ceilings, Extent, Subject, measure_all, measure_ceilings
from tidar_core.bench.shapes import QWEN3_8B, projections
from tidar_core.bench.steps import GRID, measure_prefill, measure_steps, random_model
from tidar_core.bench.tuning import candidate_tiles, tune
from tidar_core.kernels import reference, triton_tiles
from tidar_core.kernels.triton_ops import triton_ops
from tidar_core.kernels.triton_tiles import GemmTiles, Gpu, measured_tiles
from tidar_core.layout import Shape

pytest_plugins = "tests.tidar_core.kernels.interpreter"

CPU = torch.device("cpu")
TOY = replace(
    QWEN3_8B, vocab_size=600, hidden_size=64, intermediate_size=96, layers=1, heads=6, kv_heads=2, head_dim=32,
    max_positions=300,
)  # fmt: skip
SIZES = Sizes(contexts=(1, 16, 130), rows=(1, 3, 17), rank=8, block=3, experts=6)
EXTENT = Extent(
    rows=(1, 9), contexts=(20, 400), read_bytes=1 << 18, cold_bytes=1,
    matrix=64, calls=1,
)  # fmt: skip


KERNELS = {
    "add_norm",
    "gate",
    "rotate_and_store",
    "attend",
    "linear",
    "attend, window",
    "attend, 8 bits",
    "rotate_and_store, 8 bits",
    "head",
    "pick",
    "pick_listed",
    "route",
    "mix_experts",
    "succession",
    "second view",
}
IN_LAYERS = {"rotated", "added o", "gated", "added down"}
IN_16_BITS = {"linear, 8 bits", "mix_experts, 8 bits", "attend_blocks"}


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure_ceilings(CPU, EXTENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # 16 bits for bf16, which is not right interpreted
def test_every_check_passes(dtype, dots_row_by_row):
    checks = list(check_kernels(triton_ops(TOY, dtype, CPU), TOY, dtype, CPU, SIZES))
    assert [check for check in checks if not check.passed] == []
    assert {check.kernel for check in checks} == KERNELS | IN_LAYERS | (IN_16_BITS if dtype.itemsize == 2 else set())
    assert {check.kernel for check in checks[: len(IN_LAYERS)]} <= IN_LAYERS, "where time ends soon, layers are told"


@pytest.mark.parametrize("outs", [16, 64, 128])
def test_what_a_layers_products_do_besides_does_not_depend_on_their_tiles(outs, monkeypatch, dots_row_by_row):
    """Tiles narrower than a head and wider than two of them, and parts along K."""
    tiles = {size: GemmTiles(16, outs, 16, 3, 4, 2) for size in projections(TOY).values()}
    monkeypatch.setattr(layer_checks, "tiles_of", lambda device, dtype: tiles)
    checks = list(check_layers(TOY, torch.float32, CPU, SIZES))
    assert [check for check in checks if not check.passed] == []
    assert {check.kernel for check in checks} == IN_LAYERS


def test_a_wrong_kernel_is_found():
    wrong = replace(triton_ops(TOY, torch.float32, CPU), gate=lambda *given: reference.gate(*given) * 1.001)
    checks = list(kernel_checks._check_rows(wrong, TOY, torch.float32, CPU))
    assert {check.kernel for check in checks} == {"add_norm", "gate"}
    assert [check.kernel for check in checks if check.allowed and not check.passed] == ["gate"] * 2
    assert not Check("linear", "NaN", "float32", float("nan"), 1.0).passed


def test_wrong_bits_and_shares_of_experts_are_found(dots_row_by_row):
    right = triton_ops(TOY, torch.float32, CPU)
    wrong = replace(
        right,
        route=lambda x, router, bias, experts: right.route(x, router, None, experts),
        mix_experts=lambda x, *given: right.mix_experts(x, *given) * (1 + 1e-6 * (len(x) == 1)),
    )
    checks = list(check_experts(wrong, TOY, torch.float32, CPU, SIZES))
    assert [(check.kernel, check.case) for check in checks if not check.passed] == [
        ("route", "sigmoid, 7 rows"), ("mix_experts", "bits at (1, 3, 17) rows"),
    ]  # fmt: skip


def test_a_second_view_is_right_one_operation_after_the_other(dots_row_by_row):
    ops = replace(triton_ops(TOY, torch.float16, CPU), bind_layers=None)
    checks = list(kernel_checks._check_second_view(ops, TOY, torch.float16, CPU, SIZES))
    assert [check for check in checks if not check.passed] == []


def test_mask_rows_by_the_bases_projections_are_found(dots_row_by_row):
    right = triton_ops(TOY, torch.float32, CPU)
    wrong = replace(right, bind_layers=lambda weights, adapter, rotary: right.bind_layers(weights, None, rotary))
    checks = list(kernel_checks._check_second_view(wrong, TOY, torch.float32, CPU, SIZES))
    assert [(check.kernel, check.case) for check in checks if not check.passed] == [("second view", "27 mask rows")]


def test_wrong_bits_of_a_layer_are_found(monkeypatch, dots_row_by_row):
    real = layer_checks.gated_linear

    def depends_on_the_batch(plan, normed, *given):
        return real(plan, normed, *given) * (1 + 1e-6 * (len(normed.x) == 1))

    monkeypatch.setattr(layer_checks, "gated_linear", depends_on_the_batch)
    checks = list(check_layers(TOY, torch.float32, CPU, SIZES))
    assert [(check.kernel, check.case) for check in checks if not check.passed] == [("gated", "bits of a row alone")]


def test_steps_and_prompts_are_measured(ceilings):
    torch.set_num_threads(1)
    subject = Subject("toy", TOY, triton_ops(TOY, torch.float32, CPU), torch.float32, CPU, ceilings, EXTENT)
    model = random_model(subject)
    grid = ((2, Shape()), (1, Shape(1, (1, 2), 2)))
    steps = list(measure_steps(subject, model, (20, 400), grid))
    assert [(step.rows, step.verify, step.mask, step.adapter) for step in steps] == [(2, 2, 0, False), (6, 2, 4, True)]
    assert all(step.microseconds > 0 and step.context == 20 and step.share > 0 for step in steps)
    assert [shape.verify_rows * count + shape.mask_rows * count for count, shape in GRID] == [
        1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 288,
    ]  # fmt: skip
    (prompt,) = measure_prefill(subject, model, (40, 400), chunk=24)
    assert (prompt.tokens, prompt.chunk) == (40, 24)
    assert prompt.milliseconds > 0


def test_steps_in_8_bits_are_measured(ceilings):
    torch.set_num_threads(1)
    ops = triton_ops(TOY, torch.float32, CPU, float8=True)
    model = random_model(Subject("toy", TOY, ops, torch.float32, CPU, ceilings, EXTENT))
    assert model.pages(3, 16).keys.element_size() == model.weights.layers[0].down.element_size() == 1
    subject = Subject("toy", TOY, ops, torch.float32, CPU, ceilings, EXTENT)
    (step,) = measure_steps(subject, model, (20,), ((1, Shape(1, (1,), 2)),))
    assert (step.rows, step.adapter) == (4, True)
    assert step.microseconds > 0


def test_everything_is_measured_and_shown(ceilings):
    torch.set_num_threads(1)
    assert ceilings.read > 0
    assert ceilings.multiply > 0
    ops = triton_ops(TOY, torch.float32, CPU)
    measures = list(measure_all(Subject("toy", TOY, ops, torch.float32, CPU, ceilings, replace(EXTENT, rows=(9,)))))
    assert {one.kernel for one in measures} >= {"linear", "head", "attend", "add_norm", "pick, sampled"}
    assert all(one.microseconds > 0 for one in measures)
    assert not any("context 400" in one.case for one in measures)
    check = Check("attend", "a row", "float32", 1.0, 0.5)
    record = {
        "device": "cpu", "ceilings": asdict(ceilings), "measures": [asdict(one) for one in measures],
        "checks": [check.as_record()],
    }  # fmt: skip
    console = Console(record=True, width=160)
    assert not show_kernel_bench(record, console)
    shown = console.export_text()
    assert "qkv, 9 rows, adapter on all but 8" in shown
    assert "0 of 1 checks passed" in shown


def test_tuned_tiles_are_found_again_by_the_kernels(ceilings, monkeypatch, tmp_path):
    monkeypatch.setattr("tidar_core.bench.tuning.candidate_tiles", lambda *given: [*candidate_tiles(*given)][:2])
    ops = triton_ops(TOY, torch.float32, CPU)
    subject = Subject("toy", TOY, ops, torch.float32, CPU, ceilings, EXTENT)
    entries = list(tune(subject, rows=(1, 9)))
    sizes = {(320, 64), (64, 192), (192, 64), (64, 96), (600, 64)}
    assert {(entry["outs"], entry["ins"]) for entry in entries} == sizes
    (tmp_path / "data").mkdir()
    tables = {
        "other": {"capability": [9, 0], "processors": 132, "weights": []},
        "some GPU": {"capability": [9, 0], "processors": 132, "weights": entries},
        "small": {"capability": [8, 9], "processors": 58, "weights": entries},
    }
    (tmp_path / "data" / "gemm_tiles.json").write_text(json.dumps(tables))
    monkeypatch.setattr(triton_tiles.resources, "files", lambda package: tmp_path)
    measured = measured_tiles(Gpu("some GPU", (9, 0), 132), torch.float32)
    assert set(measured) == sizes
    assert asdict(measured[600, 64]) == entries[-1]["tiles"]
    assert measured_tiles(Gpu("some GPU", (9, 0), 132), torch.bfloat16) == {}
    assert measured_tiles(Gpu("small one's sister", (8, 9), 58), torch.float32) == measured
    assert measured_tiles(Gpu("a smaller one", (8, 9), 46), torch.float32) == {}


def test_an_h200_takes_the_tiles_of_an_h100():
    known = measured_tiles(Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132), torch.bfloat16)
    assert len(known) == 15
    assert measured_tiles(Gpu("NVIDIA H200", (9, 0), 132), torch.bfloat16) == known


def test_candidates_keep_every_multiprocessor_busy():
    for outs, ins in ((576, 576), (576, 1536), (4096, 12288), (151936, 4096)):
        candidates = list(candidate_tiles(outs, ins, torch.bfloat16))
        assert len(candidates) == len(set(candidates)) >= 6
        assert all(tiles.rows == 64 for tiles in candidates)
        assert {tiles.ins for tiles in candidates} == {64, 128}
