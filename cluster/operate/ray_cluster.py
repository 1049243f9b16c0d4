"""Ray under a command: a cluster that is joined, or one of our own that ends with the command."""

import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import ray
from ray._common.utils import get_ray_address_file
from ray._private import auto_init_hook, node, parameter, worker
from ray._private.state import jobs
from ray.experimental import internal_kv

from cluster.operate.interrupts import Interrupts
from cluster.replica.progress import NAMESPACE
from tidar_core.config import ConfigError
from tidar_core.error_text import first_line

# Only tokens pass through Ray's object store, which would otherwise take 30 % of the memory.
OWN_RAY: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 128 * 1024 * 1024}
OWN_PROCESSES = {
    "grpc_proxy": "",  # what is said between processes would go through an http_proxy that stands in the environment
    "PYTHONUTF8": "1",  # Serve writes HAProxy's settings in the locale's encoding, with letters that not all have
    # Of each log. Ray's own are 512 MiB and five more, and what a worker writes to its stdout is not bounded at all.
    "RAY_ROTATION_MAX_BYTES": str(16 * 1024 * 1024),
    "RAY_ROTATION_BACKUP_COUNT": "2",
}
# A server of one replica has 370 threads on two cores. With fewer allowed, Ray waits for minutes for what cannot start.
FEWEST_THREADS = 512
KNOCK_SECONDS = 3.0
AGAIN_SECONDS = 5.0  # within which Ray's saying a thing again is no news
LEAST_SPACE = 512 * 1024  # bytes that Ray writes before it serves anything
# Without one of these nothing is answered any more, and what is asked of Ray waits for a minute, at the end of which
# Ray ends this process on the spot.
HEAD, RAYLET = "gcs_server", "raylet"
CORE = (HEAD, RAYLET)
LEAVING_SECONDS = 2.0  # that a node's processes have to end by themselves once its raylet has

CLAIM = "tidar-up"  # in the store of Ray's head: who serves on the cluster

Say = Callable[[str], None]
LOGS_SAY = "Ray's logs say why"  # where it says nothing itself


def running_cluster() -> str | None:
    """The Ray cluster to join: RAY_ADDRESS, or the one that `ray start` left running here; None to start one.

    Not Ray's own "auto": that would also join a cluster which another `tidar up` started for itself. Raises ConfigError
    for an address of another kind, or where nobody answers: Ray would end in a traceback, or be silent for a minute.
    """
    wanted = os.environ.get("RAY_ADDRESS", "")
    if wanted == "local":
        return None
    if wanted not in ("", "auto"):
        try:
            knock(wanted)
        except ValueError:
            raise ConfigError(f"RAY_ADDRESS is {wanted}: give HOST:PORT of the cluster's head, as HOST:6379") from None
        except OSError as error:
            why = error.strerror or first_line(error)
            raise ConfigError(
                f"nobody answers at RAY_ADDRESS {wanted} ({why}): start that cluster, or unset it to start one here"
            ) from None
        return wanted
    note = Path(get_ray_address_file(None))
    try:
        address = note.read_text().strip()
        knock(address)
        return address
    except (OSError, ValueError):  # no note, or one that a cluster left behind
        if wanted == "auto":
            raise ConfigError("RAY_ADDRESS is auto, but no Ray cluster runs here: unset it to start one") from None
        return None


