"""`tidar up`: two Serve applications on a Ray cluster, joined or started; a clean end."""

import asyncio
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Never, TypeVar

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.application_state import StatusOverview
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from cluster import app
from cluster.card import PackedCard
from cluster.operate.haproxy import haproxy_settings
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import (
    LOGS_SAY,
    Say,
    beside,
    check_ray,
    check_threads,
    claim,
    ended_parts,
    ray_cluster,
    running_cluster,
)
from cluster.options import ServeOptions, UpOptions
from cluster.preflight import absolute, check_memory, check_models, check_options, check_port
from cluster.replica.progress import Board, put_up_board
from tidar_core.config import ConfigError
from tidar_core.error_text import first_line, last_line, unbroken
from tidar_core.request import Sampling

API, PAGE_APPLICATION = "api", "playground"
# What is said between processes goes by gRPC and past no second event loop: on 2 cores that took a third less processor
# time a token than Ray's own streams did. By itself gRPC takes 4 MiB at once, which log-probabilities of a long prompt
# exceed. Serve reads these when its processes start.
SHORT_WAYS = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "1073741824",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
# Of a Ray that serves this and nothing else. It starts as many processes ahead as there are processors, each of which
# imports that, and would keep as many: these are enough for one replica and all of Serve's, the rest ends in seconds.
# Nobody asks it which tasks ran: where its head has ended, this process would wait five seconds to tell it that.
# Where memory is nearly used up, whoever has it, it would end the processes that are youngest: proxy and ingress, and
# with them all streams, which outlive an engine alone. The system ends the largest, and only once there is none left.
LEAN = {
    "RAY_preload_python_modules": "cluster.lean_serve",
    "RAY_num_workers_soft_limit": "8",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
WITH_IDS = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.request_ids:middlewares"}
# A line a request and a call would cost time and push all else out of the logs.
QUIET = {"enable_access_log": False}
TAKEN = r"cannot bind socket \(.*?\) for \[(.*?)\]|Failed to bind to address '(.*?)'"  # HAProxy's, Serve's words
LATE = r"time(d |-)?out|killed by `ray\.kill`|never ran"  # Serve ends a proxy that is not ready in time
LONG_START = r"more than \d+s to initialize"  # as a large model's is; what it does there the engine says itself
LOOK_SECONDS = 0.25
FIT_SECONDS = 5.0  # that the check of models is given to end once all else has
PATIENT_SECONDS = 60.0  # of a start, before it is said what it waits for
WATCH_SECONDS = 5.0
HEAD_GOES_SECONDS = 5.0  # that a head which was told to end may listen on

Known = TypeVar("Known")


def say_now(line: str) -> None:
    with suppress(OSError):  # the terminal may be closed already, and there is an end to be made
        print(f"{line}\n", end="", flush=True)  # in one piece: an interrupt may come between two, another thread's too


def up(options: UpOptions) -> None:
    """Serve what was chosen until Ctrl-C or SIGTERM, then take it all down again.

    Raises ConfigError, one line for the user, where something stands in the way.
    """
    with Interrupts() as interrupts:
        try:
            address = running_cluster()
            if address is None:
                check_threads()
                check_port(options.host, options.port)
            options = options.model_copy(update={"serve": absolute(options.serve)})
            sources = check_options(options.serve)
            fit = beside(partial(check_models, options.serve, sources), "check-models")  # Ray's start is mostly waiting
            try:
                # A cluster that is joined has its own.
                proxy: AbstractContextManager[dict[str, str]] = nullcontext({})
                if address is None:
                    proxy = haproxy_settings(options.host, options.port, options.serve.most_ongoing, say_now)
                with proxy as front, ray_cluster(address, say_now, interrupts, SHORT_WAYS | LEAN | WITH_IDS | front):
                    fit.result()
                    if address is None and app.engine_device(options.serve) == "cpu":
                        check_memory(options.serve, sources)
                    if address is not None:
                        refuse_running_serve(address)
                        claim(address)
                        check_port(options.host, options.port)
                    with applications(options, address is not None, say_now, interrupts):
                        watch(say_now, interrupts)
            finally:
                wait([fit], timeout=FIT_SECONDS)  # Python's end in the midst of torch's import might be a crash
        except (KeyboardInterrupt, SystemExit):
            say_now("stopped")
        except ConfigError:
            if not interrupts.asked:
                raise
            say_now("stopped")  # what was interrupted failed for that reason


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
    """The API, and the page where it is wanted, from ready to deleted, streams under way given time to end
    (`cluster.app.DRAIN_SECONDS`); on a cluster that goes on, Serve ends too, as it began here. A Ray of our own that
    served nothing yet is not waited for."""
    check_resources(options.serve)
    ready, board = False, None
    try:
        board = put_up_board()
        proxies = start_serve(options.host, options.port, interrupts)
        api = app.application(options.serve)
        targets = [serve.RunTarget(api, name=API, route_prefix="/", logging_config=QUIET)]
        if options.serve.playground:
            from playground.app import build as build_playground

            page = build_playground({})
            targets.append(
                serve.RunTarget(page, name=PAGE_APPLICATION, route_prefix="/playground", logging_config=QUIET)
            )
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        result_of(proxies, interrupts)
        base = f"http://{reachable(options.host)}:{options.port}"
        wait_until_ready([target.name for target in targets], board, base, say, interrupts)
        board.take_down()  # of replicas that come and go from here on nobody reads a line
        announce(base, options, say)
        ready = True
        yield
    finally:
        interrupts.ignore()
        say("stopping")
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # Serve asks for things on its way down that nobody waits for
        try:
            if (ready or joined) and not ended_parts():  # a thread that asks a Ray that is gone has Ray end us there
                down = beside(partial(take_down, options.serve.playground, joined, board), "take-down")
                # A signal to all processes at once, systemd's way, ends Ray beside us.
                while not (down.done() or ended_parts()):
                    time.sleep(LOOK_SECONDS / 5)
                if (
                    down.done() and down.exception()
                ):  # for that reason perhaps: a head that was told to end may listen for a moment yet
                    told = time.monotonic() + HEAD_GOES_SECONDS
                    while not ended_parts() and time.monotonic() < told:
                        time.sleep(LOOK_SECONDS / 5)
                if not ended_parts():  # what failed for that reason is no news
                    down.result()
        except Exception as error:  # the cluster may be gone already; what is left of it ends with the caller
            say(f"Serve did not end by itself: {first_line(error)}")


def take_down(playground: bool, joined: bool, board: Board | None) -> None:
    """Delete the applications, the streams of the API given time to end, and end Serve on a cluster that goes on."""
    if playground:
        serve.delete(PAGE_APPLICATION, _blocking=False)
    serve.delete(API)
    if joined:
        if board is not None:
            board.take_down()
        with redirect_stdout(io.StringIO()):  # Ray reports the controller's end as an error of a raylet
            serve.shutdown()
            time.sleep(LOOK_SECONDS)


def start_serve(host: str, port: int, interrupts: Interrupts) -> Future[Any]:
    """Start Serve, which takes applications from here on. The result comes once its proxies are ready: replicas load
    beside them."""
    proxies = beside(partial(start_proxies, host, port), "serve-start")  # an interrupt does not wait for them
    while not proxies.done() and not told_by_serve(serve.status, interrupts).proxies:
        time.sleep(LOOK_SECONDS / 5)
    if proxies.done():
        proxies.result()
    return proxies


def result_of(future: Future[Any], interrupts: Interrupts) -> Any:
    """What it gives once it is done, unless Ray, or the user, ends before."""
    while not future.done():
        check_ray(interrupts)
        time.sleep(LOOK_SECONDS / 5)
    return future.result()


def told_by_serve(ask: Callable[[], Known], interrupts: Interrupts) -> Known:
    """What Serve says when it is asked this. Raises as `check_ray`."""
    check_ray(interrupts)
    try:
        return ask()
    except Exception as error:
        check_ray(interrupts)
        raise ConfigError(f"the Ray cluster is gone: {first_line(error)}") from None


def states_of_applications() -> dict[str, StatusOverview]:
    """Each application's state, by its name. Not by `serve.status`, which pickles the routers of all deployments: 27 ms
    of a core a look at two of them, where this takes 1.3."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return {state.name: state for state in client.list_serve_statuses()} if client else {}


def start_proxies(host: str, port: int) -> None:
    """Start Serve and wait for its proxies. Raises ConfigError, one line for the user, where they do not come."""
    try:
        listens = HTTPOptions(host=host, port=port)
        serve.start(proxy_location=ProxyLocation.EveryNode, http_options=listens, logging_config=QUIET)
    except (RayError, RuntimeError, TimeoutError) as error:
        if taken := re.search(TAKEN, str(error)):
            address = taken[1] or taken[2]
            if address.endswith(
                f":{port}"
            ):  # of another one that was taken, ours says nothing: we listen there by then
                check_port(host, port)
            raise ConfigError(f"{address} was taken by another program meanwhile: try again") from error
        late = isinstance(error, TimeoutError) or re.search(LATE, str(error), re.IGNORECASE)
        mend = ": try again, with less going on beside it" if late else ""
        raise ConfigError(f"Ray Serve's proxy does not start ({last_line(str(error), LOGS_SAY)}){mend}") from error


def check_resources(options: ServeOptions) -> None:
    """Raise ConfigError where the cluster has no room for the replicas; without it they would wait for ever."""
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    device = app.engine_device(options)
    most, mend = options.most_engines, "lower --replicas" if options.max_replicas is None else "lower --max-replicas"
    if len(options.served) > 1:
        mend += " or serve fewer models"
    if device == "cuda" and not gpus:
        raise ConfigError("no GPU is visible to Ray: join a cluster that has some, or use --device cpu")
    if device == "cuda" and gpus < most:
        raise ConfigError(f"{most} engines need as many GPUs, Ray sees {gpus}: {mend}")
    if cpus < most:
        raise ConfigError(f"{most} engines need as many CPUs, Ray sees {cpus}: {mend}")


def wait_until_ready(names: Sequence[str], board: Board, base: str, say: Say, interrupts: Interrupts) -> None:
    """Until these applications run and a replica answers; shows what replicas say meanwhile. Raises ConfigError."""
    told, since = "", time.monotonic()
    while True:
        check_ray(interrupts)
        for line in board.news():
            say(f"  {line.replica}: {line.text}")
            if line.fatal:
                raise ConfigError(line.text)
        states = told_by_serve(states_of_applications, interrupts)
        seen = {name: states[name].app_status for name in names if name in states}
        for name, state in seen.items():
            if state.status is ApplicationStatus.DEPLOY_FAILED:
                raise ConfigError(f"the {name} application could not be started: {last_line(state.message, LOGS_SAY)}")
        starting = [name for name in names if name not in seen or seen[name].status is not ApplicationStatus.RUNNING]
        missing = unstarted(starting[0], states) if starting else unhealthy(f"{base}/health")
        if missing is None:
            return
        if time.monotonic() - since > PATIENT_SECONDS and missing != told:
            say(f"still waiting for {missing}")
            told = missing
        time.sleep(LOOK_SECONDS)


def unstarted(name: str, states: Mapping[str, StatusOverview]) -> str:
    """That an application is still to start, and what Serve says of that, as where others have the GPUs it needs."""
    deployments = states[name].deployment_statuses if name in states else ()
    messages = (each.message for each in deployments if each.status is not DeploymentStatus.HEALTHY)
    why = next((unbroken(each) for each in messages if each.strip() and not re.search(LONG_START, each)), "")
    return f"the {name} application to start" + (f": {why}" if why else "")


def unhealthy(url: str) -> str | None:
    """What is amiss with the answer that `url` gives; None where all is well."""
    try:
        # What TLS, which is not spoken here, would be verified by takes 50 ms of a core to read.
        status = httpx.get(url, timeout=5, trust_env=False, verify=False).status_code
    except httpx.HTTPError as error:
        return f"{url}: {first_line(error)}"
    return None if status == 200 else f"{url}, which answers {status}"


def announce(base: str, up: UpOptions, say: Say) -> None:
    """Where things are, what runs there, and who may use it where that is anybody."""
    options = up.serve
    wait = max(30.0, options.wake_seconds) if options.sleeps else 30.0  # it may have gone to sleep meanwhile
    served = options.served
    for name, deployment in app.engine_names(options).items():
        card = asyncio.run(facts_of(deployment, wait))
        exact = "exact" if card["exact"] else "not exact: a token may differ where two scores nearly tie"
        drafter = f"{card['adapter']}, block length {card['block_length']}" if card["adapter"] else "none"
        say(f"{card['name']} is served in {card['dtype']} on {card['device']} ({exact})")
        say(f"  drafter     {drafter}; drafts {card['drafts']}")
        wanted = f"{options.min_replicas} to {served[name].engines}, as the load wants"
        say(f"  replicas    {served[name].engines if options.max_replicas is None else wanted}")
        if card["sampling_defaults"] != Sampling():
            say(f"  sampling    {', '.join(told_of(card['sampling_defaults']))}, where a request says nothing")
    if options.playground:
        say(f"  playground  {base}/playground/")
    say(f"  OpenAI API  {base}/v1")
    if options.api_keys is None and not is_of_this_machine(up.host):
        say("  keys        none: whoever reaches this port may use it, unless --api-keys FILE asks for one")
    say("  stop        Ctrl-C")


def told_of(sampling: Sampling) -> list[str]:
    """What is not neutral."""
    neutral = asdict(Sampling())
    return [f"{name} {value:g}" for name, value in asdict(sampling).items() if value != neutral[name]]


async def facts_of(deployment: str, seconds: float) -> Mapping[str, Any]:
    """A card's fields but the tokenizer, by a replica; in an event loop, which a handle needs where the environment
    says so (`SHORT_WAYS`)."""
    async with asyncio.timeout(seconds):
        card: PackedCard = await serve.get_deployment_handle(deployment, API).describe.remote(None)
    return card.facts


def watch(say: Say, interrupts: Interrupts) -> Never:
    """Tell when an application gets into trouble or out of it, until interrupted. Raises ConfigError if Ray is gone."""
    known: dict[str, str] = {}
    while True:
        interrupts.check()
        time.sleep(WATCH_SECONDS)
        for name, application in told_by_serve(states_of_applications, interrupts).items():
            state = application.app_status.status.value
            if known.get(name, ApplicationStatus.RUNNING.value) != state:
                say(f"{name}: {state.lower()}")
            known[name] = state


def is_of_this_machine(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def reachable(host: str) -> str:
    """An address of this machine that a browser on it can open."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
