"""Rotary positions: what a checkpoint states, the frequencies that follow, and where a head's pairs lie.

The numbers are transformers' own, taken from its functions: a table here is the table there. A scaling that depends on
how long a sequence has grown ("dynamic") does nothing up to the length that the model states, and no sequence grows
beyond: a token at one position would not keep its key. "longrope" (Phi-3, arXiv 2402.13753) knows two lengths; an
engine keeps to one of them for all its sequences, as vLLM does.

The kernels know one layout: a head's coordinate i rotates with i + head_dim / 2. A model whose pairs lie side by side,
or that rotates a part of each head, has its query and key rows put in that order as they are read (a product of the two
does not tell), and what does not rotate has the frequency 0.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tidar_core.config import ConfigError, ModelConfig, RopeScaling

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "factor"),
    "longrope": ("original_max_position_embeddings", "factor"),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor",),
}
_UNSCALED = ("default", "dynamic")
_RATIOS = ("yarn", "longrope")
_LISTS = ("short_factor", "long_factor")
_ZERO_IS_UNSTATED = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_scaling(stated: Mapping[str, Any], max_positions: int, name: str) -> RopeScaling | None:
    """The scaling in transformers' `rope_parameters`, None for one that changes nothing within the positions that the
    model states ("default", "dynamic"). Raises ConfigError.

    `max_positions` is the model's max_position_embeddings; `name` is the model's, for the error.
    """
    kind = stated.get("rope_type", "default")
    if kind in _UNSCALED:
        return None
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ConfigError(f"{name}: rope scaling {kind!r} is not supported, only {', '.join((*_NEEDED, 'dynamic'))}")
    values: dict[str, Any] = {}
    for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        value = stated.get(key)
        if key == "factor" and value is None and kind in _RATIOS:  # transformers then takes that of the lengths
            value = max_positions / values["original_max_position_embeddings"]
        if key not in _NEEDED[kind] and (value is None or (value == 0 and key in _ZERO_IS_UNSTATED)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{name}: rope scaling {kind!r} needs a positive number as {key}, not {value!r}")
        values[key] = value
    if kind == "yarn":
        values["truncate"] = bool(stated.get("truncate", True))
    if kind == "longrope":
        values |= {key: _numbers(stated.get(key), key, name) for key in _LISTS}
    return RopeScaling(kind, **values)  # type: ignore[arg-type]


def _numbers(stated: Any, key: str, name: str) -> tuple[float, ...]:
    if not isinstance(stated, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in stated):
        raise ConfigError(f"{name}: rope scaling 'longrope' needs a list of positive numbers as {key}")
    return tuple(map(float, stated))


def check_rotation(config: ModelConfig, name: str) -> None:
    """Raises ConfigError where positions cannot be told by what the model states; `name` is the model's."""
    rotating = config.rotary_dim or config.head_dim
    for size in (config.head_dim, rotating):
        if not 2 <= size <= config.head_dim or size % 2:
            raise ConfigError(f"{name}: rotary positions need an even head size, not {size}")
    if not 1 < config.rope_theta < inf:
        raise ConfigError(f"{name}: rotary positions need a rope_theta above 1, not {config.rope_theta}")
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "longrope":
        for key in _LISTS:
            if len(getattr(config.rope_scaling, key)) != rotating // 2:
                raise ConfigError(f"{name}: rope scaling 'longrope' needs {rotating // 2} numbers as {key}")


def stretched(config: ModelConfig, positions: int) -> ModelConfig:
    """The same model with the frequencies of its long contexts, where it has such and `positions` need them."""
    if config.stretches_to is None or config.rope_scaling is None or positions <= config.max_positions:
        return config
    return replace(config, max_positions=config.stretches_to, rope_scaling=replace(config.rope_scaling, long=True))


def is_long(config: ModelConfig) -> bool:
    """Whether these are the frequencies of the model's long contexts."""
    return config.rope_scaling is not None and config.rope_scaling.long


def scaled_positions(max_positions: int, scaling: RopeScaling | None, architecture: str = "") -> int:
    """Positions that the model knows: `max_positions` as its configuration states them, or more by its scaling.

    A yarn checkpoint may state the length before or after scaling; a linear one states it before, by transformers'
    rule, but for Gemma 3's; a llama3 one after. longrope's are those before it is `stretched`.
    """
    if scaling is not None and scaling.rope_type == "longrope":
        return min(max_positions, int(scaling.original_max_position_embeddings or max_positions))
    scaled_already = architecture == "gemma3_text"
    if scaling is None or scaling.rope_type not in ("linear", "yarn") or scaled_already:
        return max_positions
    before = scaling.original_max_position_embeddings or max_positions
    return max(max_positions, int(before * scaling.factor))


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position, fp32 [head_dim / 2], and the factor on cos and sin of those that rotate; bit for bit as in
    transformers.

    Unscaled: RoFormer, arXiv 2104.09864. yarn: arXiv 2309.00071.
    """
    rotating, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    if scaling is None or scaling.rope_type == "divisors":
        exponent = torch.arange(0, rotating, 2, dtype=torch.int64).float() / rotating
        inverse, factor = 1.0 / (config.rope_theta**exponent), 1.0
        if scaling is not None:
            inverse /= torch.tensor(scaling.divisors)
    else:
        inverse, factor = _scaled_frequencies(config, scaling, rotating)
    still = torch.zeros((config.head_dim - rotating) // 2)
    return torch.cat((inverse, still)), factor * config.rotary_scale


def _scaled_frequencies(config: ModelConfig, scaling: RopeScaling, rotating: int) -> tuple[Tensor, float]:
    stated = {key: list(value) if key in _LISTS else value for key, value in asdict(scaling).items() if value != ()}
    stated = {key: value for key, value in stated.items() if value is not None}
    del stated["long"]
    described = Qwen3Config(  # LlamaConfig says the same, but brings torch's compiler with it: two seconds
        hidden_size=config.heads * rotating,
        num_attention_heads=config.heads,
        head_dim=rotating,
        max_position_embeddings=config.max_positions,
        rope_parameters={**stated, "rope_theta": config.rope_theta},
    )
    before = int(scaling.original_max_position_embeddings or 0)
    length = {"seq_len": before + 1 if scaling.long else before} if scaling.rope_type == "longrope" else {}
    return ROPE_INIT_FUNCTIONS[scaling.rope_type](described, torch.device("cpu"), **length)


def paired_as_stored(config: ModelConfig) -> Tensor | None:
    """Where the checkpoint has each coordinate of a head in the decoder's layout: int64 [head_dim], None if there."""
    stored, rotating = torch.arange(config.head_dim), config.rotary_dim or config.head_dim
    turning, still = stored[:rotating], stored[rotating:]
    pairs = turning.view(-1, 2) if config.interleaved else turning.view(2, -1).T
    order = torch.cat((pairs, still.view(2, -1).T)).T.reshape(-1)
    return None if torch.equal(order, stored) else order
