"""A checkpoint of a real model's shape with random weights, where the model itself is not at hand.

    python -m tidar_core.bench.random_checkpoint Qwen3-8B DIR

Step times do not care for the text, so engines can be compared on it, all doing the same work:

    tidar bench peers --model DIR --no-honour-end --drafts off

The tokenizer is the default model's.
"""

from pathlib import Path
from typing import Any

import torch
import typer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tidar_core.bench.shapes import SHAPES
from tidar_core.config import DEFAULT_MODEL, Architecture, ModelConfig
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer

KINDS: dict[Architecture, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def random_checkpoint_model(shape: ModelConfig, device: str) -> PreTrainedModel:
    """transformers' own model of a shape, bf16, as it is initialised."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.heads, "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads, "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": shape.tied_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}, "dtype": torch.bfloat16,
    }  # fmt: skip
    config, model = KINDS[shape.architecture]
    with torch.device(device):
        made: PreTrainedModel = model._from_config(config(**sizes))
    return made


def main(name: str, directory: str) -> None:
    """Write a checkpoint with random weights in the shape that is called NAME into DIRECTORY."""
    if name not in SHAPES:
        raise SystemExit(f"{name} is no shape that is known: choose among {', '.join(SHAPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random_checkpoint_model(SHAPES[name], device).save_pretrained(directory)
    load_tokenizer(find_model(DEFAULT_MODEL)).save_pretrained(Path(directory))


if __name__ == "__main__":
    typer.run(main)
