"""Tiny checkpoints with a second view of their attention, and what drafters of all forms say, from the definition: over
transformers' own modules, without a line of the engine."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.tiny import tiny_checkpoint
from tidar_core.layout import BlockForm

BLOCK, MASK = 4, 509
NOISE = 0.05  # so near to the base's own that some guesses hold
FORM = BlockForm(slot_0="anchor", labels="shifted")


def second_view_checkpoint(directory: Path, block: int = BLOCK, seed: int = 0, **tiny: Any) -> Path:
    """A tiny Qwen3 checkpoint as Orthrus' authors write theirs."""
    path = tiny_checkpoint(directory, "qwen3", **tiny)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in list(tensors.items()):
        if ".self_attn." in name:
            noise = NOISE * torch.randn(tensor.shape, generator=generator)
            tensors[name.replace(".weight", "_diff.weight")] = tensor + noise.to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    stated = json.loads((path / "config.json").read_text())
    stated |= {"architectures": ["OrthrusLM"], "block_size": block, "mask_token_id": MASK}
    stated |= {"auto_map": {"AutoModelForCausalLM": "modeling_orthrus.OrthrusLM"}}
    (path / "config.json").write_text(json.dumps(stated))
    return path


def slot_scores(
    model: PreTrainedModel, tensors: dict[str, Tensor], text: list[int], form: BlockForm, block: int = BLOCK
) -> Tensor:
    """What the slots of a block behind `text` say of the tokens that follow it, slot 0 of the first: [block, vocab].

    model: the base; tensors: the checkpoint's, with projections of the slots' own under `_diff`.
    """
    decoder, config = model.model, model.config
    seen = text if form.labels == "aligned" else text[:-1]
    first = text[-1] if form.slot_0 == "anchor" else MASK
    with torch.no_grad():
        cache = model(torch.tensor([seen]), use_cache=True).past_key_values if seen else None
        x = decoder.embed_tokens(torch.tensor([[first, *[MASK] * (block - 1)]]))
        cos, sin = decoder.rotary_emb(x, torch.arange(len(seen), len(seen) + block)[None])
        for number, layer in enumerate(decoder.layers):
            normed = layer.input_layernorm(x)

            def own(stem: str, rows: Tensor, number: int = number) -> Tensor:
                return F.linear(rows, tensors[f"model.layers.{number}.self_attn.{stem}_diff.weight"])

            def heads(stem: str, normed: Tensor = normed, own: Any = own) -> Tensor:
                return own(stem, normed).view(1, block, -1, config.head_dim)

            def per_head(rows: Tensor, stem: str, number: int = number) -> Tensor:
                weight = tensors[f"model.layers.{number}.self_attn.{stem}_diff.weight"]
                return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)

            q = per_head(heads("q_proj"), "q_norm").transpose(1, 2)
            k = per_head(heads("k_proj"), "k_norm").transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            v = heads("v_proj").transpose(1, 2)
            if cache is not None:
                k, v = torch.cat((cache.layers[number].keys, k), 2), torch.cat((cache.layers[number].values, v), 2)
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(1, block, -1)
            x = x + own("o_proj", mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.lm_head(decoder.norm(x))[0]
