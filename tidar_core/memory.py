"""How much memory this process may still take."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30  # bytes
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What a version of control groups calls things. cached: pages of files, which make room: a file that was read
    twice is active, and makes room all the same. together: whether the limit of swap holds for memory and swap."""

    limit: str
    used: str
    swap_limit: str
    swap_used: str
    cached: tuple[str, str]
    together: bool


_FIRST = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes",
    ("total_inactive_file", "total_active_file"), together=True,
)  # fmt: skip
_SECOND = _Names(
    "memory.max", "memory.current", "memory.swap.max", "memory.swap.current",
    ("inactive_file", "active_file"), together=False,
)  # fmt: skip


def free_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Bytes that the machine has available, or fewer where the control groups of a container or a service leave fewer.
    Swap is not counted.

    groups: where Linux shows them; own: which of them this process is in.
    """
    left = (_left_by(folder, names.limit, names.used, names.cached) for folder, names in _groups(groups, own))
    return _least(psutil.virtual_memory().available, left)


def free_memory_and_swap(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """As `free_memory`, and the swap that is free: for what is not in use all the time."""
    swap, both = list[int | None](), list[int | None]()
    for folder, names in _groups(groups, own):
        if names.together:
            both.append(_left_by(folder, names.swap_limit, names.swap_used, names.cached))
        else:
            swap.append(_left_by(folder, names.swap_limit, names.swap_used))
    return _least(free_memory(groups, own) + _least(psutil.swap_memory().free, swap), both)


def _least(most: int, left: Iterable[int | None]) -> int:
    return max(0, min([most, *(each for each in left if each is not None)]))


def _groups(groups: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """The groups around this process that may limit memory, and those around these."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = groups, _SECOND
        elif "memory" in controllers.split(","):
            base, names = groups / "memory", _FIRST
        else:
            continue
        folder = base / path.strip("/")
        for each in (folder, *folder.parents):
            yield each, names
            if each == base:
                break


def _left_by(folder: Path, limit: str, used: str, cached: tuple[str, ...] = ()) -> int | None:
    """What one group leaves; None where it has no limit. cached: what of its statistics does not count as used."""
    try:
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
        if cached:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left += sum(int(stat.get(name, 0)) for name in cached)
        return left
    except (OSError, ValueError):  # no such group here, or no limit
        return None
