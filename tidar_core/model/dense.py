"""transformers' own model of a checkpoint, with plain weights: to compare with, to train, to save."""

from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_tensors
from tidar_core.model.quantization import STATED_UNDER, read_quantization
from tidar_core.model.sources import ModelSource


def dense_model(source: ModelSource, dtype: torch.dtype, **choices: Any) -> Any:
    """The model in one dtype; quantized weights are unpacked. choices: more for `from_pretrained`."""
    kind: Any = AutoModelForCausalLM
    place: Any = source.directory
    if source.gguf_file is not None:
        choices["gguf_file"] = source.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it would leave them packed if it could
            choices["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif read_quantization(source.directory) is not None:  # whatever packages transformers would need to unpack it
        place, choices["state_dict"] = None, load_tensors(source, load_config(source), dtype)
        choices["config"] = AutoConfig.from_pretrained(source.directory, local_files_only=True)
        for key in STATED_UNDER:
            vars(choices["config"]).pop(key, None)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(choices["config"])]
    model: Any = kind.from_pretrained(place, dtype=dtype, **choices)
    if getattr(model, "hf_quantizer", None) is not None:  # kept though nothing is packed: it could not be saved
        model.hf_quantizer = None
        del model.config.quantization_config
    return model
