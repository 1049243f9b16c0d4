"""Rotary scaling: what a checkpoint states, and the frequencies that follow from it.

The numbers are transformers' own, taken from its functions: a table here is the table there. Kinds that depend on how
long a sequence has grown ("dynamic", "longrope") are refused: a token at one position would not keep its key.
"""

from collections.abc import Mapping
from dataclasses import asdict
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
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
_ZERO_IS_UNSTATED = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_scaling(stated: Mapping[str, Any], max_positions: int, name: str) -> RopeScaling | None:
    """The scaling in transformers' `rope_parameters`, None for "default". Raises ConfigError.

    `max_positions` is the model's max_position_embeddings; `name` is the model's, for the error.
    """
    kind = stated.get("rope_type", "default")
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ConfigError(f"{name}: rope scaling {kind!r} is not supported, only {', '.join(_NEEDED)}")
    values: dict[str, Any] = {}
    for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        value = stated.get(key)
        if key == "factor" and value is None and kind == "yarn":  # transformers then takes the ratio of the lengths
            value = max_positions / values["original_max_position_embeddings"]
        if key not in _NEEDED[kind] and (value is None or (value == 0 and key in _ZERO_IS_UNSTATED)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{name}: rope scaling {kind!r} needs a positive number as {key}, not {value!r}")
        values[key] = value
    if kind == "yarn":
        values["truncate"] = bool(stated.get("truncate", True))
    return RopeScaling(kind, **values)  # type: ignore[arg-type]


def scaled_positions(max_positions: int, scaling: RopeScaling | None) -> int:
    """Positions that the model knows: `max_positions` as its configuration states them, or more by its scaling.

    A yarn checkpoint may state the length before or after scaling; a linear one states it before, by transformers'
    rule; a llama3 one after.
    """
    if scaling is None or scaling.rope_type not in ("linear", "yarn"):
        return max_positions
    before = scaling.original_max_position_embeddings or max_positions
    return max(max_positions, int(before * scaling.factor))


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position, fp32 [head_dim / 2], and the factor on cos and sin; bit for bit as in transformers.

    Unscaled: RoFormer, arXiv 2104.09864. yarn: arXiv 2309.00071.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "divisors":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        inverse = 1.0 / (config.rope_theta**exponent)
        return (inverse if scaling is None else inverse / torch.tensor(scaling.divisors)), 1.0
    stated = {key: value for key, value in asdict(scaling).items() if value is not None and key != "divisors"}
    described = Qwen3Config(  # LlamaConfig says the same, but brings torch's compiler with it: two seconds
        hidden_size=config.heads * config.head_dim,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters={**stated, "rope_theta": config.rope_theta},
    )
    return ROPE_INIT_FUNCTIONS[scaling.rope_type](described, torch.device("cpu"))
