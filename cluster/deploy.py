"""`tidar up`: a Ray cluster, joined or started; two Serve applications on it; a clean end."""

import asyncio
import io
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never

import httpx
import ray
from ray import serve
from ray._common.utils import get_ray_address_file
from ray._private import auto_init_hook, parameter
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ApplicationStatus, ServeStatus

from cluster import app
from cluster.card import ModelCard
from cluster.haproxy import haproxy_settings
from cluster.interrupts import Interrupts
from cluster.options import ServeOptions, UpOptions
from cluster.preflight import absolute, check_models, check_options, check_port
from cluster.progress import put_up_board
from tidar_core.config import ConfigError
from tidar_core.request import Sampling

API, PLAYGROUND = "api", "playground"
# Only tokens pass through Ray's object store, which would otherwise take 30 % of the memory.
OWN_RAY: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 128 * 1024 * 1024}
# What is said between processes goes by gRPC and past no second event loop: on 2 cores that took a third less processor
# time a token than Ray's own streams did. Serve reads these when its processes start.
SHORT_WAYS = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
LOOK_SECONDS = 0.25
FIT_SECONDS = 5.0  # that the check of models is given to end once all else has
PATIENT_SECONDS = 60.0  # of a start, before it is said what it waits for
WATCH_SECONDS = 5.0  # each look costs Serve's controller some 20 ms

Say = Callable[[str], None]


def say_now(line: str) -> None:
    with suppress(OSError):  # the terminal may be closed already, and there is an end to be made
        print(line, flush=True)


def up(options: UpOptions, say: Say = say_now) -> None:
    """Serve what was chosen until Ctrl-C or SIGTERM, then take it all down again.

    Raises ConfigError, one line for the user, where something stands in the way.
    """
    with Interrupts() as interrupts:
        try:
            address = running_cluster()
            if address is None:
                check_port(options.host, options.port)
            options = options.model_copy(update={"serve": absolute(options.serve)})
            sources = check_options(options.serve)
            fit = beside(partial(check_models, options.serve, sources), "check-models")  # Ray's start is mostly waiting
            try:
                with (
                    haproxy_settings(options.host) as front,
                    ray_cluster(address, say, interrupts, SHORT_WAYS | front),
                ):
                    fit.result()
                    if address is not None:
                        refuse_running_serve(address)
                        check_port(options.host, options.port)
                    with applications(options, address is not None, say, interrupts):
                        watch(say, interrupts)
            finally:
                wait([fit], timeout=FIT_SECONDS)  # Python's end in the midst of torch's import might be a crash
        except (KeyboardInterrupt, SystemExit):
            say("stopped")
        except ConfigError:
            if not interrupts.asked:
                raise
            say("stopped")  # what was interrupted failed for that reason


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


def running_cluster() -> str | None:
    """The Ray cluster to join: RAY_ADDRESS, or the one that `ray start` left running here; None to start one.

    Not Ray's own "auto": that would also join a cluster which another `tidar up` started for itself.
    """
    wanted = os.environ.get("RAY_ADDRESS", "")
    if wanted == "local":
        return None
    if wanted not in ("", "auto"):
        return wanted
    note = Path(get_ray_address_file(None))
    try:
        address = note.read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2):
            return address
    except (OSError, ValueError):  # no note, or one that a cluster left behind
        if wanted == "auto":
            raise ConfigError("RAY_ADDRESS is auto, but no Ray cluster runs here: unset it to start one") from None
        return None


@contextmanager
def ray_cluster(
    address: str | None, say: Say, interrupts: Interrupts, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Ray, joined at `address` or started here; one that was started here ends with this, and its processes read
    `settings` where the environment does not say otherwise."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Its errors here are of this process' handles alone, whose event loop is over once all is ready: what happens to
    # the applications is asked for and told in our own words.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other program slow the model down
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "tidar"}
    try:
        say("starting Ray" if address is None else f"joining the Ray cluster at {address}")
        try:
            if address is None:
                keep_strangers_out()
                for name, value in settings.items():
                    os.environ.setdefault(name, value)
                # A node whose start is broken off may leave its agents behind, for up to a minute.
                with spare_ray(), interrupts.put_off():
                    ray.init(address="local", **common, **OWN_RAY)
            else:
                ray.init(address=address, **common)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = "Ray could not be started" if address is None else f"cannot join the Ray cluster at {address}"
            raise ConfigError(f"{where}: {first_line(error)}") from error
        interrupts.listen()  # `ray.init` puts a SIGTERM handler of its own in place
        interrupts.check()
        yield
    finally:
        interrupts.ignore()
        # Where replicas follow the load, a handle of Serve looks for its answers until the process ends, and any look
        # starts a Ray that has ended anew: a second cluster, for its last moments.
        auto_init_hook.enable_auto_connect = False
        ray.shutdown()


