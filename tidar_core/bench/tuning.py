"""Which tiles suit a weight on this GPU: every candidate timed at one row and at 64, the best kept as a table.

The table is data for `tidar_core.kernels.triton_gemm.measured_tiles`. A weight has one entry whatever the number of
rows: that is what keeps rows exact. So an entry must serve both ends, and the worse of its two shares decides.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tidar_core.bench.measures import Subject, seconds_a_call
from tidar_core.bench.shapes import projections
from tidar_core.kernels.triton_gemm import GemmTiles, exact_linear, gemm_tiles
from tidar_core.model.weights import LowRank

ROWS = (1, 64)
WIDTHS = (32, 64, 128)
SPLITS = (1, 2, 3, 4, 6, 8)
STAGES = (4, 6)
FEWEST, MOST = 48, 800  # programs


def candidate_tiles(outs: int, ins: int, dtype: torch.dtype) -> Iterator[GemmTiles]:
    """The heuristic's choice, then others around it that use neither too few multiprocessors nor tiny parts of K."""
    start = gemm_tiles(outs, ins, dtype)
    yield start
    for wide in WIDTHS:
        for splits in SPLITS:
            programs, steps = -(-outs // wide) * splits, -(-ins // start.ins) // splits
            if splits > 1 and (steps < 2 or programs > MOST or programs < FEWEST):
                continue
            for stages in STAGES:
                one = GemmTiles(start.rows, wide, start.ins, splits, start.warps, stages)
                if one != start:
                    yield one


def tune(subject: Subject, rows: tuple[int, ...] = ROWS) -> Iterator[dict[str, Any]]:
    """The best tiles of each projection and the head: outs, ins, dtype, tiles, and its shares of read bandwidth."""
    config = subject.config
    for outs, ins in dict.fromkeys((*projections(config).values(), (config.vocab_size, config.hidden_size))):
        size = outs * ins * subject.dtype.itemsize
        weights = [subject.random(outs, ins) for _ in range(1 + subject.extent.cold_bytes // size)]
        low_rank = LowRank(subject.random(32, ins), subject.random(outs, 32))
        found = []
        for tiles in candidate_tiles(outs, ins, subject.dtype):
            linear, shares = exact_linear({(outs, ins): tiles}), []
            for count in rows:
                x = subject.random(count, ins)
                drafts = low_rank if count > 8 and outs != config.vocab_size else None

                def product(call: int, linear: Any, x: torch.Tensor, drafts: LowRank | None) -> torch.Tensor:
                    return linear(x, weights[call % len(weights)], None, drafts, 8)  # noqa: B023  (called at once)

                work = partial(product, linear=linear, x=x, drafts=drafts)
                seconds = seconds_a_call(work, len(weights), subject.device)
                shares.append(size / subject.ceilings.read / seconds)
            found.append((min(shares), shares, tiles))
        _, shares, tiles = max(found, key=lambda one: one[0])
        yield {"outs": outs, "ins": ins, "dtype": str(subject.dtype)[6:], "tiles": asdict(tiles), "shares": shares}
