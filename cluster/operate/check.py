"""`tidar check`: a Serve config file or a RayService manifest, read before a cluster gets it.

Ray drops keys that it does not know, without a word, and tells of other mistakes long after `serve deploy` has said
that all went well. Here each is one line, with the place in the file.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from cluster.app import ENGINE, INGRESS, engine_names
from cluster.options import ServeOptions
from cluster.preflight import check_visible
from playground.app import PLAYGROUND, PlaygroundOptions
from tidar_core.config import ConfigError
from tidar_core.error_text import unbroken
from tidar_core.settings import all_mistakes, first_mistake, models_in, suggestion

API, PAGE = "cluster.app:build", "playground.app:build"
# The applications of this project by their builders: the options that each takes, the deployments that it has.
APPLICATIONS: dict[str, tuple[type[BaseModel], tuple[str, ...]]] = {
    API: (ServeOptions, (ENGINE, INGRESS)),
    PAGE: (PlaygroundOptions, (PLAYGROUND,)),
}
ROUTE_PREFIX = re.compile(r"/|/[^{}]*[^{}/]")


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML's own word for it is the last one, and no error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # as it is written: what is merged (`<<`) is not there yet
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key '{key.value}' stands there twice")
            seen.add(key.value)
        return node


def check_file(path: Path) -> list[str]:
    """The mistakes in a file, a line each. Raises ConfigError for a file that is neither kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {unbroken(str(error))}") from None
    found = documents(text, str(path))
    if len(found) > 1 and any(is_serve_config(document) for document in found):
        raise ConfigError(f"{path} holds several documents, of which `serve deploy` reads none: leave out the ---")
    configs = [config for document in found if (config := serve_config(document, path)) is not None]
    if not configs:
        raise ConfigError(f"{path} holds neither a Serve config (applications: …) nor a RayService")
    return [f"{path}: {line}" for config in configs for line in mistakes(config)]


def documents(text: str, where: str) -> list[Any]:
    """The YAML documents of a text, empty ones too. Raises ConfigError, with `where` it stands."""
    try:
        return list(yaml.load_all(text, StrictLoader))
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date or a number that is none
        raise ConfigError(f"{where} cannot be read: {unbroken(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{where} cannot be read: it is nested too deeply") from None


