"""What can be known to fail before anything is served: the port, the models, the adapters. Each failure is one line."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import psutil

from cluster.ingress.auth import read_keys
from cluster.observe.tracing import check_traces
from cluster.options import FurtherModel, ServeOptions
from tidar_core.config import DEFAULT_MODEL, ConfigError, ModelConfig
from tidar_core.imports import quick_imports
from tidar_core.memory import GIB, free_memory
from tidar_core.model.adapter_config import AdapterConfig, BaseIdentity, read_adapter_config
from tidar_core.model.contract import read_contract, stated_architecture
from tidar_core.model.sources import ModelSource, find_model, from_home
from tidar_core.settings import suggestion

OWN_ADAPTERS = ("default", "none")  # words that are no path


def check_port(host: str, port: int) -> None:
    """Raise ConfigError where the port cannot be listened on.

    Serve's proxies would share a port that another Serve has (SO_REUSEPORT), and requests would go to either.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from None
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # Without it a port whose last connections are still in TIME_WAIT would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or choose "
                f"another with --port"
            ) from None


def check_options(options: ServeOptions) -> dict[str, ModelSource]:
    """Where each model lies, by what it was asked for; a hub id is downloaded. Raises ConfigError where a model or an
    adapter is not there, a key file is of no use, packages for traces are missing or Ray knows no such GPU."""
    for file in (options.api_keys, options.metrics_keys):
        read_keys(file)
    check_traces(options.traces)
    check_accelerator(options.accelerator)
    for served in options.served.values():
        if served.config.adapter not in OWN_ADAPTERS:
            read_adapter(from_home(served.config.adapter))
    return {model: find_model(model) for model in models_of(options)}


def check_visible(options: ServeOptions) -> None:
    """As `check_options` and `check_models`, of what can be seen from here: raises ConfigError for what is wrong in
    itself.

    For a machine that may have neither models nor keys, as the head of a Ray cluster: what is not there is left to the
    replicas, and no hub id is downloaded.
    """
    check_accelerator(options.accelerator)
    for served in options.served.values():
        check_word(served.config.model, (DEFAULT_MODEL,))
        check_word(served.config.adapter, OWN_ADAPTERS)
    for file in (options.api_keys, options.metrics_keys):
        if file is not None and os.access(from_home(file), os.R_OK):
            read_keys(file)
    visible = [model for model in models_of(options) if model == DEFAULT_MODEL or is_there(model)]
    check_models(options, {model: find_model(model) for model in visible}, is_there)


def check_paths(options: ServeOptions) -> None:
    """Raise ConfigError where a path of the options leads to nothing: for the machine that the engines run on."""
    for file in (options.api_keys, options.metrics_keys):
        read_keys(file)
    for served in options.served.values():
        if served.config.model.startswith(("/", "~", "./", "../")):
            find_model(served.config.model)
        if served.config.adapter not in OWN_ADAPTERS:
            read_adapter(from_home(served.config.adapter))


def check_word(given: str, words: Sequence[str]) -> None:
    """Raise ConfigError for what is neither one of the words nor seen here, and but for a letter is one of them."""
    near = get_close_matches(given, [word for word in words if abs(len(word) - len(given)) <= 1], n=1, cutoff=0.92)
    if near and given not in words and not is_there(given):
        raise ConfigError(f"there is no '{given}': did you mean '{near[0]}'?")


def is_there(path: str) -> bool:
    return os.path.exists(from_home(path))  # unlike Path.exists, False where a folder above must not be read


def models_of(options: ServeOptions) -> list[str]:
    """Each base once, however many adapters it has: in a GGUF file a header holds the whole vocabulary."""
    return list(dict.fromkeys(served.config.model for served in options.served.values()))


def check_models(
    options: ServeOptions, sources: Mapping[str, ModelSource], can_be_seen: Callable[[str], bool] = lambda adapter: True
) -> None:
    """Raise ConfigError where one of the models that were found is not one that the decoder runs, or where an adapter
    that can be seen from here does not fit it.

    Reads headers only; a replica checks the rest when it loads. Imports torch, which takes two seconds.
    """
    with quick_imports():
        from tidar_core.model.configuration import load_config

    seen = [served.config for served in options.served.values() if can_be_seen(served.config.adapter)]
    stated = {config.model: taken_for for config in seen if (taken_for := stated_architecture(config.adapter))}
    shapes = {model: load_config(source, stated.get(model)) for model, source in sources.items()}
    for name, served in options.served.items():
        config = served.config
        if config.model in shapes and config.adapter not in OWN_ADAPTERS and can_be_seen(config.adapter):
            check_adapter(from_home(config.adapter), name, shapes[config.model])


