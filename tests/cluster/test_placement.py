"""How engines share what a cluster's nodes offer."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig

from cluster.app import engine_device, engines_run_here
from cluster.operate.deploy import check_resources
from cluster.options import ServeOptions
from cluster.replica.replica import most_of, share_of_node
from tidar_core.config import ConfigError
from tidar_core.settings import read_options

OTHER = {"model": "org/other"}


def alive(**resources: float) -> dict[str, Any]:
    """A node as Ray tells of it."""
    return {"Alive": True, "NodeID": "here", "Resources": resources}


@pytest.mark.parametrize(
    ("asked", "offered", "device"),
    [
        ({}, {"CPU": 64.0}, "cpu"),
        ({}, {"CPU": 64.0, "GPU": 4.0}, "cuda"),
        ({"accelerator": "H100"}, {"CPU": 8.0}, "cuda"),  # nodes that have it are added once an engine needs one
        ({"device": "cpu"}, {"CPU": 64.0, "GPU": 4.0}, "cpu"),
        ({"device": "cuda"}, {"CPU": 64.0}, "cuda"),
    ],
)
def test_engines_run_where_the_cluster_offers_it(
    asked: dict[str, Any], offered: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: offered)
    assert engine_device(ServeOptions(**asked)) == device


@pytest.mark.parametrize(
    ("node", "others", "device", "engines", "threads"),
    [
        (alive(CPU=16.0), [], "cpu", 1, 16),
        (alive(CPU=16.0, GPU=8.0), [], "cpu", 2, 8),
        (alive(CPU=12.0), [], "cpu", 7, 1),
        (alive(CPU=64.0), [alive(CPU=64.0)] * 2, "cpu", 6, 32),
        (alive(CPU=16.0), [alive(CPU=64.0)], "cpu", 4, 8),
        (alive(CPU=16.0), [alive(CPU=16.0)] * 3, "cpu", 4, 16),
        (alive(CPU=16.0), [alive(CPU=16.0)] * 3, "cpu", 5, 8),
        (alive(CPU=64.0, GPU=8.0), [], "cuda", 32, 8),
        (alive(CPU=64.0, GPU=4.0), [alive(CPU=8.0)], "cuda", 4, 16),
        (alive(CPU=64.0, GPU=8.0), [alive(CPU=64.0)], "cuda", 2, 32),
        (alive(CPU=64.0, GPU=8.0), [alive(CPU=64.0, GPU=8.0)], "cuda", 2, 64),
        (alive(CPU=2.0), [], "cpu", 3, 1),
    ],
)
def test_an_engine_takes_its_share_of_its_node(
    node: dict[str, Any],
    others: list[dict[str, Any]],
    device: str,
    engines: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, gone = alive(), {"Alive": False, "Resources": {}}  # neither has a CPU for engines
    everywhere = [each | {"NodeID": str(place)} for place, each in enumerate([head, gone, *others])]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray, "nodes", lambda: [*everywhere, node])
    assert share_of_node(device, engines) == threads


@pytest.mark.parametrize(
    ("asked", "nodes", "here"),
    [
        ({}, [alive(CPU=8.0)], True),
        ({}, [alive(CPU=8.0), alive(CPU=8.0)], False),
        ({}, [alive()], False),  # the head of a fleet whose nodes are still to come
        ({"accelerator": "H100"}, [alive(CPU=8.0)], False),
        ({"device": "cuda"}, [alive(CPU=8.0, GPU=1.0), {"Alive": False, "Resources": {"CPU": 8.0}}], True),
    ],
)
def test_paths_are_looked_at_by_the_node_that_engines_run_on(
    asked: dict[str, Any], nodes: list[dict[str, Any]], here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: nodes[0]["Resources"])
    assert engines_run_here(ServeOptions(**asked)) == here


def test_what_a_serve_config_says_of_replicas_counts() -> None:
    """The files for operators have it there, not among the options."""
    assert most_of(DeploymentConfig(num_replicas=8)) == 8
    scaling = AutoscalingConfig(min_replicas=2, max_replicas=58)
    assert most_of(DeploymentConfig(num_replicas=2, autoscaling_config=scaling)) == 58


def test_the_engines_of_all_models_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 12.0})
    models = {"x": {**OTHER, "replicas": 3}, "y": OTHER}
    options = read_options(ServeOptions, {"name": "one", "replicas": 2, "models": models})
    assert options.most_engines == 2 + 3 + 2
    check_resources(options)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    with pytest.raises(ConfigError, match="7 engines need as many CPUs, Ray sees 6: lower --replicas or serve fewer"):
        check_resources(options)


def test_without_a_gpu_nobody_is_told_to_start_less_than_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    with pytest.raises(ConfigError, match=r"no GPU is visible to Ray: .* --device cpu"):
        check_resources(ServeOptions(device="cuda"))
