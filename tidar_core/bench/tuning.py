"""Which tiles suit a weight on this GPU: every candidate timed at one row and at 64, the best kept as a table.

The table is data for `tidar_core.kernels.triton_tiles.measured_tiles`. A weight has one entry whatever the number of
rows: that is what keeps rows exact. So an entry must serve both ends: the time of one row and of 64 together decides.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from tidar_core.bench.measures import RANK, Subject, seconds_a_call
from tidar_core.bench.shapes import projections
from tidar_core.config import ModelConfig
from tidar_core.kernels.triton_gemm import WIDEST_RANK, exact_linear, product_planner
from tidar_core.kernels.triton_tiles import MOST_SPLITS, SHARED_MEMORY, GemmTiles, gemm_tiles, shared_memory
from tidar_core.model.weights import LowRank

ROWS = (1, 64)
BASE_ROWS = 8  # of them, before those that the adapter is for
WIDTHS = (16, 32, 64, 128, 256)
WIDE = 64  # enough for a weight of many tiles: narrower ones read the rows too often
PROGRAMS = (66, 132, 264, 396)  # aimed at: half a program for each multiprocessor, one, two, three
STAGES = (4, 6)
COMPILERS = 16  # processes


def candidate_tiles(outs: int, ins: int, dtype: torch.dtype) -> list[GemmTiles]:
    """The heuristic's choice, then others that spread a weight over about as many programs as suit the GPU, with steps
    along K as long as the heuristic's and twice that, as far as they fit."""
    start = gemm_tiles(outs, ins, dtype)
    found = [start]
    for step, wide in product((start.ins, 2 * start.ins), WIDTHS):
        tiles, steps = -(-outs // wide), -(-ins // step)
        some = {max(1, min(round(programs / tiles), MOST_SPLITS, steps // 2)) for programs in PROGRAMS}
        many = tiles > PROGRAMS[-1]  # more than run side by side
        if not many or wide >= WIDE:
            found += [
                GemmTiles(start.rows, wide, step, splits, warps, stages)
                for splits in sorted(some)
                for stages in STAGES
                for warps in ((4, 8) if many else (4,))
            ]
    return [one for one in dict.fromkeys(found) if shared_memory(one, dtype, WIDEST_RANK) <= SHARED_MEMORY]


def weights_of(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every product of a model, each once."""
    return list(dict.fromkeys((*projections(config).values(), (config.vocab_size, config.hidden_size))))


def compile_candidates(configs: Iterable[ModelConfig], dtype: torch.dtype) -> None:
    """Runs every candidate once, in several processes, so that measuring finds them compiled on disk."""
    todo = [
        (outs, ins, dtype, tiles, outs == config.vocab_size)
        for config in configs
        for outs, ins in weights_of(config)
        for tiles in candidate_tiles(outs, ins, dtype)
    ]
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        list(pool.map(_run_once, todo, chunksize=4))


def _run_once(task: tuple[int, int, torch.dtype, GemmTiles, bool]) -> None:
    outs, ins, dtype, tiles, is_head = task
    device = torch.device("cuda")
    weight, x = torch.empty(outs, ins, dtype=dtype, device=device), torch.empty(64, ins, dtype=dtype, device=device)
    linear = exact_linear(product_planner({(outs, ins): tiles}))
    for rows in ROWS:
        drafts = not is_head and rows > BASE_ROWS
        low_rank = LowRank(x.new_ones(RANK, ins), x.new_ones(outs, RANK)) if drafts else None
        linear(x[:rows], weight, None, low_rank, BASE_ROWS)
    torch.cuda.synchronize()


def tune(subject: Subject, rows: tuple[int, ...] = ROWS) -> Iterator[dict[str, Any]]:
    """The best tiles of each projection and the head: outs, ins, dtype, tiles, their microseconds at each number of
    rows and those of the heuristic's tiles, and their shares of read bandwidth."""
    config = subject.config
    for outs, ins in weights_of(config):
        size = outs * ins * subject.dtype.itemsize
        weights = [subject.random(outs, ins) for _ in range(1 + subject.extent.cold_bytes // size)]
        adapters = [subject.random_low_rank(outs, ins) for _ in weights]
        found = []
        for tiles in candidate_tiles(outs, ins, subject.dtype):
            linear, times = exact_linear(product_planner({(outs, ins): tiles})), []
            for count in rows:
                x = subject.random(count, ins)
                drafts = outs != config.vocab_size and count > BASE_ROWS

                def product(call: int, linear: Any, x: torch.Tensor, drafts: bool) -> torch.Tensor:
                    nth = call % len(weights)  # noqa: B023  (called at once)
                    return linear(x, weights[nth], None, adapters[nth] if drafts else None, BASE_ROWS)  # noqa: B023

                work = partial(product, linear=linear, x=x, drafts=drafts)
                times.append(seconds_a_call(work, len(weights), subject.device))
            found.append((times, tiles))
        times, tiles = min(found, key=lambda one: sum(one[0]))
        yield {
            "outs": outs, "ins": ins, "dtype": str(subject.dtype)[6:], "tiles": asdict(tiles),
            "microseconds": [round(1e6 * seconds, 2) for seconds in times],
            "before": [round(1e6 * seconds, 2) for seconds in found[0][0]],
            "shares": [round(size / subject.ceilings.read / seconds, 3) for seconds in times],
        }  # fmt: skip
