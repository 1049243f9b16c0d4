"""Fixtures of the cluster's tests."""

from collections.abc import Iterator

import pytest

from tests.cluster.collector import Collector, collecting
from tests.cluster.guarded import Guarded, guarded_server


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What the guarded server sends its spans to."""
    with collecting() as started:
        yield started


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Guarded]:
    """One server for all tests of what the API takes from strangers, of tools and of traces."""
    with guarded_server(tmp_path_factory.mktemp("guarded"), collector.url) as server:
        yield server
