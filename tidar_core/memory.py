"""How much memory this process may still take."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Bytes that the machine has available, or fewer where the control groups of a container or a service leave fewer.

    groups: where Linux shows them; own: which of them this process is in.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_by_groups(groups, own)]))


def _left_by_groups(groups: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.strip("/")
        for each in (folder, *folder.parents):
            left = _left_by(each, *names)
            if left is not None:
                yield left
            if each == base:
                break


def _left_by(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """What one group leaves; None where it has no limit. Cached files do not count as used: they make room."""
    try:
        most = int((folder / limit).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - int((folder / used).read_text()) + int(stat.get(cached, 0))
    except (OSError, ValueError):  # no such group here, or no limit
        return None
