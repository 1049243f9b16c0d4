"""How products are cut into tiles; that the compiler takes the shared memory that is reckoned with is tested where
variants are compiled."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tidar_core.bench.shapes import SHAPES, random_weights
from tidar_core.kernels.triton_gemm import product_planner
from tidar_core.kernels.triton_tiles import SHARED_MEMORY, GemmTiles, Gpu, measured_tiles, shared_memory, tiles_for
from tidar_core.model.weights import LowRank


def test_tiles_of_128_rows_fit_the_shared_memory_beside_an_adapter():
    grown = 0
    for outs, ins, stages, rank in product((32, 64, 128, 256), (64, 128), (3, 4, 5, 6), (0, 16, 32, 64)):
        tiles = tiles_for(GemmTiles(64, outs, ins, 1, 4, stages), 96, torch.bfloat16, rank)
        if tiles.rows == 128:
            grown += 1
            assert shared_memory(tiles, torch.bfloat16, rank) <= SHARED_MEMORY
    assert grown > 50


def test_an_adapter_takes_no_place_on_a_multiprocessor_that_a_product_needs():
    """With an H100's tiles it would for Qwen2.5-1.5B's gate and up alone: 140 programs, two on each of 132."""
    measured = measured_tiles(Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132), torch.bfloat16)
    plan, fewer = product_planner(measured), {}
    for name, config in SHAPES.items():
        weights = random_weights(config, 1, torch.bfloat16, torch.device("meta")).layers[0]
        for rank, rows in product((16, 32, 64), (8, 64, 96)):
            for weight in (weights.qkv, weights.o, weights.gate_up, weights.down):
                outs, ins = weight.shape
                x = torch.empty(rows, ins, dtype=torch.bfloat16, device="meta")
                low_rank = LowRank(x.new_empty(rank, ins), x.new_empty(outs, rank))
                with_it, without = plan(x, weight, None, low_rank, 1), plan(x, weight, None, low_rank, rows)
                same = {key: with_it.named[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS")}
                assert same == {key: without.named[key] for key in same} or rows > 64
                if rows <= 64 and with_it.named["num_stages"] != without.named["num_stages"]:
                    fewer[name, outs, rank] = with_it.named["num_stages"]
    assert fewer == {("Qwen2.5-1.5B", 17920, rank): 3 for rank in (32, 64)}
