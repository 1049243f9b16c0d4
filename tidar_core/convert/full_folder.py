"""The folder that full weights go to: one that may be replaced, and that is replaced as a whole.

Killed at any moment, the folder before or the new one is whole: under its own name, or, between two renames, the one
before under `<name>.replaced`, from where the next start takes it back.
"""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tidar_core.config import ConfigError
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter, read_own_drafter

MOUNTS = Path("/proc/self/mountinfo")


def check_replaceable(out: Path, needed: Iterable[Path]) -> None:
    """Raises ConfigError where `out` must not be replaced: where it is or holds one of `needed` or the current
    directory, and where it holds anything but full weights that were made here. The same goes for the two folders
    beside it that are removed on the way. Nor can the root of a volume be replaced. Changes nothing."""
    folder = out.resolve()
    if _is_volume(folder):
        raise ConfigError(
            f"{out} is the root of a volume, which cannot be replaced: give a folder in it, as --out {out / 'model'}"
        )
    kept = [path.resolve() for path in (Path.cwd(), *needed)]
    beside = "move it away, or choose another --out"
    for each, advice in (
        (folder, "choose a new or empty folder for --out"), (part_of(out), beside), (_aside(folder), beside)
    ):  # fmt: skip
        for path in kept:
            if path.is_relative_to(each):
                raise ConfigError(f"{each} will be replaced, and with it {path}: choose a new folder for --out")
        try:
            foreign = each.exists() and any(each.iterdir()) and not _made_here(each)
        except OSError as error:
            raise _cannot_use(each, error) from None
        if foreign:
            raise ConfigError(f"{each} holds no full weights that were made here: {advice}")


def take_back(out: Path) -> None:
    """Puts back what a killed run had moved aside. Only to be called under the run's lock: between its two renames a
    living run looks like a killed one. Raises ConfigError."""
    folder = out.resolve()
    aside = _aside(folder)
    try:
        if not folder.exists() and _made_here(aside):
            os.replace(aside, folder)
    except OSError as error:
        raise _cannot_use(out, error) from None
    if folder.exists():
        remove(aside)


def part_of(out: Path) -> Path:
    """Where the folder is written before it takes its name; its contract first, by which it is known for ours."""
    folder = out.resolve()
    return folder.with_name(folder.name + ".part")


def replace_folder(out: Path) -> None:
    """What was written to `part_of(out)` becomes `out`. Raises OSError."""
    folder = out.resolve()
    aside = _aside(folder)
    # The folder before is removed below: where the machine stops, the new one must not be a name alone.
    for path in filter(Path.is_file, part_of(out).rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    remove(aside)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(part_of(out), folder)
    remove(aside)


def remove(folder: Path) -> None:
    """Removes a folder that was made here; its contract last, so that what a kill leaves is still known for one."""
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != CONTRACT_FILE:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def kept_tokens_per_step(out: Path) -> float:
    """What was measured of the weights in `out`; 0 where there are none."""
    found = None if (contract := _contract(out)) is None else contract.training.get("tokens_per_step")
    return float(found) if isinstance(found, int | float) else 0.0


def full_steps(out: Path) -> int:
    """Steps that the weights in `out` were trained for; 0 where there are none, or nothing says so."""
    found = None if (contract := _contract(out)) is None else contract.training.get("steps")
    return found if isinstance(found, int) else 0


def _is_volume(folder: Path) -> bool:
    """Whether something is mounted there. Where Linux lists that, other roots of file systems are none, as those of
    btrfs's subvolumes, which can be renamed."""
    try:
        lines = MOUNTS.read_bytes().split(b"\n")
    except OSError:
        return os.path.ismount(folder)
    points = (line.split(b" ")[4] for line in lines if line)
    mounted = {re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), point) for point in points}
    return folder == folder.parent or os.fsencode(folder) in mounted


def _cannot_use(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{out} cannot be used ({error.strerror}): choose a new folder for --out")


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced")


def _made_here(folder: Path) -> bool:
    """Whether the weights there were made here: others' may have a contract, but no record of a training from a
    base."""
    contract = _contract(folder)
    return contract is not None and "base" in contract.training


def _contract(folder: Path) -> OwnDrafter | None:
    try:
        return read_own_drafter(folder)
    except ConfigError:
        return None
