"""Mixtures of experts: who is chosen, what comes of it, and that neither depends on who else is in the batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from tests.tidar_core.engines import prompts, tiny_engine
from tests.tidar_core.model.loaded import load
from tests.tidar_core.ways import decode_ways
from tests.tiny import edit_json, tiny_adapter, tiny_checkpoint
from tidar_core.bench.exact import compare_ways, greedy_params, sampled_params
from tidar_core.config import Architecture, ConfigError, EngineConfig, Experts
from tidar_core.engine import load_engine
from tidar_core.kernels.cpu import cpu_ops
from tidar_core.kernels.experts import LEAST_SUM, Routed, choose
from tidar_core.kernels.ops import rotary_tables
from tidar_core.kernels.reference import REFERENCE_OPS, as_it_is
from tidar_core.model.configuration import load_config
from tidar_core.model.decoder import BASE_ALONE, mlp
from tidar_core.model.fingerprint import fingerprint
from tidar_core.model.loading import shapes_to_load
from tidar_core.model.sources import find_model
from tidar_core.model.weights import pack_model, widened

SIX = Experts(count=6, chosen=2, inner=64, layers=(0,))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have experts, and an MLP for all rows with a share of its own."""
    return tiny_checkpoint(tmp_path_factory.mktemp("shared") / "model", "qwen2_moe")


def chosen_one_by_one(logits: torch.Tensor, bias: torch.Tensor | None, experts: Experts) -> tuple[list, list]:
    """Experts and shares of one row, in fp64."""
    own = logits.double()[: experts.count]
    scores = own.sigmoid() if experts.scores == "sigmoid" else own.exp() / own.exp().sum()
    ranks = scores if bias is None else scores + bias
    best = sorted(range(experts.count), key=lambda expert: (-float(ranks[expert]), expert))[: experts.chosen]
    total = float(scores[best].sum().clamp_min(LEAST_SUM)) if experts.renormalised else 1.0
    return best, [float(scores[expert]) / total * experts.scale for expert in best]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_best_are_chosen_and_of_equal_ones_the_first(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    experts = Experts(
        count, data.draw(st.integers(1, count)), 16, (0,), scores=data.draw(st.sampled_from(("softmax", "sigmoid"))),
        renormalised=data.draw(st.booleans()), scale=data.draw(st.sampled_from((1.0, 2.5))),
        shared_gated=data.draw(st.booleans()),
    )  # fmt: skip
    few = st.sampled_from((-2.0, 0.0, 0.5, 3.0))  # so that some are alike
    rows = data.draw(st.integers(1, 4))
    logits = torch.tensor([[data.draw(few) for _ in range(count + 3)] for _ in range(rows)])
    bias = torch.tensor([data.draw(few) for _ in range(count)]) if data.draw(st.booleans()) else None
    routed = choose(logits, bias, experts)
    for row in range(rows):
        best, shares = chosen_one_by_one(logits[row], bias, experts)
        assert routed.experts[row].tolist() == best
        torch.testing.assert_close(routed.shares[row], torch.tensor(shares))
    if experts.shared_gated:
        assert routed.shared is not None
        torch.testing.assert_close(routed.shared[:, 0], logits[:, count].sigmoid())


def test_a_row_is_routed_alike_whatever_the_threads_are_given() -> None:
    """521 rows of 128 scores are no whole number of vectors for each of three threads."""
    experts = Experts(128, 128, 16, (0,), scores="sigmoid", renormalised=False)
    logits = 2 * torch.randn(521, 128, generator=torch.Generator().manual_seed(0))
    logits[0, :2] = torch.tensor([torch.inf, -torch.inf])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = choose(logits, None, experts)
        alone = [choose(row[None], None, experts) for row in logits]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together.shares, torch.cat([routed.shares for routed in alone]))
    assert together.shares[0, 0] == 1
    assert together.shares[0, -1] == 0


