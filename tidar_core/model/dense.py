"""transformers' own model of a checkpoint, with plain weights: to compare with, to train, to save."""

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig

from tidar_core.config import ConfigError
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_tensors
from tidar_core.model.quantization import STATED_UNDER, read_quantization
from tidar_core.model.sources import ModelSource, read_json
from tidar_core.model.text_part import KNOWN, read_text_part


def dense_model(source: ModelSource, dtype: torch.dtype, **choices: Any) -> Any:
    """The model in one dtype; quantized weights are unpacked. choices: more for `from_pretrained`.

    Raises ConfigError as `check_dense`.
    """
    check_dense(source)
    if source.gguf_file is None and not _is_plain(source):
        return _rebuilt_model(source, dtype, **choices)
    if source.gguf_file is None:
        choices["use_safetensors"] = True  # what is pickled is never touched
    else:
        choices["gguf_file"] = source.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it would leave them packed if it could
            choices["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype, **choices)
    if getattr(model, "hf_quantizer", None) is not None:  # kept though nothing is packed: it could not be saved
        model.hf_quantizer = None
        del model.config.quantization_config
    return model


def check_dense(source: ModelSource) -> None:
    """Raises ConfigError for a mixture of experts in a GGUF file: of its sizes transformers reads few, and would make
    up weights that it does not find."""
    if source.gguf_file is not None and load_config(source).experts is not None:
        raise ConfigError(
            f"{source.name}: transformers does not read a mixture of experts in a GGUF file as it is: give the "
            "safetensors checkpoint"
        )


def _is_plain(source: ModelSource) -> bool:
    """Whether transformers can load it as a model of text: not quantized, which would need a package for each method
    and a GPU for some, nor a part of a larger one, nor of a type of its own."""
    named = read_json(source.directory / "config.json").get("model_type")
    return named in KNOWN and read_quantization(source.directory) is None


def _rebuilt_model(source: ModelSource, dtype: torch.dtype, **choices: Any) -> Any:
    """As the engine reads it."""
    architecture, stated = read_text_part(source.directory)
    config = CONFIG_MAPPING[architecture].from_dict(stated)
    for key in STATED_UNDER:
        vars(config).pop(key, None)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    tensors = load_tensors(source, load_config(source), dtype)
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **choices)
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.directory, local_files_only=True)
    return model