@contextmanager
def spare_ray() -> Iterator[None]:
    """A Ray that starts meanwhile takes any free port for its node's agent, and goes without two processes that nobody
    here asks anything: the autoscaler's, which has no nodes to start, and the one that hands log lines to the driver.

    The agent's own port is one for all: where another Ray has it, the agent tries for 3 s before it does without, and
    its node waits. Each of the two takes half a second of a core at the start and looks around for ever. `ray.init` has
    no words for it, as `ray start` has for the port.
    """
    room: Any = parameter
    whole = room.RayParams
    room.RayParams = partial(whole, dashboard_agent_listen_port=0, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        room.RayParams = whole


def keep_strangers_out() -> None:
    """A token that nobody else has: Ray runs what it is sent, and asks for a token wherever it finds one.

    Left to itself it would write one into the user's home, which outlives this run.
    """
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def refuse_running_serve(address: str) -> None:
    """Raise ConfigError where Serve runs on the cluster: its port and its applications are not ours to change."""
    status = serve.status()
    if status.proxies or status.applications:
        raise ConfigError(
            f"Ray Serve already runs on the cluster at {address}: add the model to it with `serve deploy` "
            f"(builder cluster.app:build), or end it with `serve shutdown`"
        )


@contextmanager
def applications(options: UpOptions, joined: bool, say: Say, interrupts: Interrupts) -> Iterator[None]:
    """The API, and the page where it is wanted, from ready to deleted, streams under way ended first; on a cluster that
    goes on, Serve ends too, as it began here. A Ray of our own that served nothing yet is not waited for."""
    check_resources(options.serve)
    ready = False
    try:
        board = put_up_board()
        proxies = start_serve(options.host, options.port, interrupts)
        targets = [serve.RunTarget(app.application(options.serve), name=API, route_prefix="/")]
        if options.playground:
            from playground.app import build as build_playground

            targets.append(serve.RunTarget(build_playground({}), name=PLAYGROUND, route_prefix="/playground"))
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        proxies.result()
        base = f"http://{reachable(options.host)}:{options.port}"
        wait_until_ready([target.name for target in targets], board, base, say, interrupts)
        announce(base, options.playground, options.serve, say)
        ready = True
        yield
    finally:
        interrupts.ignore()
        say("stopping")
        try:
            if ready or joined:
                if options.playground:
                    serve.delete(PLAYGROUND, _blocking=False)
                serve.delete(API)
            if joined:
                with redirect_stdout(io.StringIO()):  # Ray reports the controller's end as an error of a raylet
                    serve.shutdown()
                    time.sleep(LOOK_SECONDS)
        except Exception as error:  # the cluster may be gone already; what is left of it ends with the caller
            say(f"Serve did not end by itself: {first_line(error)}")


def start_serve(host: str, port: int, interrupts: Interrupts) -> Future[Any]:
    """Start Serve, which takes applications from here on. The result comes once its proxies are ready: replicas load
    beside them."""
    proxies = beside(partial(start_proxies, host, port), "serve-start")  # an interrupt does not wait for them
    while not proxies.done() and not serve.status().proxies:
        interrupts.check()
        time.sleep(LOOK_SECONDS / 5)
    if proxies.done():
        proxies.result()
    return proxies


def start_proxies(host: str, port: int) -> None:
    """Start Serve and wait for its proxies. Raises ConfigError, one line for the user, where they do not come."""
    try:
        serve.start(proxy_location=ProxyLocation.EveryNode, http_options=HTTPOptions(host=host, port=port))
    except (RayError, RuntimeError, TimeoutError) as error:
        check_port(host, port)  # somebody may have been quicker
        raise ConfigError(
            f"Ray Serve's proxy does not start ({last_line(str(error))}): try again, with less going on beside it"
        ) from error


def check_resources(options: ServeOptions) -> None:
    """Raise ConfigError where the cluster has no room for the replicas; without it they would wait for ever."""
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    device, _ = app.placement(options)
    most, mend = options.most_engines, "lower --replicas" if options.max_replicas is None else "lower --max-replicas"
    if len(options.served) > 1:
        mend += " or serve fewer models"
    if device == "cuda" and not gpus:
        raise ConfigError("no GPU is visible to Ray: join a cluster that has some, or use --device cpu")
    if device == "cuda" and gpus < most:
        raise ConfigError(f"{most} engines need as many GPUs, Ray sees {gpus}: {mend}")
    if cpus < most:
        raise ConfigError(f"{most} engines need as many CPUs, Ray sees {cpus}: {mend}")


def wait_until_ready(names: Sequence[str], board: Any, base: str, say: Say, interrupts: Interrupts) -> None:
    """Until these applications run and a replica answers; shows what replicas say meanwhile. Raises ConfigError."""
    seen, told, since = 0, "", time.monotonic()
    while True:
        interrupts.check()
        for line in ray.get(board.since.remote(seen)):
            seen += 1
            say(f"  {line.replica}: {line.text}")
            if line.fatal:
                raise ConfigError(line.text)
        states = serve.status().applications
        for name in names:
            if name in states and states[name].status is ApplicationStatus.DEPLOY_FAILED:
                raise ConfigError(f"the {name} application could not be started: {last_line(states[name].message)}")
        starting = [
            name for name in names if name not in states or states[name].status is not ApplicationStatus.RUNNING
        ]
        missing = f"the {starting[0]} application to start" if starting else unhealthy(f"{base}/health")
        if missing is None:
            return
        if time.monotonic() - since > PATIENT_SECONDS and missing != told:
            say(f"still waiting for {missing}")
            told = missing
        time.sleep(LOOK_SECONDS)


def unhealthy(url: str) -> str | None:
    """What is amiss with the answer that `url` gives; None where all is well."""
    try:
        status = httpx.get(url, timeout=5, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"{url}: {first_line(error)}"
    return None if status == 200 else f"{url}, which answers {status}"


def announce(base: str, playground: bool, options: ServeOptions, say: Say) -> None:
    """Where things are, and what runs there."""
    wait = max(30.0, options.wake_seconds) if options.sleeps else 30.0  # it may have gone to sleep meanwhile
    served = options.served
    for name, deployment in app.engine_names(options).items():
        card = asyncio.run(card_of(deployment, wait))
        exact = "exact" if card.exact else "not exact: a token may differ where two scores nearly tie"
        drafter = f"{card.adapter}, block length {card.block_length}" if card.adapter else "none"
        say(f"{card.name} is served in {card.dtype} on {card.device} ({exact})")
        say(f"  drafter     {drafter}; drafts {card.drafts}")
        wanted = f"{options.min_replicas} to {served[name].engines}, as the load wants"
        say(f"  replicas    {served[name].engines if options.max_replicas is None else wanted}")
        if card.sampling_defaults != Sampling():
            say(f"  sampling    {', '.join(told_of(card.sampling_defaults))}, where a request says nothing")
    if playground:
        say(f"  playground  {base}/playground/")
    say(f"  OpenAI API  {base}/v1")
    say("  stop        Ctrl-C")


def told_of(sampling: Sampling) -> list[str]:
    """What is not neutral."""
    neutral = asdict(Sampling())
    return [f"{name} {value:g}" for name, value in asdict(sampling).items() if value != neutral[name]]


async def card_of(deployment: str, seconds: float) -> ModelCard:
    """Ask a replica; in an event loop, which a handle needs where the environment says so (`SHORT_WAYS`)."""
    async with asyncio.timeout(seconds):
        card: ModelCard = await serve.get_deployment_handle(deployment, API).describe.remote()
    return card


def watch(say: Say, interrupts: Interrupts) -> Never:
    """Tell when an application gets into trouble or out of it, until interrupted. Raises ConfigError if Ray is gone."""
    known: dict[str, str] = {}
    while True:
        interrupts.check()
        time.sleep(WATCH_SECONDS)
        try:
            status = serve.status()
        except Exception as error:
            raise ConfigError(f"the Ray cluster is gone: {first_line(error)}") from None
        for name, state in troubles(status).items():
            if known.get(name, ApplicationStatus.RUNNING.value) != state:
                say(f"{name}: {state.lower()}")
            known[name] = state


def troubles(status: ServeStatus) -> dict[str, str]:
    return {name: state.status.value for name, state in status.applications.items()}


def reachable(host: str) -> str:
    """An address of this machine that a browser on it can open."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "Ray's logs say why"