def knock(address: str) -> None:
    """Raise OSError where nobody listens at an address, ValueError for what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not 0 < int(port) < 65536:
        raise ValueError(address)
    socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


@contextmanager
def ray_cluster(
    address: str | None, say: Say, interrupts: Interrupts, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Ray, joined at `address` or started here; one that was started here ends with this, and its processes read
    `OWN_PROCESSES` and `settings` where the environment does not say otherwise."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Its errors here are of this process' handles alone, whose event loop is over once all is ready: what happens to
    # the applications is asked for and told in our own words.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other program slow the model down
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "tidar"}
    parts: list[psutil.Process] = []
    with short_words(say):
        try:
            say("starting Ray" if address is None else f"joining the Ray cluster at {address}")
            try:
                if address is None:
                    keep_strangers_out()
                    for name, value in (OWN_PROCESSES | dict(settings)).items():
                        os.environ.setdefault(name, value)
                    # A node whose start is broken off may leave its agents behind, for up to a minute.
                    with spare_ray(), interrupts.put_off():
                        ray.init(address="local", **common, **OWN_RAY)
                else:
                    ray.init(address=address, **common)
            except Exception as error:  # of a node that is late Ray says so by no narrower class
                where = "Ray could not be started" if address is None else f"cannot join the Ray cluster at {address}"
                mend = mend_of(error) if address is None else ""
                raise ConfigError(f"{where}: {reason(error)}{mend}") from error
            parts = parts_of_node()  # of a raylet that will have died they are not known any more
            interrupts.listen()  # `ray.init` puts a SIGTERM handler of its own in place
            interrupts.check()
            yield
        finally:
            interrupts.ignore()
            # Where replicas follow the load, a handle of Serve looks for its answers until the process ends, and any
            # look starts a Ray that has ended anew: a second cluster, for its last moments.
            auto_init_hook.enable_auto_connect = False
            parts += parts_of_node()
            ray.shutdown()
            end_left(parts)


@contextmanager
def spare_ray() -> Iterator[None]:
    """A Ray that starts meanwhile takes any free port for its node's agent, and goes without three processes that
    nobody asks anything: the autoscaler's, which has no nodes to start, the one that hands log lines to the driver, and
    the dashboard's, which is left with counting for usage statistics.

    The agent's own port is one for all: where another Ray has it, the agent tries for 3 s before it does without, and
    its node waits. Each of the three takes half a second of a core or more at the start and looks around for ever;
    `ray.init` waits for the last. It has no words for any of it, as `ray start` has for the port.
    """
    room: Any = parameter
    whole = room.RayParams
    room.RayParams = partial(whole, dashboard_agent_listen_port=0, no_monitor=True, include_log_monitor=False)
    head: Any = node.Node
    start_dashboard = head.start_api_server
    head.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        room.RayParams = whole
        head.start_api_server = start_dashboard


@contextmanager
def short_words(say: Say) -> Iterator[None]:
    """What Ray has to say to this process meanwhile, by its first line: with a raylet that was killed come fifty of its
    log, sometimes twice."""
    rays: Any = worker
    at_length, before, since = rays.print_to_stdstream, "", 0.0

    def tell(data: Any, ignore_prefix: bool) -> None:
        nonlocal before, since
        for text in data["lines"]:
            line = in_few_words(without_announcement(text.strip().partition("\n")[0]))
            if line != before or time.monotonic() - since > AGAIN_SECONDS:
                say(f"Ray: {line}")
            before, since = line, time.monotonic()

    rays.print_to_stdstream = tell
    try:
        yield
    finally:
        rays.print_to_stdstream = at_length


def ended_parts() -> list[str]:
    """Which processes have ended, or are ending, that a Ray of our own cannot do without; of one that was joined none
    is known.

    A head that was told to end listens no more, and stays until it is killed; the raylet asks it for ten seconds.
    """
    ours = ray._private.worker._global_node
    if ours is None:
        return []
    ended = [kind for kind, _ in ours.dead_processes() if kind in CORE]
    return ended or ([HEAD] if refuses(ours.gcs_address) else [])


def parts_of_node() -> list[psutil.Process]:
    """The workers and agents of a Ray of our own, which its raylet started; of one that was joined none is known."""
    ours: Any = ray._private.worker._global_node
    found: list[psutil.Process] = []
    for raylet in [] if ours is None else ours.all_processes.get(RAYLET, []):
        with suppress(psutil.Error, OSError):  # which may keep from others what runs
            if raylet.process.poll() is None:
                found += psutil.Process(raylet.process.pid).children()
    return found


def end_left(parts: Sequence[psutil.Process]) -> None:
    """Kill what does not end by itself. Ray gives its raylet a second to end all of these and then kills it, as on a
    busy machine: workers notice that at once, an agent after a minute."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while (left := [part for part in parts if runs(part)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for part in left:
        with suppress(psutil.Error):
            part.kill()


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody asked how it ended has."""
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError):
        return False


def refuses(address: str) -> bool:
    """Whether nobody listens at an address any more; one who is late may still be there."""
    try:
        knock(address)
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def check_ray(interrupts: Interrupts) -> None:
    """Raise KeyboardInterrupt where the user wants an end, ConfigError where Ray has come to one: what is asked of it
    then waits for a minute, and after that Ray ends this process on the spot."""
    interrupts.check()
    if gone := ended_parts():
        raise ConfigError(f"the Ray cluster is gone: its {gone[0]} ended")


def beside(work: Callable[[], Any], name: str) -> Future[Any]:
    """What `work` returns or raises, from a thread of its own.

    No pool's thread, which Python waits for until it ends: an interrupt of the main thread may leave a lock held (a
    module's, logging's) that another thread then waits for for ever.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def claim(address: str) -> None:
    """Raise ConfigError where another driver has claimed the cluster at `address` and still runs: two that begin at
    once would each deploy over the other, and the first that ends would take Serve from under the other.

    Who comes behind a driver that is gone writes beside its claim and not over it: of several one is the first.
    """
    own, place = ray.get_runtime_context().get_job_id(), CLAIM
    alive = {job["JobID"]: job for job in jobs() if not job["IsDead"]}
    while internal_kv._internal_kv_put(place, own, overwrite=False, namespace=NAMESPACE):
        other = internal_kv._internal_kv_get(place, namespace=NAMESPACE).decode()
        if other == own:  # of a put that was sent twice
            return
        if other in alive:
            who = f"process {alive[other]['DriverPid']} on {alive[other]['DriverIPAddress']}"
            raise ConfigError(
                f"another `tidar up` ({who}) is starting or ending on the cluster at {address}: wait for it, or end it"
            )
        place = f"{CLAIM}/{other}"


