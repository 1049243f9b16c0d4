"""Ingress and engine as one Serve application; `cluster.app:build` is the builder for a Serve config file."""

from dataclasses import replace
from typing import Any, Literal

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.carry.directory import Directory, Wake
from cluster.options import ServedModel, ServeOptions, deployment_part
from cluster.preflight import check_paths, check_visible
from cluster.replica.replica import EngineReplica
from tidar_core.config import ConfigError
from tidar_core.settings import read_options

ENGINE = "Engine"
INGRESS = "Ingress"
ROUTER = "cluster.carry.routing:ReplicaRouter"
POLICY = "cluster.autoscaling:LoadPolicy"
MEASURE_SECONDS, LOOK_BACK_SECONDS = 1.0, 5.0  # how often replicas tell of their load, and how much of it counts
# Serve's own limits bind nothing here: a call over them would wait, the one that asks a full replica whether it lives
# too, or be refused because many came at one moment. `Admission` at the ingress bounds the work.
UNBOUND = 1_000_000
DRAIN_SECONDS = 10.0
PUBLISH_SECONDS = 2.0  # between two looks at what replicas have cached


@serve.ingress()
class Ingress:
    """Any number of these may run: all that they know they can ask for again."""

    def __init__(self, engines: dict[str, DeploymentHandle], options: ServeOptions):
        wake = Wake(options.wake_seconds, options.max_ongoing) if options.sleeps else None
        self._directories = {name: Directory(as_made_here(engine), wake) for name, engine in engines.items()}
        self._options = options

    def __serve_build_asgi_app__(self) -> FastAPI:
        from cluster.ingress.api import build_api  # here, in the replica: whoever deploys it needs no route

        return build_api(self._directories, self._options)


def as_made_here(handle: DeploymentHandle) -> DeploymentHandle:
    """The same deployment's handle, by the settings of this process: one that was made elsewhere keeps to those of the
    process where it was made, and would not go by gRPC where that one was not told to."""
    return serve.get_deployment_handle(handle.deployment_name, handle.app_name)


def build(args: dict[str, Any]) -> Application:
    """The application behind `/` for a Serve config file, whose `args` are the fields of `ServeOptions`.

    Runs on the Ray cluster. What is wrong leaves as Serve's own exception: any other would be tried three times
    more, and then shown as a traceback; this one is the application's message, one line.
    """
    try:
        options = read_options(ServeOptions, args)
        check_visible(options)
        if engines_run_here(options):
            check_paths(options)  # else a mistake in a path would be found once the old engine has made room
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    return application(options)


def engines_run_here(options: ServeOptions) -> bool:
    """Whether the only node that there is offers what an engine needs; a fleet's head does not."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = ("CPU", "GPU") if engine_device(options) == "cuda" else ("CPU",)
    return len(alive) == 1 and all(alive[0].get(kind) for kind in needs)


def application(options: ServeOptions, router: str = ROUTER) -> Application:
    """The application behind `/`, for the cluster that Ray is connected to. router: the class that chooses replicas."""
    device = engine_device(options)
    gpu: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {}
    if options.accelerator is not None:
        gpu["accelerator_type"] = options.accelerator
    engine = serve.deployment(
        max_ongoing_requests=UNBOUND,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=5.0,  # three in a row, and Serve replaces a replica that hangs; its streams left before
        request_router_config=RequestRouterConfig.model_validate(
            {"request_router_class": router, "request_routing_stats_period_s": PUBLISH_SECONDS}
        ),
        max_constructor_retry_count=options.start_retries,
        ray_actor_options={"num_cpus": 1, **gpu},
    )(EngineReplica)
    names = engine_names(options)
    engines = {
        name: engine.options(name=names[name], **replica_count(options, served)).bind(
            replace(served.config, device=device), name, options.most_engines - served.engines
        )
        for name, served in options.served.items()
    }
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=options.ingresses,
        max_ongoing_requests=UNBOUND,
        max_surge_percent=100,  # it takes up no CPU: the new one is there before the old one lets its streams end
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )(Ingress)
    return ingress.bind(engines, options)


def engine_names(options: ServeOptions) -> dict[str, str]:
    """The engine deployment of every name that requests may ask for."""
    own, *others = options.served
    return {own: ENGINE} | {name: f"{ENGINE}-{deployment_part(name)}" for name in others}


def replica_count(options: ServeOptions, served: ServedModel) -> dict[str, Any]:
    """What Serve is told of how many engines to run for one name: always the same, or as the load wants."""
    if options.max_replicas is None:
        return {"num_replicas": served.engines}
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"answers_each": options.target_ongoing_requests})
    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        # At first one at least, which says what the model is, and that it loads. Stated, it would also be where a
        # fleet under load begins anew at each change of the options.
        initial_replicas=1 if options.min_replicas == 0 else None,
        max_replicas=served.engines,
        metrics_interval_s=MEASURE_SECONDS,
        look_back_period_s=LOOK_BACK_SECONDS,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        downscale_to_zero_delay_s=options.downscale_to_zero_delay_s,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def engine_device(options: ServeOptions) -> Literal["cpu", "cuda"]:
    """The device of the engines; "auto" is a GPU where the cluster has one, or is said to get one that it names."""
    if options.device != "auto":
        return options.device
    some_gpu = ray.cluster_resources().get("GPU", 0) or options.accelerator is not None
    return "cuda" if some_gpu else "cpu"
