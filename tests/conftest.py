"""Fixtures that more than one room's tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:  # the engine's tests need nothing that the cluster needs
    from tests.servers import Server

TESTS = Path(__file__).parent
FIRST = ("tidar_core", "playground", "manifests")
LONGEST = tuple(Path("tidar_core") / name for name in ("test_exact.py", "test_exact_bf16.py"))
SHARED = ("server", "server_to_stop", "guarded")  # fixtures, whose tests come in this order

settings.register_profile("shared machine", deadline=None)  # an example may wait for whatever else computes here
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers that many tests share stay until the last of them, and take a seventh of a processor while nobody asks
    them anything: all other tests come before. What takes minutes comes first, so that of two processes none is left
    alone with it."""

    def place(item: pytest.Item) -> tuple[int, int, bool]:
        path = item.path.relative_to(TESTS)
        room = path.parts[0]
        names = item.fixturenames  # type: ignore[attr-defined]
        shares = max((place for place, name in enumerate(SHARED, 1) if name in names), default=0)
        return shares, FIRST.index(room) if room in FIRST else len(FIRST), path not in LONGEST

    items.sort(key=place)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """One real server for all tests that only talk to it: a tiny checkpoint, its API and its playground."""
    from tests.servers import tiny_server

    with tiny_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def torch_threads() -> int:
    """As many as torch takes by itself."""
    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads_as_before(torch_threads: int) -> Iterator[None]:
    """What a test sets for its own engine, or a module for all of its tests, must not slow those behind it."""
    yield
    torch.set_num_threads(torch_threads)
