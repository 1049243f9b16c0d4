"""What llama.cpp's converter calls the tensors that transformers has other names for."""

from tidar_core.config import ModelConfig
from tidar_core.model.mixtures import expert_names

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
SHARED_GATE = "ffn_gate_inp_shexp"


def gguf_name(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """The name in a GGUF file of a tensor that transformers calls `name`; for one of an expert, that of the tensor of
    all experts, and which of them it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}", None
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if part in _LAYER_NAMES:
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}", None
    names = expert_names(config)
    projections = dict(zip(names.parts, _MLP, strict=True))
    others = {names.router: "ffn_gate_inp", names.shared_gate: SHARED_GATE}
    if part in others:
        return f"blk.{layer}.{others[part]}.{suffix}", None
    *_, expert, projection = part.split(".")
    if part.startswith(names.shared):
        return f"blk.{layer}.{projections[projection]}_shexp.{suffix}", None
    return f"blk.{layer}.{projections[projection]}_exps.{suffix}", int(expert)


def name_of_one_expert(name: str, expert: int) -> str:
    """What files of before April 2024 call the tensor of one expert, which is the tensor `name` in those of today."""
    return name.replace("_exps.", f".{expert}.")
