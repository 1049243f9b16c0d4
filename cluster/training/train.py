"""`tidar convert --workers N`: a drafter trained by N workers of Ray Train, a GPU each, or a CPU where there is none.

This process gathers the model's words, as with one worker; then all workers read the shards that it wrote and take
every step together (`tidar_core.convert.crew`). So the folder that comes out, the work beside it and the model must be
paths that every node sees. A worker that dies takes the others with it: Ray Train starts them all again, and they go
on from the last checkpoint. With CPU workers (gloo) it is tested; on GPUs (nccl) it has not run yet.
"""

import pickle
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from ray._private.state import available_resources_per_node
from ray.train import (
    ControllerError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import LOGS_SAY, beside, check_ray, ray_cluster, running_cluster
from cluster.preflight import rooted
from cluster.training.train_worker import work
from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.options import ConvertOptions, Screen, Train
from tidar_core.error_text import last_line
from tidar_core.transfer import choose_device

RESTARTS = 3  # of all workers, after one died
STARTS_IN_VAIN = 10  # of Ray's waits for room, a minute each: a node that died may be replaced meanwhile
LOOK_SECONDS = 0.25
PATIENCE = FailureConfig(RESTARTS, controller_failure_limit=STARTS_IN_VAIN)  # type: ignore[call-arg]  # of Train's v1


@contextmanager
def workers_on_ray(count: int, options: ConvertOptions, screen: Screen) -> Iterator[Train]:
    """Ray, joined or started here, with room for `count` workers; what comes out of it trains on them.

    Raises ConfigError, one line for the user, where Ray cannot be had or has no room.
    """
    gpus = choose_device(options.device).type == "cuda"
    with Interrupts() as interrupts, ray_cluster(running_cluster(), screen.line, interrupts):
        check_room(count, gpus, options.threads)
        yield partial(_train, count, gpus, interrupts)


def check_room(count: int, gpus: bool, threads: int) -> None:
    """Raise ConfigError where the cluster has no room for the workers, of which each takes what it needs of one node;
    without it they would wait for ever."""
    there, free, wanted = ray.cluster_resources(), ray.available_resources(), _resources(gpus, threads)
    for kind, each in wanted.items():
        if free.get(kind, 0) < count * each:
            taken = there.get(kind, 0) - free.get(kind, 0)
            raise ConfigError(
                f"{count} workers need {count * each} {kind}s, Ray sees {there.get(kind, 0):.0f}"
                f"{f', of which others have {taken:.0f}' if taken else ''}: lower --workers"
            )
    nodes = available_resources_per_node().values()
    room = sum(min(int(node.get(kind, 0) // each) for kind, each in wanted.items()) for node in nodes)
    if room < count:
        each_needs = " and ".join(f"{each} {kind}{'s' * (each > 1)}" for kind, each in wanted.items())
        raise ConfigError(
            f"each of {count} workers needs {each_needs} of one node, and Ray's nodes have room for {room}: lower "
            "--workers" + (" or --threads" if wanted["CPU"] > 1 else "")
        )


def _resources(gpus: bool, threads: int) -> dict[str, int]:
    """What each worker takes."""
    return {"GPU": 1, "CPU": 1} if gpus else {"CPU": max(1, threads)}


def _train(
    count: int, gpus: bool, interrupts: Interrupts, options: ConvertOptions, spent: float, screen: Screen
) -> Progress:
    """As `train_gathered`, on the workers."""
    check_room(count, gpus, options.threads)  # once more: it was there when gathering began
    if gpus:
        torch.cuda.empty_cache()  # one of the workers may get the GPU that this process has gathered on
    everywhere = replace(
        options,
        model=rooted(options.model, (DEFAULT_MODEL,)) or options.model,
        start=rooted(options.start, ("default", "none")) or options.start,
        data=options.shards.absolute(),
        device="cuda" if gpus else "cpu",
    )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    trainer = TorchTrainer(
        partial(work, everywhere, spent, queue),  # type: ignore[arg-type]
        scaling_config=ScalingConfig(
            num_workers=count, use_gpu=gpus, resources_per_worker=dict(_resources(gpus, options.threads))
        ),
        run_config=RunConfig(name="ray", storage_path=str(options.work), failure_config=PATIENCE),
    )
    screen.line(f"training on {count} workers, which share every step")
    return follow(beside(trainer.fit, "train"), queue, screen, interrupts)


def follow(run: Future[Any], queue: Queue, screen: Screen, interrupts: Interrupts) -> Progress:
    """Shows what the workers say until they are done. Raises ConfigError where they cannot go on."""
    over = False
    try:
        while not over:
            check_ray(interrupts)
            over = run.done()
            for news in map(pickle.loads, queue.get_nowait_batch(queue.qsize())):
                if isinstance(news, ConfigError):
                    raise news
                news(screen)
            time.sleep(0.0 if over else LOOK_SECONDS)
        progress = run.result().return_value
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        check_ray(interrupts)
        raise ConfigError(f"{_reason(error)}; the same command goes on from here") from error
    assert isinstance(progress, Progress)
    return progress


def _reason(error: Exception) -> str:
    """What went wrong with the workers, or with Ray under them."""
    match error:
        case WorkerGroupError(worker_failures=failures) if failures:
            why = _cause(next(iter(failures.values())))
            return f"the workers failed, {RESTARTS} new starts included; at last with: {why}"
        case ControllerError(controller_failure=WorkerGroupStartupTimeoutError(num_workers=count)):
            return f"the cluster has no room for {count} workers any more, and none came: lower --workers"
        case ControllerError(controller_failure=failure):
            return f"the workers could not be started: {_cause(failure)}"
    return f"the workers cannot go on: {_cause(error)}"


def _cause(failure: Exception) -> str:
    """What it says at the end of its traceback: of several lines the first: CUDA ends with advice."""
    text = str(failure)
    named = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", text, re.MULTILINE)
    return (named[-1] if named else last_line(text, LOGS_SAY)).rstrip(".")
