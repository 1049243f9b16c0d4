"""How matrix products are cut into tiles on a GPU: as measured for a weight, else by rule; then by the step's rows.

What decides a row's bits (outputs of a tile, K steps, splits) is a weight's own and stays; how many rows a tile has,
and how far ahead it copies, may follow the step.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources

import torch

PROGRAMS_AIMED_AT = 128  # about one for each multiprocessor of an H100 or H200
MOST_SPLITS = 8
STEPS_A_SPLIT = 4  # fewer K steps than this leave nothing to pipeline
WARPGROUP = 4  # warps that share Hopper's matrix instruction
WARPGROUP_ROWS = 64  # that it multiplies
SHARED_MEMORY = 227 << 10  # bytes that one program may have on Hopper
RESERVED = 1 << 10  # bytes that each program takes beside its own, of one KiB more
FEWEST_STAGES = 3  # one that is multiplied, two that are on their way


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """One tile of y is rows x outs; K goes in steps of `ins`, cut into `splits` parts."""

    rows: int
    outs: int
    ins: int
    splits: int
    warps: int
    stages: int


def gemm_tiles(outs: int, ins: int, dtype: torch.dtype) -> GemmTiles:
    """The tiles for a weight [outs, ins] where none were measured.

    Wide tiles read x less often, which counts at 64 rows; narrow ones spread a small weight over more programs.
    """
    if dtype == torch.float32:
        rows, wide, step, stages = 16, 32, 32, 3
    else:
        megabytes = outs * ins * dtype.itemsize / 2**20
        wide = 128 if megabytes >= 8 else 64 if megabytes >= 2 else 32
        rows, step, stages = 64, 128 // dtype.itemsize, 4
    # Four warps have no register left where wide tiles of 8-bit weights are widened, and spill beside a wide adapter.
    warps = 8 if dtype.itemsize == 1 and wide == 128 else 4
    fitting = -(-ins // step) // STEPS_A_SPLIT
    wanted = round(PROGRAMS_AIMED_AT / -(-outs // wide))
    return GemmTiles(rows, wide, step, max(1, min(wanted, fitting, MOST_SPLITS)), warps, stages)


def tiles_for(tiles: GemmTiles, rows: int, dtype: torch.dtype, rank: int) -> GemmTiles:
    """The tiles of a weight on Hopper in a step of so many rows of a dtype, beside an adapter of a rank.

    Where one tile of 64 does not hold the rows, tiles are of 128: one warpgroup, four warps, multiplies the first 64,
    a second one those behind, each as a tile of 64 is multiplied, in the same order along K, so that no bit changes.
    Some tiles stay as they are: those of fp32, those that two warpgroups share already (a row's numbers would lie in
    other threads and be summed up in another order), and those that would leave no room for copies ahead.
    """
    if (tiles.rows, tiles.warps) != (WARPGROUP_ROWS, WARPGROUP) or rows <= WARPGROUP_ROWS:
        return tiles
    large = replace(tiles, rows=2 * WARPGROUP_ROWS, warps=2 * WARPGROUP)
    return next((one for one in _fewer_stages(large) if shared_memory(one, dtype, rank) <= SHARED_MEMORY), tiles)


def tiles_beside(tiles: GemmTiles, dtype: torch.dtype, rank: int, programs: int, multiprocessors: int) -> GemmTiles:
    """The tiles of a product of so many programs on Hopper beside an adapter of a rank.

    Where its matrices leave a multiprocessor room for fewer programs at once than it has without them, so that some
    wait until others are through, copies have fewer stages: that changes no bit. By reckoning, not measured yet.
    """
    alone, beside = _programs_at_once(tiles, dtype, 0), _programs_at_once(tiles, dtype, rank)
    if beside >= alone or programs <= multiprocessors * beside:
        return tiles
    return next((one for one in _fewer_stages(tiles) if _programs_at_once(one, dtype, rank) >= alone), tiles)


def shared_memory(tiles: GemmTiles, dtype: torch.dtype, rank: int) -> int:
    """Bytes that a program of a product takes, beside an adapter of a rank (0: of none)."""
    staged = (tiles.rows + tiles.outs + rank) * tiles.ins * tiles.stages
    return (staged + tiles.outs * rank) * dtype.itemsize  # the adapter's second matrix lies there from start to end


def _programs_at_once(tiles: GemmTiles, dtype: torch.dtype, rank: int) -> int:
    """How many programs share a multiprocessor's memory."""
    return (SHARED_MEMORY + RESERVED) // (shared_memory(tiles, dtype, rank) + RESERVED)


def _fewer_stages(tiles: GemmTiles) -> Iterator[GemmTiles]:
    """The tiles as they are, then with ever fewer stages."""
    return (replace(tiles, stages=stages) for stages in range(tiles.stages, FEWEST_STAGES - 1, -1))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: its name, its compute capability and its number of multiprocessors."""

    name: str
    capability: tuple[int, int]
    processors: int


def gpu_of(device: torch.device) -> Gpu:
    """The kind of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count)


def measured_tiles(gpu: Gpu, dtype: torch.dtype) -> dict[tuple[int, int], GemmTiles]:
    """The measured tiles by weight (outs, ins), for one dtype: from a GPU of this name, else from one with as many
    multiprocessors of the same architecture (an H200 is an H100 with other memory). Empty where none was measured."""
    path = resources.files("tidar_core").joinpath("data", "gemm_tiles.json")
    tables = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    alike = [
        table
        for table in tables.values()
        if (tuple(table["capability"]), table["processors"]) == (gpu.capability, gpu.processors)
    ]
    table = tables.get(gpu.name) or (alike[0] if alike else {"weights": []})
    return {
        (entry["outs"], entry["ins"]): GemmTiles(**entry["tiles"])
        for entry in table["weights"]
        if entry["dtype"] == str(dtype).removeprefix("torch.")
    }
