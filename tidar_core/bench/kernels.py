"""`tidar bench kernels`: are the GPU's kernels right, and how near are they to what the GPU can do?

Every kernel against its oracle on fresh random inputs (`kernel_checks.py`), then the two ceilings, measured here and
now, and each kernel's time and share of them (`measures.py`); on demand a search for better tiles (`tuning.py`).
Needs an NVIDIA GPU and triton, neither ray nor gradio.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tidar_core.bench.shapes import SHAPES
from tidar_core.config import ConfigError


def require_gpu() -> None:
    """Raises ConfigError, one line, where the kernels cannot run."""
    if not torch.cuda.is_available():
        raise ConfigError("this bench needs an NVIDIA GPU, and torch sees none here")
    if find_spec("triton") is None:
        raise ConfigError("this bench needs triton: pip install -e '.[cuda]' in the repository")


@torch.inference_mode()
def run_kernel_bench(
    report: Callable[[str], None],
    shapes: Sequence[str] = tuple(SHAPES),
    *,
    measured: bool = True,
    tuned: bool = False,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Checks and measures as one record: device, versions, seed, ceilings, checks, measures, tiles.

    Without `measured` there are only the checks in bf16. With `tuned` the tiles of every weight are searched for as
    well. keep gets the record after each of them, as far as it is. Raises ConfigError.
    """
    require_gpu()
    import triton

    from tidar_core.bench.checking import Check
    from tidar_core.bench.kernel_checks import check_kernels
    from tidar_core.bench.measures import Extent, Subject, measure_all, measure_ceilings
    from tidar_core.bench.tuning import compile_candidates, tune
    from tidar_core.kernels.triton_ops import triton_ops

    device, extent = torch.device("cuda"), Extent()
    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    if tuned:
        report("compiling candidates of tiles")
        compile_candidates([SHAPES[name] for name in shapes], torch.bfloat16)
    ceilings = measure_ceilings(device, extent)
    report(f"reads {ceilings.read / 1e12:.2f} TB/s, multiplies {ceilings.multiply / 1e12:.0f} TFLOP/s in bf16")
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "seed": seed, "ceilings": asdict(ceilings), "checks": [], "measures": [], "tiles": [],
    }  # fmt: skip

    def add(part: str, found: Iterable[dict[str, Any]]) -> None:
        for one in found:
            record[part].append(one)
            keep(record)

    def check(name: str, dtype: torch.dtype) -> None:
        report(f"{name}: checking the kernels in {str(dtype).removeprefix('torch.')}")
        checks = check_kernels(triton_ops(SHAPES[name], dtype, device), SHAPES[name], dtype, device)
        add("checks", (one.as_record() for one in checks))

    for name in shapes:
        check(name, torch.bfloat16)
        ops = triton_ops(SHAPES[name], torch.bfloat16, device)
        subject = Subject(name, SHAPES[name], ops, torch.bfloat16, device, ceilings, extent)
        if measured:
            report(f"{name}: measuring")
            for one in measure_all(subject):
                add("checks" if isinstance(one, Check) else "measures", [one.as_record()])
            check(name, torch.float32)  # compiles everything once more: last, should the time be over
        if tuned:
            report(f"{name}: searching tiles")
            add("tiles", tune(subject))
    return record


def show_kernel_bench(record: dict[str, Any], console: Console) -> bool:
    """Prints a record of `run_kernel_bench` as tables; whether every check passed."""
    failed = [check for check in record["checks"] if not check["passed"]]
    ceilings = record["ceilings"]
    times = Table(
        "shape", "kernel", "case", "µs", "of read bandwidth",
        title=f"{record['device']}: reads {ceilings['read'] / 1e12:.2f} TB/s, "
        f"multiplies {ceilings['multiply'] / 1e12:.0f} TFLOP/s in bf16",
    )  # fmt: skip
    for one in record["measures"]:
        share = "" if one["share"] is None else f"{one['share']:.0%}"
        times.add_row(one["shape"], one["kernel"], one["case"], f"{one['microseconds']:.1f}", share)
    console.print(times)
    if failed:
        wrong = Table("kernel", "case", "dtype", "error", "allowed", title="checks that failed")
        for check in failed:
            wrong.add_row(
                check["kernel"], check["case"], check["dtype"], f"{check['error']:.2e}", f"{check['allowed']:.0e}"
            )
        console.print(wrong)
    console.print(f"{len(record['checks']) - len(failed)} of {len(record['checks'])} checks passed")
    return not failed
