"""Fixtures of the cluster's tests."""

from collections.abc import Iterator

import pytest

from tests.cluster.guarded import Guarded, guarded_server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """One server for all tests of what the API takes from strangers, and of tools."""
    with guarded_server(tmp_path_factory.mktemp("guarded")) as server:
        yield server
