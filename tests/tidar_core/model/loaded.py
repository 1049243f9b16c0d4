"""Checkpoints as the loader reads them, held against transformers tensor by tensor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tidar_core.config import EngineConfig, ModelConfig
from tidar_core.engine import Engine, load_engine
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.weights import ModelWeights
from tidar_core.request import Request, SamplingParams

VARIANTS = [
    ("llama", {"tied": True}),
    ("llama", {"tied": False, "bias": True}),
    ("qwen2", {"tied": True}),
    ("qwen2", {"tied": False, "heads": 4, "kv_heads": 4}),
    ("qwen3", {"tied": True}),
    ("qwen3", {"tied": False, "bias": True, "kv_heads": 1}),
    ("mistral", {"tied": False, "head_dim": 32}),
    ("phi3", {"tied": False}),
]


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, ModelWeights]:
    source = find_model(str(path))
    config = load_config(source)
    return config, load_weights(source, config, dtype, "cpu")


def reference_state(path: Path, gguf_file: str | None = None) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf_file, dtype=torch.float32).state_dict()


def assert_same_weights(weights: ModelWeights, state: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Every tensor of `weights` equals its parts in transformers' state dict bit for bit, and no part is left over."""
    left = dict(state)

    def same(tensor: Tensor | None, *names: str) -> None:
        parts = [left.pop(name) for name in names if name in left]
        assert len(parts) == (0 if tensor is None else len(names)), names
        if tensor is not None:
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert torch.equal(tensor, torch.cat(parts).to(dtype)), names

    same(weights.embedding, "model.embed_tokens.weight")
    for index, layer in enumerate(weights.layers):
        stem = f"model.layers.{index}."
        attention, mlp = stem + "self_attn.", stem + "mlp."
        same(layer.input_norm, stem + "input_layernorm.weight")
        same(layer.post_norm, stem + "post_attention_layernorm.weight")
        same(layer.q_norm, attention + "q_norm.weight")
        same(layer.k_norm, attention + "k_norm.weight")
        for kind, qkv, o, gate_up, down in (
            ("weight", layer.qkv, layer.o, layer.gate_up, layer.down),
            ("bias", layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias),
        ):
            fused = f"{attention}qkv_proj.{kind}" in state
            same(qkv, *(f"{attention}{part}_proj.{kind}" for part in (("qkv",) if fused else "qkv")))
            same(o, f"{attention}o_proj.{kind}")
            same(gate_up, *(f"{mlp}{part}_proj.{kind}" for part in (("gate_up",) if fused else ("gate", "up"))))
            same(down, f"{mlp}down_proj.{kind}")
    same(weights.final_norm, "model.norm.weight")
    if weights.head is weights.embedding:
        assert torch.equal(left.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    else:
        same(weights.head, "lm_head.weight")
    assert not left


def said_as_transformers_says(path: Path, plain: Path, length: int = 40, **settings: Any) -> Engine:
    """The engine of one checkpoint, once it has said of each token of a text what transformers says of another."""
    return said_as(path, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), length, **settings)


def said_as(path: Path, model: PreTrainedModel, length: int = 40, **settings: Any) -> Engine:
    """The engine of a checkpoint, once it has said of each token of a text what `model` says of it."""
    text = tuple(range(20, 20 + length))
    model.eval()
    with torch.no_grad():
        scores = model(torch.tensor([text])).logits[0].log_softmax(-1)
    expected = scores[:-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
    config = EngineConfig(str(path), "none", "float32", "cpu", threads=1)
    engine = load_engine(replace(config, **settings))
    engine.submit(Request("a", text, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    told = [entry.logprob for _ in range(9) for output in engine.step() for entry in output.prompt_logprobs]
    torch.testing.assert_close(torch.tensor(told), expected, rtol=0, atol=2e-5)
    return engine
