"""Fixtures of the cluster's tests."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.cluster.collector import Collector, collecting
from tests.cluster.fronts import front_server
from tests.cluster.guarded import Guarded, guarded_server
from tests.servers import Server


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


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with several of everything, whose ingresses tests kill."""
    with front_server(tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture
def front_to_stop(front: Server) -> Server:
    """The same, for the last of them."""
    return front


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's package, talking to the shared server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """Bare HTTP to the shared server."""
    with httpx.Client(base_url=server.url, timeout=120) as made:
        yield made
