"""What a process may still take of memory, where it is in a container or a service too."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tidar_core import memory
from tidar_core.memory import free_memory, free_memory_and_swap

MACHINE, SWAP = 1 << 40, 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: SimpleNamespace(free=SWAP))


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_a_container_has_what_its_group_leaves_and_what_cached_files_make_room_for(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    stat = "anon 5000\ninactive_file 700\nactive_file 40"
    group(tmp_path / "groups", {"memory.max": 8000, "memory.current": 6000, "memory.stat": stat})
    assert free_memory(tmp_path / "groups", tmp_path / "own") == 8000 - 6000 + 700 + 40


def test_the_narrowest_of_the_groups_that_are_around_a_service_counts(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/system.slice/tidar.service\n")
    used = {"memory.current": 1000, "memory.stat": "inactive_file 0"}
    group(tmp_path / "groups/system.slice", {"memory.max": 3000, **used})
    group(tmp_path / "groups/system.slice/tidar.service", {"memory.max": "max", **used})
    assert free_memory(tmp_path / "groups", tmp_path / "own") == 2000
    group(tmp_path / "groups/system.slice/tidar.service", {"memory.max": 1500})
    assert free_memory(tmp_path / "groups", tmp_path / "own") == 500
    group(tmp_path / "groups/system.slice/tidar.service", {"memory.max": 900})
    assert free_memory(tmp_path / "groups", tmp_path / "own") == 0


def test_groups_of_the_first_version_are_read_too_though_the_path_is_that_outside(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("3:cpu:/x\n7:memory:/docker/abc\n")
    stat = "total_inactive_file 10\ntotal_active_file 7\nactive_file 3"
    files = {"memory.limit_in_bytes": 4000, "memory.usage_in_bytes": 3000, "memory.stat": stat}
    group(tmp_path / "groups/memory", files)
    assert free_memory(tmp_path / "groups", tmp_path / "own") == 1017
    assert free_memory_and_swap(tmp_path / "groups", tmp_path / "own") == 1017 + SWAP
    group(tmp_path / "groups/memory", {"memory.memsw.limit_in_bytes": 6000, "memory.memsw.usage_in_bytes": 3500})
    assert free_memory_and_swap(tmp_path / "groups", tmp_path / "own") == 2517


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "groups", tmp_path / "own") == MACHINE
    (tmp_path / "own").write_text("0::/user.slice\n")
    assert free_memory(tmp_path / "groups", tmp_path / "own") == MACHINE


@pytest.mark.parametrize(("limit", "left"), [("max", SWAP), (900, 600), (200, 0), (1 << 50, SWAP)])
def test_swap_counts_as_far_as_a_container_may_use_it(tmp_path: Path, limit: object, left: int) -> None:
    (tmp_path / "own").write_text("0::/\n")
    used = {"memory.max": 8000, "memory.current": 6000, "memory.stat": "inactive_file 0"}
    group(tmp_path / "groups", {**used, "memory.swap.max": limit, "memory.swap.current": 300})
    assert free_memory_and_swap(tmp_path / "groups", tmp_path / "own") == 2000 + left


def test_without_groups_all_swap_that_is_free_counts(tmp_path: Path) -> None:
    assert free_memory_and_swap(tmp_path / "groups", tmp_path / "own") == MACHINE + SWAP
