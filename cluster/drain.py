"""`python -m cluster.drain`: empty a Ray node of Serve before it goes, so that no answer is cut; a pod's preStop hook.

Ray hears that the node will go. Serve then starts its replicas elsewhere where there is room, lets those here end what
they have begun (their `graceful_shutdown_timeout_s` bounds it), and the node's proxy tells load balancers to stay away
but carries its streams to their end; `leaving` asks its clients to go elsewhere. This waits for it all. On Ctrl-C the
drain goes on.

Where the cluster is deleted its head goes first, and nothing can be drained any more: who waited on would keep a GPU.
"""

import argparse
import logging
import subprocess
import sys
import time

import ray
from ray.exceptions import RayError
from ray.util.state import list_actors
from ray.util.state.exception import RayStateApiException

from cluster.operate.ray_cluster import running_cluster
from tidar_core.config import ConfigError
from tidar_core.error_text import unbroken

SERVE_CLASSES = ("ServeReplica:", "ProxyActor")
LOOK_SECONDS = 1.0
HEAD_SECONDS = 120.0  # a head that starts anew is back by then


class HeadGone(Exception):
    """The cluster's head has not answered for HEAD_SECONDS, and how that shows."""


def drain(seconds: int, node: str | None) -> bool:
    """Drain a node of the cluster that runs here (RAY_ADDRESS); whether it was empty before the time was over.

    node: its id; by default that of the node that this runs on. Raises HeadGone, and CalledProcessError where Ray
    refuses.
    """
    end = time.monotonic() + seconds
    # Ray itself would try for as long as Kubernetes lets a pod end.
    ray.init(address=head_address(min(seconds, HEAD_SECONDS)), log_to_driver=False, logging_level=logging.ERROR)
    context = ray.get_runtime_context()
    node = node or context.get_node_id()
    tell = ["drain-node", "--address", context.gcs_address, "--node-id", node]
    tell += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the node is asked to go"]
    tell += ["--deadline-remaining-seconds", str(seconds)]
    try:
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *tell], check=True, timeout=HEAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise HeadGone("it does not take the word that the node goes") from None
    told, answered = None, time.monotonic()
    while (left := serve_actors(node)) != []:
        now = time.monotonic()
        if now > end:
            return False
        answered = now if left is not None else answered
        if now - answered > HEAD_SECONDS:
            raise HeadGone(f"it does not say what is left on {node}")
        if left is not None and left != told:
            print(f"draining: {', '.join(left)}", flush=True)
            told = left
        time.sleep(LOOK_SECONDS)
    return True


def head_address(seconds: float) -> str:
    """Where the cluster's head answers, waiting for it for so long. Raises HeadGone."""
    end = time.monotonic() + seconds
    while True:
        try:
            address = running_cluster()
            why = "no Ray cluster runs here"
        except ConfigError as error:
            address, why = None, str(error)
        if address is not None:
            return address
        if time.monotonic() > end:
            raise HeadGone(why)
        time.sleep(LOOK_SECONDS)


def serve_actors(node: str) -> list[str] | None:
    """What of Serve lives on a node: replicas, and the proxy; None where nobody knows, as in a new head's start."""
    try:
        actors = list_actors(filters=[("node_id", "=", node), ("state", "=", "ALIVE")], limit=1000)
    except (RayStateApiException, RayError, ConnectionError, ValueError) as error:  # by where the head is missed
        print(f"what is left is not known now: {unbroken(str(error))[:200]}", flush=True)
        return None
    return sorted(str(actor.class_name) for actor in actors if str(actor.class_name).startswith(SERVE_CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.drain", description="Empty a Ray node of Serve.")
    parser.add_argument("--seconds", type=int, default=730, help="how long at most (default %(default)s)")
    parser.add_argument("--node", help="the node's id; by default the node that this runs on")
    chosen = parser.parse_args()
    try:
        empty = drain(chosen.seconds, chosen.node)
    except HeadGone as gone:
        print(f"nothing can be drained any more, the cluster's head is gone: {gone}", flush=True)
    else:
        print("empty" if empty else "the time is over, and Serve is still here", flush=True)


if __name__ == "__main__":
    main()
