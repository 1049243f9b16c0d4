"""Ray nodes on this machine that Ray's own autoscaler (v2) brings when something waits for room, and removes when they
are idle; `ray_cluster` starts a head that does so."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)

# What Ray has no default for where the provider is one of others.
COMMANDS = ("setup_commands", "head_setup_commands", "worker_setup_commands", "cluster_synced_files")

HEAD_ENVIRONMENT = MappingProxyType(
    {
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
)


@dataclass(frozen=True)
class NodeKind:
    """What a node offers, by Ray's names, and how many there may be."""

    resources: Mapping[str, float]
    most: int


@dataclass(frozen=True)
class ComingNodes:
    """Nodes that may come, by the names of their kinds. idle_seconds: after so long without work one is removed.
    seconds_to_come: from the autoscaler's wish to the node's start, until `come_after` says otherwise."""

    kinds: Mapping[str, NodeKind]
    idle_seconds: float
    seconds_to_come: float

    def config(self, head: str, pace: Path) -> dict[str, Any]:
        """What `ray start --autoscaling-config` reads, for a head at that address. pace: the file of `come_after`."""
        come_after(self.seconds_to_come, pace)
        provider = {
            "type": "external",
            "module": f"{SlowProvider.__module__}.{SlowProvider.__qualname__}",
            "gcs_address": head,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "pace": str(pace),
        }
        kinds: dict[str, Any] = {FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
        for name, kind in self.kinds.items():
            resources = {**kind.resources, "object_store_memory": 128 * 1024**2}
            kinds[name] = {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": kind.most}
        return {
            "cluster_name": "coming-nodes",
            "max_workers": sum(kind.most for kind in self.kinds.values()),
            "idle_timeout_minutes": self.idle_seconds / 60,
            "provider": provider,
            "available_node_types": kinds,
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            **{key: [] for key in COMMANDS},
        }


def come_after(seconds: float, pace: Path) -> None:
    """From now on a node takes so long to come. math.inf: none comes, as where a cloud has none left."""
    pace.write_text(str(seconds))


class SlowProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's own for tests, but nodes take a while to come, or do not come."""

    def create_node_with_resources_and_labels(self, *asked: Any) -> None:
        seconds = float(Path(self.provider_config["pace"]).read_text())
        if seconds == math.inf:
            raise RuntimeError("out of capacity")
        time.sleep(seconds)
        super().create_node_with_resources_and_labels(*asked)