def defined_mix(x: torch.Tensor, routed: Routed, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each row through all experts, in fp64, those that it does not go through counting for nothing."""
    gate, up = (x.double() @ gate_up.double().transpose(1, 2)).chunk(2, dim=-1)
    every = (torch.nn.functional.silu(gate) * up) @ down.double().transpose(1, 2)
    shares = torch.zeros(len(x), len(gate_up), dtype=torch.float64)
    shares.scatter_(1, routed.experts, routed.shares.double())
    return torch.einsum("re,erh->rh", shares, every)


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_rows_are_mixed_as_it_is_defined(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, gate_up, down = (torch.randn(*size, generator=draw) for size in ((rows, 32), (6, 128, 32), (6, 32, 64)))
    routed = choose(torch.randn(rows, 6, generator=draw), None, SIX)
    mixed = REFERENCE_OPS.mix_experts(x, routed, gate_up, down, "silu")
    torch.testing.assert_close(mixed.double(), defined_mix(x, routed, gate_up, down), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")],
)
def test_what_becomes_of_a_row_does_not_depend_on_the_others(shared: Path, dtype: torch.dtype, kept: Any) -> None:
    config, weights = load(shared, dtype)
    ops = cpu_ops(config, dtype, kept)
    layer = pack_model(weights, ops.pack, ops.pack_head, ops.pack_adapter).layers[0]
    x = torch.randn(70, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = mlp(ops, config, layer, BASE_ALONE, x, len(x))
    for some in (slice(0, 1), slice(69, 70), slice(3, 20), slice(40, 70)):
        alone = mlp(ops, config, layer, BASE_ALONE, x[some].contiguous(), some.stop - some.start)
        assert torch.equal(alone, together[some])
    if kept is None:
        plain = load(shared, torch.float32)[1].layers[0]
        expected = mlp(REFERENCE_OPS, config, plain, BASE_ALONE, x.float(), len(x))
        error = (together.float() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype is torch.float32 else 0.05)


def test_packing_leaves_no_expert_behind_as_it_was(shared: Path) -> None:
    _, weights = load(shared)
    named = [(layer, name) for layer in weights.layers for name in ("qkv", "router", "gate_up", "down", "shared_down")]
    before = [StorageWeakRef(getattr(layer, name).untyped_storage()) for layer, name in named]
    packed = pack_model(weights, torch.clone, as_it_is, torch.clone)
    assert all(memory.expired() for memory in before)
    assert [getattr(layer, name).numel() for layer, name in named] == [0] * len(named)
    assert all(layer.gate_up.dim() == 3 and layer.gate_up.numel() > 0 for layer in packed.layers)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen3_moe", "bfloat16"), ("glm4_moe", "int8"), ("qwen3_moe", "int4"), ("glm4_moe", "float8")],
)
def test_drafts_change_no_token_whatever_experts_are_kept_in(
    tmp_path: Path, architecture: Architecture, dtype: str
) -> None:
    engine = tiny_engine(tmp_path, architecture, dtype=dtype)
    assert engine.info.exact
    for params in (greedy_params, sampled_params):
        ways = decode_ways(engine, prompts(4), lambda mode, params=params: params(20, mode), 4)
        assert all(comparison.different == 0 for comparison in compare_ways(ways))


def test_an_expert_of_the_drafters_own_may_be_of_any_rank(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, "qwen3_moe", rank=5)
    ways = decode_ways(engine, prompts(3), lambda mode: greedy_params(24, mode), 3)
    assert all(comparison.different == 0 for comparison in compare_ways(ways))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])  # the second's first layer has no experts
def test_the_drafters_expert_is_heard_by_mask_rows_alone(tmp_path: Path, architecture: Architecture) -> None:
    runner = tiny_engine(tmp_path, architecture)._runner
    assert runner.adapter is not None
    layer, extra = runner.weights.layers[0], runner.adapter.layers[0]
    x = torch.randn(9, runner.config.hidden_size)
    with_it, without = (mlp(runner.ops, runner.config, layer, each, x, 6) for each in (extra, BASE_ALONE))
    assert torch.equal(with_it[:6], without[:6])
    assert not torch.isclose(with_it[6:], without[6:]).all(dim=1).any()


def test_the_drafters_expert_is_heard_where_no_layer_has_experts(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen3_moe", stated={"mlp_only_layers": [0, 1]})
    adapter = tiny_adapter(tmp_path / "adapter", model, rank=16)
    runner = load_engine(EngineConfig(str(model), str(adapter), "float32", "cpu"))._runner
    assert runner.config.experts is None
    assert runner.adapter is not None
    assert runner.ops.bind_layers is not None
    rotary = rotary_tables(runner.config, runner.device)
    assert runner.ops.bind_layers(runner.weights, runner.adapter, rotary) is None
    assert runner.ops.bind_layers(runner.weights, None, rotary) is not None


def test_a_fingerprint_tells_experts_apart(shared: Path) -> None:
    _, weights = load(shared)
    assert fingerprint(weights) == fingerprint(load(shared, torch.bfloat16)[1])
    assert fingerprint(widened(weights, torch.float64)) == fingerprint(weights)
    changed = weights.layers[1].down.clone()
    changed[-1] += 1
    layers = (weights.layers[0], replace(weights.layers[1], down=changed))
    assert fingerprint(replace(weights, layers=layers)) != fingerprint(weights)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts of 64 cannot be chosen"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "0 of 8 experts of 64 cannot be chosen"),
        ("olmoe", {"clip_qkv": 8.0}, "queries, keys and values that are clipped"),
        ("glm4_moe", {"n_group": 2}, "experts that are chosen by groups"),
        ("ernie4_5_moe", {"use_bias": True}, "experts with biases"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "says nothing valid of its experts"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "says nothing valid of its experts"),
    ],
)
def test_a_mixture_that_cannot_be_run_is_one_line(
    tmp_path: Path, architecture: Architecture, changes: dict[str, Any], message: str
) -> None:
    path = tiny_checkpoint(tmp_path, architecture)
    edit_json(path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(find_model(str(path)))
    assert "\n" not in str(error.value)


def test_layers_that_are_not_there_have_no_experts(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "ernie4_5_moe", stated={"moe_layer_end_index": 1})
    edit_json(path / "config.json", moe_layer_end_index=10**9)
    experts = load_config(find_model(str(path))).experts
    assert experts is not None
    assert experts.layers == (1,)


def test_an_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    edit_json(path / "config.json", num_experts=9, num_local_experts=9)
    source = find_model(str(path))
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.0\.mlp\.gate\.weight is \[8, 96\], but \[9, 96\]"):
        shapes_to_load(source, load_config(source))


def test_layers_may_all_have_one_mlp(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe", stated={"mlp_only_layers": [0, 1]})
    config, weights = load(path)
    assert config.experts is None
    assert weights.layers[0].router is None


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_lie_in_one_tensor_are_read_one_by_one(tmp_path: Path, transposed: bool) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe", tied=False)
    expected = load(path)[1]
    plain = load_file(path / "model.safetensors")
    together = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for index, layer in enumerate(expected.layers):
        for name, matrices in (("gate_up", layer.gate_up), ("down", layer.down)):
            stored = matrices.transpose(1, 2) if transposed else matrices
            together[f"model.layers.{index}.mlp.experts.{name}_proj"] = stored.contiguous()
    save_file(together, path / "model.safetensors", {"format": "pt"})
    found = load(path)[1]
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(ours.gate_up, theirs.gate_up)
        assert torch.equal(ours.down, theirs.down)
    del together["model.layers.1.mlp.experts.down_proj"]
    save_file(together, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight"):
        load(path)
