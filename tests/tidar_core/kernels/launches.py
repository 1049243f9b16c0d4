"""Which Triton kernels a piece of work launches, in which variants, and what the compiler makes of each.

Nothing here needs a GPU: launches are noted instead of made (on tensors of the meta device, so that the largest
model costs no memory), and variants are compiled ahead of time for an architecture. What runs is the product's own
code: what is noted is what would be launched.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tidar_core.bench.shapes import random_adapter, random_weights
from tidar_core.config import ModelConfig
from tidar_core.kernels.ops import StepRows, empty_cache, rotary_tables
from tidar_core.kernels.triton_ops import triton_ops
from tidar_core.kernels.triton_tiles import GemmTiles
from tidar_core.model.decoder import all_layers
from tidar_core.model.weights import pack_model

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as it is compiled: argument types, compile-time constants, 16-byte aligned pointers, options."""

    kernel: JITFunction
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int | None
    overlaps: bool

    @property
    def name(self) -> str:
        kinds = dict(self.types)
        pointers = [kind[1:] for kind in kinds.values() if kind.startswith(("*bf", "*fp"))]
        constants = " ".join(f"{name}={int(value)}" for name, value in self.constants)
        in_8_bits = " ".join(f"{name}=8bit" for name, kind in self.types if kind == "*fp8e4nv")
        named = f"{self.kernel.__name__.lstrip('_')} {pointers[0] if pointers else ''} {in_8_bits} {constants}"
        named = named.replace("  ", " ")
        return f"{named} warps={self.warps}" + (f" stages={self.stages}" if self.stages else "")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the variant and its grid."""

    variant: Variant
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a variant takes: bytes of shared memory, registers a thread, bytes of stack (spilled registers) a thread;
    and how often its PTX has a matrix instruction, one of Hopper's warpgroups, and a 16-byte asynchronous copy.
    copies_ahead: how many groups of such copies may be under way while one that has arrived is computed with.
    prefetches: how many prefetch instructions there are. before_wait: where it may begin while the kernel before it
    runs, how often it touches memory before it waits for that one; -1 if it never waits. sums: of each sum along the
    rows of a tile, how many numbers of a row lie in a thread, a warp and a program: its order."""

    name: str
    shared: int
    registers: int
    stack: int
    matrix_instructions: int
    warpgroup_instructions: int
    wide_copies: int
    copies_ahead: int
    prefetches: int
    before_wait: int | None
    sums: tuple[str, ...]


def noted_launches(work: Callable[[], object]) -> list[Launch]:
    """The launches that `work` asks for, in order; none of them is made."""
    launches = []

    def note(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key, None) for key in ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")}
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        types, constants, aligned = [], [], []
        for index, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                types.append((parameter.name, "constexpr"))
                constants.append((parameter.name, value))
            elif isinstance(value, torch.Tensor):
                types.append((parameter.name, f"*{TYPES[value.dtype]}"))
                if not parameter.do_not_specialize_on_alignment:
                    aligned.append(index)
            else:
                assert isinstance(value, float) or parameter.do_not_specialize, parameter.name
                types.append((parameter.name, "fp32" if isinstance(value, float) else "i32"))
        variant = Variant(
            kernel, tuple(types), tuple(constants), tuple(aligned), options["num_warps"] or 4, options["num_stages"],
            bool(options["launch_pdl"]),
        )  # fmt: skip
        launches.append(Launch(variant, tuple(grid)))

    with patch.object(JITFunction, "run", note):
        work()
    return launches


def compile_variant(variant: Variant, target: GPUTarget = HOPPER) -> Compiled:
    """Compiles a variant down to machine code and reads what it takes."""
    options: dict[str, Any] = {"num_warps": variant.warps, "enable_fp_fusion": True, "launch_pdl": variant.overlaps}
    if variant.stages is not None:
        options["num_stages"] = variant.stages
    attributes = {(index,): [["tt.divisibility", 16]] for index in variant.aligned}
    source = ASTSource(variant.kernel, dict(variant.types), dict(variant.constants), attributes)
    built = triton.compile(source, target=target, options=options)
    used = _resources(built.asm["cubin"])
    ptx = built.asm["ptx"]
    return Compiled(
        name=variant.name,
        shared=built.metadata.shared,
        registers=used["REG"],
        stack=used["STACK"] + used["LOCAL"],
        matrix_instructions=len(re.findall(r"wgmma\.mma_async|\bmma\.sync", ptx)),
        warpgroup_instructions=len(re.findall(r"wgmma\.mma_async", ptx)),
        wide_copies=len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*0x10", ptx)),
        copies_ahead=max((int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        prefetches=len(re.findall(r"prefetch\.global", ptx)),
        before_wait=_touched_before_wait(ptx) if variant.overlaps else None,
        sums=_sums(built.asm["ttgir"]),
    )


def _touched_before_wait(ptx: str) -> int:
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    return len(re.findall(r"\b(?:ld|st|atom|red|cp\.async\.\w+\.shared)\.global", before)) if waits else -1


def _sums(ttgir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.MULTILINE))
    summed = re.findall(r"\}\) : \(tensor<[\dx]+x(\d+)xf32, (#\w+)>\) -> tensor", ttgir)
    along = {name: re.findall(r"(\d+)\]", layouts[name])[:3] for _, name in summed}  # the last of each list of sizes
    return tuple(f"{numbers}: {' '.join(along[name])}" for numbers, name in summed)


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory as `cuobjdump`, which comes with triton, reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown)}
    if len(found) != 3:
        raise RuntimeError(f"cuobjdump says nothing of registers: {shown!r}")
    return found


def meta_rows(verify: int, mask: int, sequences: int, table_width: int) -> StepRows:
    """Rows of a step by their numbers alone, on the meta device."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    rows = verify + mask
    columns = (ints(rows), ints(rows), ints(rows), ints(rows), ints(rows))
    return StepRows(verify, *columns, ints(sequences, table_width), ints(verify))


def step_launches(
    config: ModelConfig, dtype: torch.dtype, page_size: int, verify: int, mask: int, *, layers: int = 1, rank: int = 32,
    measured: Mapping[tuple[int, int], GemmTiles] | None = None, float8: bool = False,
    kv_dtype: torch.dtype | None = None, overlap_launches: bool = True, one_by_one: bool = False,
) -> list[Launch]:  # fmt: skip
    """What one forward pass and the head launch, for a model of `layers` layers of this shape with a drafter.
    one_by_one: as for models whose layers cannot be bound."""
    device = torch.device("meta")
    ops = triton_ops(config, dtype, device, measured=measured, float8=float8, overlap_launches=overlap_launches)
    if one_by_one:
        ops = replace(ops, bind_layers=None)
    weights = pack_model(random_weights(config, layers, dtype, device), ops.pack, ops.pack_head, ops.pack_adapter)
    adapter = random_adapter(config, layers, rank, 8, dtype, device) if mask else None
    cache = empty_cache(config, 64, page_size, kv_dtype or dtype, device)
    rows = meta_rows(verify, mask, 2, 32)
    run_layers = all_layers(ops, replace(config, layers=layers), weights, adapter, rotary_tables(config, device))

    def step() -> None:
        x = torch.empty(verify + mask, config.hidden_size, dtype=dtype, device=device)
        ops.head(run_layers(x, rows, cache)[:verify], weights.head)

    return noted_launches(step)
