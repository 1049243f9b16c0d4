"""`tidar up` on a Ray cluster that others started, and that goes on behind it."""

import signal
import subprocess
import sys
from pathlib import Path

from tests import plain_http
from tests.manifests.ray_cluster import RayCluster, ray_cluster
from tests.servers import MARK, Server, command, free_port, launch, running, tiny_model

# As far as a `tidar up` comes before Serve runs.
CLAIM = """
import time
import ray
from cluster.operate.ray_cluster import claim
ray.init(log_to_driver=False)
claim("here")
print("claimed", flush=True)
time.sleep(600)
"""


def join(cluster: RayCluster, directory: Path, model: Path) -> Server:
    port = free_port()
    words = command("up", "--port", str(port), "--model", str(model), "--adapter", "none", "--no-playground")
    environment = {name: value for name, value in cluster.environment.items() if name != MARK}
    return launch(directory, port, words, {**environment, "RAY_ADDRESS": cluster.address})


def refused(server: Server) -> str:
    """The one line with which it ends."""
    assert server.process.wait(120) == 1
    joining, line = server.log.read_text().splitlines()
    assert joining.startswith("joining the Ray cluster")
    return line.removeprefix("tidar: ")


def test_of_two_that_begin_at_once_the_second_is_refused_and_one_that_was_killed_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    model, _ = tiny_model(tmp_path)
    with ray_cluster() as cluster:
        first = subprocess.Popen(
            [sys.executable, "-c", CLAIM], env={**cluster.environment, "RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert first.stdout is not None
            assert "claimed" in first.stdout.readline()
            line = refused(join(cluster, tmp_path, model))
            assert line.startswith(f"another `tidar up` (process {first.pid} on ")
            assert line.endswith(f") is starting or ending on the cluster at {cluster.address}: wait for it, or end it")
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        with running(join(cluster, tmp_path, model)) as server:
            assert plain_http.get(f"{server.url}/health").status_code == 200
            assert "already runs on the cluster" in refused(join(cluster, tmp_path, model))
        with running(join(cluster, tmp_path, model)) as server:
            assert plain_http.get(f"{server.url}/health").status_code == 200
