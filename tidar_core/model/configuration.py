"""The shape of a model, as its config.json or GGUF header states it."""

from math import inf
from pathlib import Path
from typing import Any, get_args

from transformers import AutoConfig, PreTrainedConfig, Qwen3Config

from tidar_core.config import Architecture, ConfigError, ModelConfig
from tidar_core.model.gguf import config_from_gguf, read_header
from tidar_core.model.quantization import read_quantization
from tidar_core.model.rope import read_scaling, scaled_positions
from tidar_core.model.sources import ModelSource, one_line, read_json
from tidar_core.sampling import MAX_VOCAB

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


def load_config(source: ModelSource) -> ModelConfig:
    """The shape of the model. Raises ConfigError for what the decoder cannot run, naming what it is.

    That is every architecture but llama, mistral, phi3, qwen2 and qwen3, and in these: rope scaling other than linear,
    llama3 and yarn, rope on a part of each head, a mixture of experts, activations other than silu, and
    weights that are quantized in another way than GGUF, fp8, fbgemm_fp8, modelopt, compressed-tensors, gptq, awq,
    bitsandbytes and MLX do it (see `read_quantization`).
    """
    if source.gguf_path is not None:
        config = config_from_gguf(read_header(source.gguf_path))
    else:
        config = _config_from_directory(source.directory)
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers, config.heads)
    if min(*sizes, config.kv_heads, config.max_positions) < 1:
        raise ConfigError(f"{source.name}: a size in its configuration is zero or negative")
    if config.vocab_size > MAX_VOCAB:
        raise ConfigError(
            f"{source.name}: {config.vocab_size} tokens are more than {MAX_VOCAB}, the most to choose from"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(f"{source.name}: {config.heads} query heads do not share {config.kv_heads} key/value heads")
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"{source.name}: rotary positions need an even head size, not {config.head_dim}")
    if not 1 < config.rope_theta < inf:
        raise ConfigError(f"{source.name}: rotary positions need a rope_theta above 1, not {config.rope_theta}")
    return config


def _config_from_directory(directory: Path) -> ModelConfig:
    stated = read_json(directory / "config.json")
    known: tuple[Architecture, ...] = get_args(Architecture)
    architecture = next((each for each in known if each == stated.get("model_type")), None)
    if architecture is None:
        named = stated.get("model_type")
        raise ConfigError(f"{directory.name}: architecture {named!r} is not supported, only {', '.join(known)}")
    read_quantization(directory)  # which refuses what the weights could not be read of
    try:
        if architecture == "llama":
            config = _llama_config(stated)
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ConfigError(f"{directory / 'config.json'} is not valid ({one_line(error)})") from error
    rope = config.rope_parameters or {}
    if not isinstance(rope.get("rope_theta"), int | float) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{directory.name}: its rope_parameters are not supported, only one rope_theta for all is")
    scaling = read_scaling(rope, config.max_position_embeddings, directory.name)
    window = _window(config, architecture, directory.name)
    max_positions = scaled_positions(config.max_position_embeddings, scaling)
    if config.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"{directory.name}: activation {config.hidden_act!r} is not supported, only silu")
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=min(max_positions, window or max_positions),
        tied_head=config.tie_word_embeddings,
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias and architecture != "qwen2",  # whatever else its config.json says, as in transformers
        mlp_bias=architecture == "llama" and bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        eos_ids=_eos_ids(directory, config.eos_token_id),
        rope_scaling=scaling,
        window=window,
    )


def _window(config: PreTrainedConfig, architecture: Architecture, name: str) -> int | None:
    """How many positions a token sees, where some layers let it see fewer than all. Raises ConfigError."""
    slides = architecture in ("mistral", "phi3") or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    stated = getattr(config, "sliding_window", None) if slides else None
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise ConfigError(f"{name}: its sliding_window is {stated!r}, not a number of positions")
    return stated


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
    ids = [] if stated is None else [stated] if isinstance(stated, int) else stated
    return tuple(dict.fromkeys(ids))
