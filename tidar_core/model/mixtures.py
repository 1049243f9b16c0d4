"""Mixtures of experts: what a config.json states of them, and what their tensors are called."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from tidar_core.config import Architecture, ConfigError, Experts, ModelConfig
from tidar_core.model.weights import ROUTER_ROWS


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a file calls the tensors of a layer with experts, behind the layer's own name.

    expert: the stem of one expert's, `{}` for its number; parts: of gate, up and down, of an expert as of the shared
    MLP; together: in place of these, the two tensors of all experts, where a file has them so; bias: the tensor itself.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    together: tuple[str, str] | None = None
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    bias_dims: int = 1


_NAMES: dict[Architecture, ExpertNames] = {
    "qwen2_moe": ExpertNames(shared="mlp.shared_expert."),
    "granitemoe": ExpertNames(
        "block_sparse_moe.router.layer",
        together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "ernie4_5_moe": ExpertNames(bias="mlp.moe_statics.e_score_correction_bias", bias_dims=2),
}  # others: as they are


def expert_names(config: ModelConfig) -> ExpertNames:
    """The names that the model's files use."""
    return _NAMES.get(config.architecture, ExpertNames())


def expert_tensors(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a layer with experts has in place of an MLP, behind the layer's own name."""
    names, hidden = expert_names(config), config.hidden_size
    gate, up, down = names.parts

    def mlp(stem: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{stem}{gate}.weight", (inner, hidden)
        yield f"{stem}{up}.weight", (inner, hidden)
        yield f"{stem}{down}.weight", (hidden, inner)

    yield f"{names.router}.weight", (experts.count, hidden)
    if experts.biased:
        yield names.bias, (1,) * (names.bias_dims - 1) + (experts.count,)
    if experts.shared_gated:
        yield f"{names.shared_gate}.weight", (1, hidden)
    if experts.shared_inner:
        yield from mlp(names.shared, experts.shared_inner)
    if names.together is not None:
        yield names.together[0], (experts.count, 2 * experts.inner, hidden)
        yield names.together[1], (experts.count, hidden, experts.inner)
        return
    for expert in range(experts.count):
        yield from mlp(names.expert.format(expert), experts.inner)


def router_rows(experts: Experts) -> int:
    """Rows of a router as the decoder has it."""
    rows = experts.count + experts.shared_gated
    return rows + -rows % ROUTER_ROWS


def read_experts(config: PreTrainedConfig, architecture: Architecture, name: str) -> Experts | None:
    """The experts of a model, None where all its layers have one MLP. Raises ConfigError for what cannot be run."""
    read = {
        "qwen2_moe": _qwen,
        "qwen3_moe": _qwen,
        "granitemoe": _mixtral,
        "mixtral": _mixtral,
        "olmoe": _olmoe,
        "glm4_moe": _glm,
        "ernie4_5_moe": _ernie,
    }.get(architecture)
    if read is None:
        return None
    try:
        experts = read(config)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f"{name}: its config.json says nothing valid of its experts: download it again") from None
    check_experts(experts, name)
    return experts if experts.layers else None


def check_experts(experts: Experts, name: str) -> None:
    """Raises ConfigError where that many experts of such a size cannot be chosen."""
    sizes = (experts.count, experts.chosen, experts.inner)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or experts.chosen > experts.count:
        raise ConfigError(f"{name}: {experts.chosen} of {experts.count} experts of {experts.inner} cannot be chosen")


def _qwen(config: Any) -> Experts:
    dense, step = config.mlp_only_layers or (), config.decoder_sparse_step
    layers = (layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0)
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, tuple(layers),
        renormalised=bool(config.norm_topk_prob), shared_inner=shared, shared_gated=shared > 0,
    )  # fmt: skip


def _mixtral(config: Any) -> Experts:
    layers = tuple(range(config.num_hidden_layers))
    return Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, layers)


def _olmoe(config: Any) -> Experts:
    if config.clip_qkv is not None:
        raise ConfigError("queries, keys and values that are clipped (clip_qkv) are not supported")
    layers = tuple(range(config.num_hidden_layers))
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, layers,
        renormalised=bool(config.norm_topk_prob),
    )  # fmt: skip


def _glm(config: Any) -> Experts:
    if config.n_group != 1:
        raise ConfigError(f"experts that are chosen by groups (n_group {config.n_group}) are not supported")
    return Experts(
        config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size,
        tuple(range(config.first_k_dense_replace, config.num_hidden_layers)), scores="sigmoid",
        renormalised=bool(config.norm_topk_prob), biased=True, scale=float(config.routed_scaling_factor),
        shared_inner=config.moe_intermediate_size * config.n_shared_experts,
    )  # fmt: skip


def _ernie(config: Any) -> Experts:
    if config.use_bias:
        raise ConfigError("experts with biases (use_bias) are not supported")
    first, end = config.moe_layer_start_index, min(config.moe_layer_end_index + 1, config.num_hidden_layers)
    layers = (layer for layer in range(first, end) if (layer + 1) % config.moe_layer_interval == 0)
    return Experts(
        config.moe_num_experts, config.moe_k, config.moe_intermediate_size, tuple(layers), biased=True,
        shared_inner=config.moe_intermediate_size * config.moe_num_shared_experts,
    )  # fmt: skip