def serve_config(document: Any, path: Path) -> dict[str, Any] | None:
    """The Serve config that a YAML document is, or that a RayService carries; None for any other document."""
    if not isinstance(document, dict):
        return None
    if document.get("kind") == "RayService":
        spec = document.get("spec") or {}
        text = spec.get("serveConfigV2") or "" if isinstance(spec, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{path}: spec.serveConfigV2 is no text: write `serveConfigV2: |` before it")
        found = [document for document in documents(text, f"{path}: serveConfigV2") if document]
        if len(found) > 1:
            raise ConfigError(f"{path}: serveConfigV2 holds several documents: leave out the ---")
        return found[0] if found and isinstance(found[0], dict) else {}
    return document if is_serve_config(document) else None


def is_serve_config(document: Any) -> bool:
    """Whether a YAML document is what `serve deploy` takes, and none of Kubernetes'."""
    return isinstance(document, dict) and "applications" in document and "kind" not in document


def mistakes(config: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a Serve config: unknown keys, then values, then what the applications themselves refuse; where
    there is none of that what Ray refuses, and at last what is missing."""
    found = list(unknown_keys(ServeDeploySchema, config, ""))
    if config.get("applications") == []:
        found.append("applications: there are none: nothing would be served")
    found += [f"{where}: {line}" for where, application in listed(config) for line in of_application(application)]
    if not found:  # Ray's own words tell least
        try:
            found += of_http(ServeDeploySchema.model_validate(config).http_options)
        except ValidationError as error:
            found.append(first_mistake(error, ServeDeploySchema))
        except TypeError as error:  # of Ray's own look at a runtime_env
            found.append(unbroken(str(error)))
    if not found:
        found += of_pages(config)
    yield from found


def of_http(options: HTTPOptionsSchema) -> Iterator[str]:
    """What the proxies would fail of."""
    if not 1 <= options.port <= 65535:
        yield f"http_options.port is {options.port}: a port lies between 1 and 65535"
    if options.keep_alive_timeout_s < 0:
        yield f"http_options.keep_alive_timeout_s is {options.keep_alive_timeout_s}: it must be 0 or more"


def listed(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The applications of a config that are written as such, each with where it stands."""
    applications = config.get("applications")
    for number, application in enumerate(applications if isinstance(applications, list) else ()):
        if isinstance(application, dict):
            yield f"applications[{number}]", application


def unknown_keys(kind: type[BaseModel], given: Any, where: str) -> Iterator[str]:
    """The keys of `given`, at any depth, that the model does not have. Free-form parts are left alone."""
    if not isinstance(given, dict):
        return
    for key, value in given.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in kind.model_fields:
            yield f"{where or 'the file'}: unknown key '{key}'{suggestion(str(key), kind.model_fields)}"
            continue
        for inner in models_in(kind.model_fields[key].annotation):
            if isinstance(value, list):
                for number, item in enumerate(value):
                    yield from unknown_keys(inner, item, f"{place}[{number}]")
            else:
                yield from unknown_keys(inner, value, place)


def of_application(application: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one application that this project builds."""
    known = APPLICATIONS.get(str(application.get("import_path")))
    if known is None:
        yield f"import_path {application.get('import_path')!r} is none of {', '.join(APPLICATIONS)}"
        return
    prefix = application.get("route_prefix")
    if isinstance(prefix, str) and not ROUTE_PREFIX.fullmatch(prefix):
        yield f"route_prefix is {prefix!r}: write it as /name, without a / at its end"
    kind, names = known
    counted: dict[str, str] = {}
    try:
        options = kind.model_validate(application.get("args") or {})
        if isinstance(options, ServeOptions):
            names = (*engine_names(options).values(), INGRESS)
            counted = counted_in_args(options)
            check_visible(options)
    except ValidationError as error:
        yield from (f"args: {line}" for line in all_mistakes(error, kind))
    except ConfigError as error:
        yield f"args: {error}"
    yield from of_environment(application.get("runtime_env"))
    deployments = application.get("deployments")
    yield from of_deployments(deployments if isinstance(deployments, list) else (), names, counted)


def of_environment(given: Any) -> Iterator[str]:
    """What is wrong with a runtime_env wherever it is read; the files that it names may lie elsewhere, and a key that
    nobody knows may be a plugin's."""
    if not isinstance(given, dict):  # Serve's own schema tells
        return
    known = [field.removeprefix("_") for field in RuntimeEnv.known_fields]
    for key in given:
        near = get_close_matches(str(key), known, n=1, cutoff=0.8)
        if near and key not in known:
            yield f"runtime_env: unknown key '{key}': did you mean '{near[0]}'?"
    variables = given.get("env_vars") or {}
    if not isinstance(variables, dict):
        yield "runtime_env: env_vars is no mapping: give names and values"
        return
    for name, value in variables.items():
        for word in (name, value):
            if not isinstance(word, str):
                yield f"runtime_env: env_vars: {word!r} of {name} is no text: put it in quotes"


def counted_in_args(options: ServeOptions) -> dict[str, str]:
    """Where the args say how many replicas a deployment has, for those of which they say it."""
    engines = engine_names(options)
    if options.max_replicas is not None:
        stated = dict.fromkeys(engines.values(), "max_replicas")
    else:
        stated = {engines[name]: f"models.{name}.replicas" for name, one in options.models.items() if one.replicas}
        if "replicas" in options.model_fields_set:
            stated[ENGINE] = "replicas"
    return stated | ({INGRESS: "ingresses"} if "ingresses" in options.model_fields_set else {})


def of_pages(config: dict[str, Any]) -> Iterator[str]:
    """Where an API would lead whoever opens it to a page that is not there."""
    prefixes = [(where, one, one.get("route_prefix", "/")) for where, one in listed(config)]
    pages = [prefix for _, one, prefix in prefixes if one["import_path"] == PAGE]
    for where, one, prefix in prefixes:
        if one["import_path"] != API or prefix is None:
            continue
        page = f"{prefix.rstrip('/')}/playground"
        if page not in pages and ServeOptions.model_validate(one.get("args") or {}).playground:
            yield f"{where} leads to {page}: add {PAGE} with that route_prefix, or playground: false to its args"


def of_deployments(deployments: Sequence[Any], names: Sequence[str], counted: dict[str, str]) -> Iterator[str]:
    """What is wrong with the deployments that an application lists. names: those that it has. counted: for some of
    them, where the args say how many replicas there are."""
    seen: set[str] = set()
    for number, deployment in enumerate(deployments):
        if not isinstance(deployment, dict):
            yield f"deployments[{number}] is no mapping: give its name and settings"
            continue
        name = str(deployment.get("name"))
        if name not in names:
            yield f"unknown deployment '{name}'{suggestion(name, names)}"
        if name in seen:
            yield f"deployment {name} is listed twice; put the settings of both into one"
        seen.add(name)
        yield from (f"deployment {name}: {line}" for line in of_deployment(name, deployment))
        for key in ("num_replicas", "autoscaling_config"):
            if name in counted and deployment.get(key) is not None:
                yield f"deployment {name}: {key} would take the place of the args' {counted[name]}; leave one out"


def of_deployment(name: str, deployment: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the settings of one deployment."""
    scaling = deployment.get("autoscaling_config") or {}
    if isinstance(scaling, dict):
        try:
            AutoscalingConfig.model_validate(scaling)
        except ValidationError as error:
            yield f"autoscaling_config: {first_mistake(error, AutoscalingConfig)}"
        except (ImportError, AttributeError, ValueError) as error:  # Ray looks for the policy at once
            yield f"autoscaling_config: policy_function cannot be found: {unbroken(str(error))}"
        if scaling.get("min_replicas") == 0:
            yield "min_replicas is 0: only in args is it known to the ingress, which must wake the model; say it there"
    if deployment.get("num_replicas") == 0:
        yield "num_replicas is 0: no request would wake the model; set 1 or more, or min_replicas 0 in args"
    actor = deployment.get("ray_actor_options")
    yield from of_environment(actor.get("runtime_env") if isinstance(actor, dict) else None)
    if deployment.get("user_config") is not None:
        yield "user_config is nothing that it takes; what can be chosen stands in args"
    if name.startswith(ENGINE) and "ray_actor_options" in deployment:
        yield (
            "ray_actor_options would take the place of the engine's own, its GPU too: "
            "use the args device, accelerator and threads"
        )
