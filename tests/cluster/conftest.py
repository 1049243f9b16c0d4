"""Fixtures of the cluster's tests."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from cluster.options import ServeOptions
from tests.cluster.collector import Collector, collecting
from tests.cluster.fronts import front_server
from tests.cluster.guarded import Guarded, guarded_server
from tests.cluster.kills import slow_model
from tests.servers import Server, running, start_with


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


@pytest.fixture
def guarded_to_end(guarded: Guarded) -> Server:
    """The same, for the last of them."""
    return guarded.server


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with several of everything, whose ingresses tests kill."""
    with front_server(tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture
def front_to_stop(front: Server) -> Server:
    """The same, for the last of them."""
    return front


@pytest.fixture(scope="session")
def three_options(tmp_path_factory: pytest.TempPathFactory) -> ServeOptions:
    """Three replicas of a checkpoint of two layers, in bf16."""
    model, adapter = slow_model(tmp_path_factory.mktemp("slow"))
    return ServeOptions(model=str(model), adapter=str(adapter), device="cpu", replicas=3, threads=1)


@pytest.fixture(scope="session")
def three(three_options: ServeOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server whose replicas tests kill."""
    with running(start_with(tmp_path_factory.mktemp("three"), three_options, cpus=4), loses_ray=True) as server:
        yield server


@pytest.fixture
def three_to_end(three: Server) -> Server:
    """The same, for the last of them."""
    return three


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
