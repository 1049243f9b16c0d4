"""How a model's makers want it sampled, as they state it beside the weights."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tidar_core.model.gguf import read_header
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.request import RequestError, Sampling, SamplingParams

_GENERATION_CONFIG = "generation_config.json"
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def read_sampling_defaults(source: ModelSource, report: Callable[[str], None]) -> Sampling:
    """What the checkpoint's generation_config.json or GGUF header states; the rest is neutral, whatever transformers
    takes for a key that is left out. `report` gets a line for each value that cannot be used.

    Raises ConfigError where the file cannot be read.
    """
    # As in vLLM, do_sample counts for nothing. Many files that say how to sample leave it out, which in transformers
    # means false. Where one says false, its makers want the likeliest token: the server samples all the same where a
    # request names no temperature, as OpenAI's does, and then what they state is nearer to that than temperature 1.
    where, stated = _stated(source)
    found: dict[str, Any] = {}
    for name, value in stated.items():
        fault = _fault(name, value)
        if fault is None:
            found[name] = 0 if name == "top_k" and value == -1 else value
        else:
            report(f"{source.name}: {where} states {name} {repr(value)[:40]}, which is not used: {fault}")
    return Sampling(**found)


def _stated(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """What a user may call the place, and the values that are there, by our names."""
    if source.gguf_path is not None:
        metadata = read_header(source.gguf_path).metadata
        return "its header", {name: _written(metadata[key]) for name, key in _GGUF_KEYS.items() if key in metadata}
    path = source.directory / _GENERATION_CONFIG
    content = read_json(path) if path.is_file() else {}
    names = [field.name for field in fields(Sampling)]
    return _GENERATION_CONFIG, {name: content[name] for name in names if content.get(name) is not None}


def _written(value: object) -> object:
    """A number as it was before it was stored in fp32, which keeps six digits: as in the checkpoint that the file was
    made of."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _fault(name: str, value: object) -> str | None:
    """Why a value is none that a request could have, in one line; None where it is one."""
    whole = name == "top_k"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return f"{name} must be a {'whole ' if whole else ''}number"
    stated: dict[str, Any] = {name: 0 if whole and value == -1 else value}  # as in requests: vLLM's word for off
    try:
        SamplingParams(max_tokens=1, **stated)
    except RequestError as error:
        return str(error)
    return None
