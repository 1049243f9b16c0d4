"""transformers' own model of a checkpoint, with plain weights: to compare with, to train, to save."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tidar_core.model.sources import ModelSource


def dense_model(source: ModelSource, dtype: torch.dtype, **choices: Any) -> Any:
    """The model in one dtype; the weights of a GGUF file are unpacked. choices: more for `from_pretrained`."""
    if source.gguf_file is not None:
        choices["gguf_file"] = source.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it would leave them packed if it could
            choices["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype, **choices)
    if getattr(model, "hf_quantizer", None) is not None:  # kept though nothing is packed: it could not be saved
        model.hf_quantizer = None
        del model.config.quantization_config
    return model
