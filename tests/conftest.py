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
SHARED = ("front", "front_to_stop", "live_server", "server", "guarded")  # fixtures, whose tests come in this order

settings.register_profile("shared machine", deadline=None)  # an example may wait for whatever else computes here
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers that many tests share stay until the last of them, and take a seventh of a processor while nobody asks
    them anything: all other tests come before. One that a test ends comes before those that stay."""

    def place(item: pytest.Item) -> tuple[int, int]:
        room = item.path.relative_to(TESTS).parts[0]
        names = item.fixturenames  # type: ignore[attr-defined]
        shares = max((place for place, name in enumerate(SHARED, 1) if name in names), default=0)
        return shares, FIRST.index(room) if room in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def port() -> int:
    """Of the server that many tests share, and of the one before it, whose place it takes."""
    from tests.servers import free_port

    return free_port()


@pytest.fixture(scope="session")
def server(port: int, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """One real server for all tests that only talk to it: a tiny checkpoint, its API and its playground."""
    from tests.servers import tiny_server

    with tiny_server(tmp_path_factory.mktemp("server"), port) as started:
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
