"""The shapes that kernels and steps are measured at, with random weights: step times do not care for the text."""

import torch
from torch import Tensor

from tidar_core.config import Experts, ModelConfig
from tidar_core.model.mixtures import router_rows
from tidar_core.model.weights import AdapterWeights, LayerAdapter, LayerWeights, LowRank, ModelWeights

SMOLLM2_135M = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, layers=30, heads=9, kv_heads=3,
    head_dim=64, norm_eps=1e-5, rope_theta=1e5, max_positions=8192, tied_head=True, qkv_bias=False, o_bias=False,
    mlp_bias=False, qk_norm=False, eos_ids=(2,),
)  # fmt: skip
QWEN25_1_5B = ModelConfig(
    architecture="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, layers=28, heads=12, kv_heads=2,
    head_dim=128, norm_eps=1e-6, rope_theta=1e6, max_positions=32768, tied_head=True, qkv_bias=True, o_bias=False,
    mlp_bias=False, qk_norm=False, eos_ids=(151645,),
)  # fmt: skip
QWEN3_8B = ModelConfig(
    architecture="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, layers=36, heads=32, kv_heads=8,
    head_dim=128, norm_eps=1e-6, rope_theta=1e6, max_positions=40960, tied_head=False, qkv_bias=False, o_bias=False,
    mlp_bias=False, qk_norm=True, eos_ids=(151645,),
)  # fmt: skip
QWEN3_30B_A3B = ModelConfig(
    architecture="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, layers=48, heads=32,
    kv_heads=4, head_dim=128, norm_eps=1e-6, rope_theta=1e6, max_positions=40960, tied_head=False, qkv_bias=False,
    o_bias=False, mlp_bias=False, qk_norm=True, eos_ids=(151645,),
    experts=Experts(count=128, chosen=8, inner=768, layers=tuple(range(48))),
)  # fmt: skip
SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Qwen2.5-1.5B": QWEN25_1_5B, "Qwen3-8B": QWEN3_8B}
STEP_SHAPES = {**SHAPES, "Qwen3-30B-A3B": QWEN3_30B_A3B}  # which whole steps may be measured at


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's fused projections."""
    attention = config.heads * config.head_dim
    return {
        "qkv": (attention + 2 * config.kv_heads * config.head_dim, config.hidden_size),
        "o": (config.hidden_size, attention),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def random_weights(config: ModelConfig, layers: int, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """A model of a shape with `layers` layers: matrices that keep the scale of what they multiply, norms around 1.
    Where there are experts, all layers have them and no other MLP."""

    def matrix(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device) * sizes[-1] ** -0.5

    def vector(size: int, wanted: bool = True, around: float = 0.0) -> Tensor | None:
        return torch.randn(size, dtype=dtype, device=device) * 0.1 + around if wanted else None

    def norm(size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device) * 0.1 + 1

    sizes, experts = projections(config), config.experts

    def inner() -> dict[str, Tensor]:
        if experts is None:
            return {"gate_up": matrix(*sizes["gate_up"]), "down": matrix(*sizes["down"])}
        return {
            "router": matrix(router_rows(experts), config.hidden_size),
            "gate_up": matrix(experts.count, 2 * experts.inner, config.hidden_size),
            "down": matrix(experts.count, config.hidden_size, experts.inner),
        }

    made = tuple(
        LayerWeights(
            input_norm=norm(config.hidden_size),
            qkv=matrix(*sizes["qkv"]),
            qkv_bias=vector(sizes["qkv"][0], config.qkv_bias),
            q_norm=vector(config.head_dim, config.qk_norm, 1.0),
            k_norm=vector(config.head_dim, config.qk_norm, 1.0),
            o=matrix(*sizes["o"]),
            o_bias=vector(config.hidden_size, config.o_bias),
            post_norm=norm(config.hidden_size),
            gate_up_bias=vector(sizes["gate_up"][0], config.mlp_bias),
            down_bias=vector(config.hidden_size, config.mlp_bias),
            **inner(),
        )
        for _ in range(layers)
    )
    embedding = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    head = embedding if config.tied_head else matrix(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, made, norm(config.hidden_size), head)


def random_adapter(
    config: ModelConfig, layers: int, rank: int, block: int, dtype: torch.dtype, device: torch.device
) -> AdapterWeights:
    """A drafter of a shape, on all that it may act on."""

    def low_rank(outs: int, ins: int) -> LowRank:
        a = torch.randn(rank, ins, dtype=dtype, device=device) * ins**-0.5
        return LowRank(a, torch.randn(outs, rank, dtype=dtype, device=device) * 0.1 * rank**-0.5)

    def layer() -> LayerAdapter:
        pairs = {name: low_rank(*size) for name, size in projections(config).items()}
        if config.experts is None:
            return LayerAdapter(**pairs)
        own = LowRank(
            torch.randn(2 * rank, config.hidden_size, dtype=dtype, device=device) * config.hidden_size**-0.5,
            torch.randn(config.hidden_size, rank, dtype=dtype, device=device) * rank**-0.5,
        )
        return LayerAdapter(pairs["qkv"], pairs["o"], expert=own)

    made = tuple(layer() for _ in range(layers))
    return AdapterWeights(torch.randn(block, config.hidden_size, dtype=dtype, device=device), made)
