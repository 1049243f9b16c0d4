"""The shape of a model, as its config.json or GGUF header states it."""

from dataclasses import replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, Qwen3Config

from tidar_core.config import Activation, Architecture, ConfigError, ModelConfig, Norms, RopeScaling
from tidar_core.error_text import one_line
from tidar_core.model.gguf import config_from_gguf, read_header
from tidar_core.model.mixtures import read_experts
from tidar_core.model.quantization import read_quantization
from tidar_core.model.rope import check_rotation, read_scaling, scaled_positions
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.model.text_part import read_text_part
from tidar_core.sampling.picking import MAX_VOCAB

MAX_POSITIONS = 2**24  # the rotary tables of so many take eight gigabytes
_PARTLY_ROTATED = ("phi3", "glm", "glm4", "glm4_moe")
_INTERLEAVED = ("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
_NORMS: dict[Architecture, Norms] = {
    "exaone4": "behind",
    "gemma3_text": "both",
    "glm4": "both",
    "olmo2": "behind",
    "olmo3": "behind",
}  # others: before
_GEMMA = ("gemma", "gemma3_text")
# Of all others transformers heeds no `layer_types`, which a file may state all the same.
_WINDOWS_BY_LAYER = (
    "cwm", "exaone4", "gemma3_text", "ministral", "mistral", "olmo3", "qwen2", "qwen2_moe", "qwen3", "smollm3",
)  # fmt: skip
_WINDOWS_EVERYWHERE = ("mistral", "ministral3", "mixtral", "phi3", "qwen3_moe")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}  # as transformers names them
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "mlp_bias": False,
}  # LlamaConfig's, where they are not Qwen3Config's as well


def load_config(source: ModelSource, taken_for: Architecture | None = None) -> ModelConfig:
    """The shape of the model. Raises ConfigError for what the decoder cannot run, naming what it is.

    A model of a type that is not known may be `taken_for` one that is (see `text_part`). What cannot be run is every
    architecture but those of `Architecture`, and in these: rope scaling other than linear, llama3, yarn, longrope
    and dynamic, experts that are chosen by groups, activations other than silu and gelu by tanh, scores that are
    capped, and weights that are quantized in another way than GGUF, fp8, fbgemm_fp8, modelopt, compressed-tensors,
    gptq, awq, auto-round, bitsandbytes and MLX do it (see `read_quantization`).
    """
    if source.gguf_path is not None:
        config = config_from_gguf(read_header(source.gguf_path))
    else:
        config = _config_from_directory(source.directory, taken_for)
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers, config.heads)
    if min(*sizes, config.kv_heads, config.max_positions) < 1:
        raise ConfigError(f"{source.name}: a size in its configuration is zero or negative")
    if config.max_positions > MAX_POSITIONS:
        raise ConfigError(
            f"{source.name}: {config.max_positions} positions are more than any model has: its configuration is damaged"
        )
    if config.vocab_size > MAX_VOCAB:
        raise ConfigError(
            f"{source.name}: {config.vocab_size} tokens are more than {MAX_VOCAB}, the most to choose from"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(f"{source.name}: {config.heads} query heads do not share {config.kv_heads} key/value heads")
    check_rotation(config, source.name)
    return config


def _config_from_directory(directory: Path, taken_for: Architecture | None) -> ModelConfig:
    architecture, stated = read_text_part(directory, taken_for)
    read_quantization(directory)  # which refuses what the weights could not be read of
    try:
        config = _llama_config(stated) if architecture == "llama" else CONFIG_MAPPING[architecture].from_dict(stated)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{directory / 'config.json'} is not valid ({one_line(error)})") from error
    rope, window_theta = _rope_parameters(config, directory.name)
    turning = rope.get("partial_rotary_factor", 1.0)
    partly = turning != 1 and (architecture not in _PARTLY_ROTATED or not isinstance(turning, int | float))
    if partly or not isinstance(rope.get("rope_theta"), int | float):
        raise ConfigError(f"{directory.name}: its rope_parameters are not supported, only one rope_theta for all is")
    scaling = read_scaling(rope, config.max_position_embeddings, directory.name)
    stated_positions = config.max_position_embeddings
    positions = scaled_positions(stated_positions, scaling, architecture)
    if rope.get("llama_4_scaling_beta"):  # from there on queries are scaled by their position, which is not done here
        positions = min(positions, int(rope.get("original_max_position_embeddings") or stated_positions))
    window, windowed = _window(config, architecture, max(positions, stated_positions), directory.name)
    activation = _activation(config, directory.name)
    if any(getattr(config, f"{scores}_logit_softcapping", None) for scores in ("attn", "final")):
        raise ConfigError(f"{directory.name}: scores that are capped (logit_softcapping) are not supported")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    qkv_bias, o_bias, mlp_bias = _biases(config, architecture)
    plain = ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=positions,
        tied_head=config.tie_word_embeddings,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "exaone4", "gemma3_text") or _stated(config, "use_qk_norm"),
        eos_ids=_eos_ids(directory, config.eos_token_id),
        rope_scaling=scaling,
        window=window,
        windowed=windowed,
        window_theta=window_theta,
        stretches_to=stated_positions if _is_longer(scaling, stated_positions, positions) else None,
        rotary_dim=None if turning == 1 else int(head_dim * turning),
        interleaved=architecture in _INTERLEAVED,
        unrotated=_unrotated(config, architecture),
        norms=_NORMS.get(architecture, "before"),
        wide_qk_norm=architecture in ("olmo2", "olmo3", "olmoe"),
        norms_less_one=architecture in _GEMMA,
        activation=activation,
        experts=read_experts(config, architecture, directory.name),
    )
    if architecture in ("granite", "granitemoe"):
        return _scaled(plain, config, directory.name)
    return _scaled_as_gemma(plain, config, directory.name) if architecture in _GEMMA else plain


