"""A Ray cluster of several nodes on this machine, each with a replica; the first also has the ingress and the proxy.

python -m tests.cluster.nodes OPTIONS-AS-JSON PORT
"""

import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ApplicationStatus

from cluster import app
from cluster.operate.deploy import API, unhealthy
from cluster.options import ServeOptions
from tests.servers import Server, free_port, kill_all, launch


def start_nodes(directory: Path, ray_directory: Path, options: ServeOptions) -> Server:
    """As `tests.servers.start_with`, on a node for each replica. `ray_directory`: its path must be short."""
    port = free_port()
    words = [sys.executable, "-m", "tests.cluster.nodes", options.model_dump_json(), str(port)]
    return launch(directory, port, words, {"RAY_TMPDIR": str(ray_directory), "RAY_AUTH_MODE": "disabled"})


def lose_node(engine: psutil.Process) -> None:
    """Kill everything of the node on which an engine runs."""
    raylet = engine.parent()
    assert raylet is not None
    assert "raylet" in raylet.name()
    kill_all((raylet, *raylet.children(recursive=True)))


def main() -> None:
    options, port = ServeOptions.model_validate_json(sys.argv[1]), int(sys.argv[2])
    # Its agent on any port: where another Ray has the one that Ray chooses, the node waits for 3 s.
    one: dict[str, Any] = {"num_cpus": 1, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, namespace="tidar", log_to_driver=False, logging_level=logging.ERROR)
        for ends in (signal.SIGINT, signal.SIGTERM):  # a shell's background job would be deaf to the first
            signal.signal(ends, signal.default_int_handler)
        http = HTTPOptions(host="127.0.0.1", port=port)
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http)
        target = serve.RunTarget(app.application(options), name=API, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        # The ingress asks for no CPU: it goes where there is a node, and so far there is one.
        while unhealthy(f"http://127.0.0.1:{port}/health") is not None:
            time.sleep(0.2)
        for _ in range(options.replicas - 1):
            cluster.add_node(**one)
        while serve.status().applications[API].status is not ApplicationStatus.RUNNING:
            time.sleep(0.2)
        print("ready; Ctrl-C ends it", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
