"""transformers' own model of a checkpoint, with plain weights: to compare with, to train, to save.

Its weights are read as the engine reads them, and each is accounted for: what transformers does not find, it makes up
without an error.
"""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from tidar_core.config import ConfigError, ModelConfig
from tidar_core.error_text import one_line
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_tensors, open_checkpoint, read_fused, shapes_to_load
from tidar_core.model.quantization import STATED_UNDER
from tidar_core.model.sampling_defaults import read_sampling_defaults
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.model.text_part import read_text_part
from tidar_core.request import Sampling

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KEPT_IN_FP32 = "e_score_correction_bias"  # by transformers as by the engine: a rounded one chooses other experts
_FAULTS = {
    "missing_keys": "{} is missing",
    "unexpected_keys": "it has no place for {}",
    "mismatched_keys": "{} has another shape there",
}


def dense_model(source: ModelSource, dtype: torch.dtype, **choices: Any) -> Any:
    """The model in one dtype; quantized weights are unpacked. choices: more for `from_pretrained`.

    Raises ConfigError as `check_dense`.
    """
    check_dense(source)
    shape = load_config(source)
    tensors = load_tensors(source, shape, dtype)
    if dtype != torch.float32:
        with open_checkpoint(source, shape) as checkpoint:
            for name in (each for each in tensors if each.endswith(_KEPT_IN_FP32)):
                tensors[name] = read_fused(checkpoint, {name: tuple(tensors[name].shape)}, torch.float32, "cpu")
    config = _config(source, shape)
    if shape.tied_head and _HEAD in tensors:
        if torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
            del tensors[_HEAD]
        else:  # trained apart, whatever is stated; else the first change of its size would tie it
            config.tie_word_embeddings = False
    model, _ = _built(config, tensors, dtype, choices)
    model.generation_config = _generation_config(source, shape, config)
    return model


def check_dense(source: ModelSource) -> int:
    """How many weights transformers' model of the checkpoint has. Of the files, headers alone are read.

    Raises ConfigError where a tensor is not there, where transformers would have another model than the engine, and for
    a mixture of experts in a GGUF file, whose configuration is not made here.
    """
    shape = load_config(source)
    if source.gguf_file is not None and shape.experts is not None:
        raise ConfigError(
            f"{source.name}: transformers does not read a mixture of experts in a GGUF file as it is: give the "
            "safetensors checkpoint"
        )
    tensors = {name: torch.empty(size, device="meta") for name, size in shapes_to_load(source, shape).items()}
    if shape.tied_head:
        tensors.pop(_HEAD, None)
    try:
        model, found = _built(_config(source, shape), tensors, torch.float32, {"device_map": "meta"})
    except Exception as error:  # whatever the library raises
        raise _refused(source, one_line(error)) from error
    for kind, fault in _FAULTS.items():
        if names := sorted(map(str, found[kind])):
            raise _refused(source, fault.format(names[0]))
    return sum(parameter.numel() for parameter in model.parameters())


def _refused(source: ModelSource, why: str) -> ConfigError:
    return ConfigError(f"transformers cannot hold {source.name} as it is ({why}): give another checkpoint of the model")


def _built(
    config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype, choices: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model of these tensors, and what transformers says of their names."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    built: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, **choices
    )
    return built


def _config(source: ModelSource, shape: ModelConfig) -> PreTrainedConfig:
    """transformers' configuration of the model of text, as the engine reads it."""
    if source.gguf_file is not None:
        return _config_of_shape(shape)
    architecture, stated = read_text_part(source.directory)
    config = CONFIG_MAPPING[architecture].from_dict(stated)
    for key in STATED_UNDER:
        vars(config).pop(key, None)
    pad = config.pad_token_id
    if pad is not None and not 0 <= pad < shape.vocab_size:  # there is no such row to leave untrained
        config.pad_token_id = None
    return config


def _config_of_shape(shape: ModelConfig) -> PreTrainedConfig:
    """That of a GGUF file, which is a plain Llama, Qwen2 or Qwen3."""
    scaling = shape.rope_scaling
    before_scaling = scaling.factor if scaling is not None and scaling.rope_type == "linear" else 1.0
    stated: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": round(shape.max_positions / before_scaling),
        "tie_word_embeddings": shape.tied_head,
        "attention_bias": shape.qkv_bias or shape.o_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": _rope_parameters(shape),
        "bos_token_id": None,
        "eos_token_id": list(shape.eos_ids) or None,
        "pad_token_id": None,
    }
    return CONFIG_MAPPING[shape.architecture].from_dict(stated)


def _rope_parameters(shape: ModelConfig) -> dict[str, Any]:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    if scaling.rope_type == "divisors":  # one for each frequency: what longrope has, here for any length
        divisors = list(scaling.divisors)
        return {
            "rope_type": "longrope",
            "rope_theta": shape.rope_theta,
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": shape.max_positions,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    stated = {key: value for key, value in asdict(scaling).items() if value is not None and value != ()}
    del stated["long"]
    return {**stated, "rope_theta": shape.rope_theta}


def _generation_config(source: ModelSource, shape: ModelConfig, config: PreTrainedConfig) -> GenerationConfig:
    """What the checkpoint states, where transformers takes it; else how its makers want it sampled. All tokens that end
    an answer are in it."""
    path = source.directory / GENERATION_CONFIG_NAME
    ends: dict[str, Any] = {"eos_token_id": list(shape.eos_ids) or None}
    if source.gguf_file is None and path.is_file():
        try:
            return _to_be_saved(read_json(path) | ends)
        except Exception:  # whatever an inconsistent file makes the library raise
            pass
    neutral = asdict(Sampling())
    sampling = asdict(read_sampling_defaults(source, lambda line: None))
    stated = {name: value for name, value in sampling.items() if value != neutral[name]}
    specials = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    return _to_be_saved(({"do_sample": True, **stated} if stated else {}) | specials | ends)


def _to_be_saved(stated: dict[str, Any]) -> GenerationConfig:
    """As transformers reads it out of a file: what is odd in it may be saved again then, and not if it were made
    here."""
    with TemporaryDirectory() as folder:
        (Path(folder) / GENERATION_CONFIG_NAME).write_text(json.dumps(stated), encoding="utf-8")
        made: GenerationConfig = GenerationConfig.from_pretrained(folder, local_files_only=True)
        made.save_pretrained(folder)
        return made