def check_memory(options: ServeOptions, sources: Mapping[str, ModelSource]) -> None:
    """Raise ConfigError where the weights of several engines that start together on this machine's CPU plainly do not
    fit into its memory. Each engine looks what is free before it reads its own, and sees nothing of the others' yet.

    Reads headers only.
    """
    with quick_imports():
        from tidar_core.kernels.cpu import packs_matrices
        from tidar_core.model.configuration import load_config
        from tidar_core.model.footprint import weights_bytes

    counts, needed = list[int](), 0.0
    for served in options.served.values():
        config = served.config
        shape = load_config(sources[config.model], stated_architecture(config.adapter))
        # One comes up even of a model that may sleep (`replica_count`).
        counts.append(served.engines if options.max_replicas is None else max(1, options.min_replicas))
        packed = packs_matrices(shape, config.page_size)
        needed += counts[-1] * weights_bytes(sources[config.model], shape, config.dtype, packed)
    free, engines = free_memory(), sum(counts)
    if engines > 1 and needed > free and not psutil.MACOS:  # which lends as much of its disk as is needed
        fewer = "lower --replicas, " if options.max_replicas is None else "lower --min-replicas, "
        ways = fewer * (max(counts) > 1) + "serve fewer models, " * (len(counts) > 1)
        raise ConfigError(
            f"the weights of {engines} engines take {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are "
            f"free: free some, {ways}serve in fewer bits (--dtype), or take a smaller model"
        )


def check_accelerator(name: str | None) -> None:
    """Raise ConfigError for a GPU that Ray has no name for: a replica would wait for it for ever."""
    from ray.util.accelerators import accelerators

    known = [value for key, value in vars(accelerators).items() if key.startswith(("NVIDIA_", "AMD_INSTINCT_"))]
    if name is not None and name not in known:
        raise ConfigError(f"accelerator '{name}' is no GPU that Ray knows{suggestion(name, known)}")


def read_adapter(place: Path) -> AdapterConfig | None:
    """What an adapter says of itself; None where a model's own drafting is described. Raises ConfigError."""
    if os.path.isfile(place):
        read_contract(place)
        return None
    return read_adapter_config(place)


def check_adapter(place: Path, model: str, config: ModelConfig) -> None:
    """Raise ConfigError where the adapter's base has another shape than the model."""
    adapter = read_adapter(place)
    if adapter is None:
        return
    base = adapter.base
    for field in BaseIdentity.model_fields:
        ours = getattr(config, field, None)
        theirs = getattr(base, field)
        if ours is not None and ours != theirs:
            raise ConfigError(
                f"adapter {place.name} does not fit: made for {base.name} with {field} {theirs}, {model} has "
                f"{ours}; name another adapter, 'default' or 'none'"
            )


def absolute(options: ServeOptions) -> ServeOptions:
    """The options with paths that hold wherever a replica's process starts."""

    def loaded_from(part: ServeOptions | FurtherModel) -> dict[str, Any]:
        return {"model": rooted(part.model, (DEFAULT_MODEL,)), "adapter": rooted(part.adapter, OWN_ADAPTERS)}

    changed = {
        **loaded_from(options),
        "adapters": {name: rooted(path, OWN_ADAPTERS) for name, path in options.adapters.items()},
        "models": {name: part.model_copy(update=loaded_from(part)) for name, part in options.models.items()},
        "name": options.served_name,
        "api_keys": rooted(options.api_keys, ()),
        "metrics_keys": rooted(options.metrics_keys, ()),
    }
    return options.model_copy(update=changed)


def rooted(path: str | None, words: Sequence[str]) -> str | None:
    """A path that is there, from the root on; one of the `words`, or what is not there, as it is."""
    if path is None or path in words or not os.path.exists(found := from_home(path)):
        return path
    # A file may be a link to one of another name, which lacks the .gguf: all are in a hub's cache.
    return str(found.resolve() if found.is_dir() else found.absolute())