def _is_longer(scaling: RopeScaling | None, stated: int, positions: int) -> bool:
    """Whether there are rotary frequencies for more than these positions."""
    return scaling is not None and bool(scaling.long_factor) and stated > positions


def _rope_parameters(config: PreTrainedConfig, name: str) -> tuple[dict[str, Any], float | None]:
    """transformers' rope_parameters, and the base of layers with a window where these have parameters of their own,
    which then may not be scaled."""
    rope = config.rope_parameters or {}
    if "full_attention" not in rope:
        return rope, None
    whole, windowed = rope["full_attention"], rope.get("sliding_attention")
    if windowed is None or windowed == whole:
        return whole, None
    theta = windowed.get("rope_theta")
    if windowed.get("rope_type", "default") != "default" or not isinstance(theta, int | float) or not 1 < theta < inf:
        raise ConfigError(
            f"{name}: rope_parameters of its layers with a window are not supported, only a rope_theta is"
        )
    return whole, float(theta)


def _activation(config: PreTrainedConfig, name: str) -> Activation:
    stated = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if not isinstance(stated, str) or stated not in _ACTIVATIONS:
        raise ConfigError(f"{name}: activation {stated!r} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[stated]


def _biases(config: PreTrainedConfig, architecture: Architecture) -> tuple[bool, bool, bool]:
    """Of the projections to q, k and v, of that behind attention, and of the MLP's: as transformers' models have them,
    whatever else a config.json says."""
    attention, mlp = _stated(config, "attention_bias"), _stated(config, "mlp_bias")
    match architecture:
        case "mistral" | "mixtral" | "ministral" | "ministral3" | "phi3" | "exaone4":
            return False, False, False
        case "cwm":
            return False, False, mlp
        case "qwen2":
            return True, False, False
        case "qwen2_moe":
            return _stated(config, "qkv_bias"), False, False
        case "qwen3" | "qwen3_moe" | "olmo2" | "olmo3" | "olmoe" | "gemma" | "gemma3_text":
            return attention, attention, False
        case "glm" | "glm4" | "glm4_moe":
            return attention, False, False
        case "helium":
            return attention, False, mlp
        case "seed_oss":
            return attention, _stated(config, "attention_out_bias"), mlp
        case "ernie4_5" | "ernie4_5_moe":
            return (_stated(config, "use_bias"),) * 3
    return attention, attention, mlp


def _stated(config: PreTrainedConfig, name: str) -> bool:
    return bool(getattr(config, name, False))


def _unrotated(config: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
    """The layers that know no positions (arXiv 2501.18795): SmolLM3 names them, in EXAONE 4 they are those that see all
    where others see a window."""
    if architecture == "smollm3":
        turning = config.no_rope_layers
    elif architecture == "exaone4" and config.sliding_window is not None:
        turning = [kind == "sliding_attention" for kind in config.layer_types]
    else:
        return ()
    return tuple(index for index, turns in enumerate(turning[: config.num_hidden_layers]) if not turns)


def _scaled(plain: ModelConfig, config: PreTrainedConfig, name: str) -> ModelConfig:
    """Granite's four multipliers, as scales of weights and tables.

    A layer's output times r before it joins the residual is the same as a residual, and so an embedding, of 1/r its
    size, which a norm does not tell (its epsilon grows by 1/r²). Scores times another factor than 1/√head_dim are the
    same as queries and keys, and so cos and sin, times the root of what it is more.
    """
    multipliers = {
        key: getattr(config, key)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    }
    for key, value in multipliers.items():
        if not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{name}: its {key} is {value!r}, not a positive number")
    embedding, residual, attention, logits = multipliers.values()
    return replace(
        plain,
        norm_eps=plain.norm_eps / residual**2,
        embedding_scale=embedding / residual,
        rotary_scale=sqrt(attention * sqrt(plain.head_dim)),
        logit_scale=1 / logits,
    )


def _scaled_as_gemma(plain: ModelConfig, config: PreTrainedConfig, name: str) -> ModelConfig:
    """Gemma's embedding is scaled by the root of its size, and scores, in later ones, by a number of their own."""
    scalar = getattr(config, "query_pre_attn_scalar", plain.head_dim)
    if not isinstance(scalar, int | float) or not 0 < scalar < inf:
        raise ConfigError(f"{name}: its query_pre_attn_scalar is {scalar!r}, not a positive number")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{name}: its tokens see those behind them, so that it is no model that says the next one")
    return replace(
        plain, embedding_scale=sqrt(plain.hidden_size), rotary_scale=sqrt(sqrt(plain.head_dim) / sqrt(scalar))
    )


def _window(
    config: PreTrainedConfig, architecture: Architecture, positions: int, name: str
) -> tuple[int | None, tuple[int, ...]]:
    """How many positions a token sees in layers with a window, None where that is all `positions`, and which these
    layers are. Raises ConfigError."""
    kinds = getattr(config, "layer_types", None) if architecture in _WINDOWS_BY_LAYER else None
    if kinds is None and architecture in _WINDOWS_EVERYWHERE:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    windowed = tuple(index for index, kind in enumerate(kinds or ()) if kind == "sliding_attention")
    stated = getattr(config, "sliding_window", None) if windowed else None
    if stated is None:
        return None, ()
    if not isinstance(stated, int) or stated < 1:
        raise ConfigError(f"{name}: its sliding_window is {stated!r}, not a number of positions")
    return (stated if stated < positions else None), windowed


def _llama_config(stated: dict[str, Any]) -> PreTrainedConfig:
    """What LlamaConfig would make of a config.json, without its import: that brings torch's compiler, two seconds of
    processor time at every start. Qwen3Config names the same fields and reads rope in the same way."""
    fields = _LLAMA_DEFAULTS | stated
    if fields["hidden_size"] % fields["num_attention_heads"]:
        raise ValueError("hidden_size is not a multiple of the number of attention heads")
    if fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return Qwen3Config.from_dict(fields | {"use_sliding_window": False, "layer_types": None})


def _eos_ids(directory: Path, stated: int | list[int] | None) -> tuple[int, ...]:
    """generation_config.json names all tokens that end an answer of a chat model, config.json often only one."""
    path = directory / "generation_config.json"
    if path.is_file():
        named = read_json(path).get("eos_token_id")
        stated = stated if named is None else named
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{directory.name}: its eos_token_id is {stated!r}, neither a token's id nor a list of them")
    return tuple(dict.fromkeys(ids))