def keep_strangers_out() -> None:
    """A token that nobody else has: Ray runs what it is sent, and asks for a token wherever it finds one.

    Left to itself it would write one into the user's home, which outlives this run.
    """
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def check_threads() -> None:
    """Raise ConfigError where this user may not have as many threads as the processes of a Ray of our own start."""
    try:
        import resource
    except ModuleNotFoundError:  # a system without such limits
        return
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and most != resource.RLIM_INFINITY and most < FEWEST_THREADS:
        raise ConfigError(f"only {most} threads may run at once: raise `ulimit -u` (LimitNPROC) to 4096 or more")


def reason(error: BaseException) -> str:
    """Why Ray did not start: its first line, without the announcement of others, and the file that it tells to read."""
    line = without_announcement(first_line(error))
    told = re.search(r"Please check (\S+)", str(error))
    return f"{line.rstrip('.')}: see {told[1]}" if told else line


def without_announcement(line: str) -> str:
    """The first line of what Ray says, without its end that tells of lines that follow."""
    return re.sub(r"\s*Last \d+ lines of [^:]*:$", "", line)


def in_few_words(line: str) -> str:
    """What Ray says of a process that was ended, without the paragraph that it makes of it."""
    if died := re.match(r"A worker died or was killed .*Worker PID: (\d+)", line):
        return f"process {died[1]} was ended; where no memory is left the system does that without a word (see dmesg)"
    return line


def mend_of(error: BaseException) -> str:
    """What to do about it, where that is known."""
    if "AF_UNIX" in str(error):
        return "; set RAY_TMPDIR to a shorter path"
    files = Path(get_ray_address_file(None)).parent
    there = next(directory for directory in (files, *files.parents) if directory.exists())
    full = shutil.disk_usage(there).free < LEAST_SPACE
    return f"; no space is left in {files}: make some, or set RAY_TMPDIR to another place" if full else ""
