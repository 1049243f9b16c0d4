"""GGUF files of mixtures of experts: of each token they say what the checkpoint says that they were made of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tidar_core.model.loaded import load, said_as, said_as_transformers_says
from tests.tiny import tiny_checkpoint, tiny_gguf
from tidar_core.config import Architecture, ConfigError
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.run import convert
from tidar_core.convert.screen import TerminalScreen
from tidar_core.model import configuration, loading
from tidar_core.model import gguf as gguf_module
from tidar_core.model.dense import dense_model
from tidar_core.model.fingerprint import fingerprint
from tidar_core.model.gguf import GgufHeader, GgufTensor, config_from_gguf, read_header
from tidar_core.model.sources import find_model

Change = Callable[[GgufHeader], GgufHeader]


@pytest.fixture(scope="module")
def qwen2_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    return tiny_gguf(directory / "tiny.gguf", tiny_checkpoint(directory / "checkpoint", "qwen2_moe", tied=False))


@pytest.fixture
def load_changed(qwen2_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Any]:
    """Loads the file as if its header were another."""

    def changed(change: Change) -> Any:
        for module in (configuration, loading):
            monkeypatch.setattr(module, "read_header", lambda path: change(read_header(path)))
        return load(qwen2_moe)

    return changed


def round_as(kind: GGMLQuantizationType, checkpoint: Path) -> None:
    """Give the matrices of a checkpoint, but for routers, the values that `kind` leaves of them."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    for name, values in tensors.items():
        if values.dim() > 1 and not name.endswith((".gate.weight", ".shared_expert_gate.weight")):
            tensors[name] = torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind))
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "kind", "options"),
    [
        ("qwen3_moe", GGMLQuantizationType.Q4_0, {"tied": False}),
        ("qwen3_moe", GGMLQuantizationType.F32, {"rope": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen2_moe", GGMLQuantizationType.Q8_0, {"tied": False}),
        ("mixtral", GGMLQuantizationType.Q5_0, {"tied": False}),
        ("olmoe", GGMLQuantizationType.F16, {"tied": False}),
    ],
)
def test_a_mixture_is_the_checkpoint_that_it_was_made_of(
    architecture: Architecture,
    kind: GGMLQuantizationType,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture, **options)
    path = tiny_gguf(tmp_path / "tiny.gguf", checkpoint, kind)
    round_as(kind, checkpoint)
    monkeypatch.setattr(gguf_module, "_CHUNK_WEIGHTS", 1000)  # several chunks an expert, the last one shorter
    (config, weights), (original, expected) = load(path), load(checkpoint)
    assert replace(config, norm_eps=original.norm_eps) == original  # stored in fp32
    for layer, as_made in zip(weights.layers, expected.layers, strict=True):
        for field in layer.__dataclass_fields__:
            tensor, whole = getattr(layer, field), getattr(as_made, field)
            assert (tensor is whole is None) or torch.equal(tensor, whole), field
    assert fingerprint(weights) == fingerprint(expected)
    said_as_transformers_says(path, checkpoint)


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [  # of which transformers reads none out of the file
        ("qwen2_moe", {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}),
        ("qwen3_moe", {"moe_intermediate_size": 768}),
    ],
)
def test_a_mixture_says_what_transformers_reads_of_the_file(
    architecture: Architecture, sizes: dict[str, int], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture, tied=False, stated=sizes)
    path = tiny_gguf(tmp_path / "tiny.gguf", checkpoint, GGMLQuantizationType.Q8_0)
    said_as(path, AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32))


def test_of_an_expert_its_rows_alone_are_dequantized(qwen2_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        counts.append(rows.nbytes // 4)
        return dequantize(rows, kind)

    monkeypatch.setattr(gguf_module, "dequantize", counted)
    load(qwen2_moe)
    assert sum(counts) == sum(np.prod(tensor.shape) for tensor in read_header(qwen2_moe).tensors.values())


def test_files_that_are_laid_out_otherwise_are_read_too(qwen2_moe: Path, load_changed: Callable[[Change], Any]) -> None:
    """Of before April 2024, with one tensor an expert; not quantized yet, with the shared MLP's gate as a matrix."""

    def otherwise(header: GgufHeader) -> GgufHeader:
        tensors: dict[str, GgufTensor] = {}
        for name, tensor in header.tensors.items():
            if "_exps" in name:
                count, rows, columns = tensor.shape
                for expert in range(count):
                    start = tensor.start + expert * rows * columns * 4
                    tensors[name.replace("_exps", f".{expert}")] = GgufTensor((rows, columns), 0, start)
            else:
                tensors[name] = replace(tensor, shape=(1, *tensor.shape)) if "inp_shexp" in name else tensor
        return replace(header, tensors=tensors)

    assert fingerprint(load_changed(otherwise)[1]) == fingerprint(load(qwen2_moe)[1])


def test_the_first_files_of_qwen_state_one_size_for_all(qwen2_moe: Path) -> None:
    header = read_header(qwen2_moe)
    kept = {key: value for key, value in header.metadata.items() if "expert_" not in key or "count" in key}
    experts = config_from_gguf(replace(header, metadata=kept)).experts
    assert experts is not None
    assert (experts.inner, experts.shared_inner) == (160 // 2, 160)


@pytest.mark.parametrize(
    ("changed", "tensor", "message"),
    [
        ({}, "blk.1.ffn_up_exps.weight", r"lacks the tensor model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight"),
        ({}, "blk.1.ffn_gate_inp.weight", r"lacks the tensor model\.layers\.1\.mlp\.gate\.weight"),
        ({"expert_count": 5}, "", r"mlp\.gate\.weight is \[6, 96\], but \[5, 96\] was expected"),
        ({"expert_used_count": 7}, "", "7 of 6 experts of 64 cannot be chosen"),
        ({"expert_count": 0}, "", "2 of 0 experts"),
        ({"block_count": 2**31}, "", r"lacks the tensor model\.layers\.2\."),
    ],
)
def test_a_mixture_that_cannot_be_read_is_one_line(
    changed: dict[str, int], tensor: str, message: str, load_changed: Callable[[Change], Any]
) -> None:
    def change(header: GgufHeader) -> GgufHeader:
        stated = header.metadata | {f"qwen2moe.{key}": value for key, value in changed.items()}
        left = {name: each for name, each in header.tensors.items() if name != tensor}
        return replace(header, metadata=stated, tensors=left)

    with pytest.raises(ConfigError, match=message) as error:
        load_changed(change)
    assert "\n" not in str(error.value)


def test_experts_that_are_not_as_many_as_the_header_says_are_refused(load_changed: Callable[[Change], Any]) -> None:
    name, shape = "blk.0.ffn_down_exps.weight", (7, 96, 64)

    def more(header: GgufHeader) -> GgufHeader:
        return replace(header, tensors=header.tensors | {name: replace(header.tensors[name], shape=shape)})

    with pytest.raises(ConfigError, match=r"experts\.0\.down_proj\.weight is \[7, 96, 64\], but \[96, 64\] was"):
        load_changed(more)


def test_transformers_is_not_trusted_with_a_mixture(qwen2_moe: Path) -> None:
    with pytest.raises(ConfigError, match="give the safetensors checkpoint"):
        dense_model(find_model(str(qwen2_moe)), torch.float32)


def test_a_conversion_that_needs_transformers_is_refused_before_anything_is_gathered(
    qwen2_moe: Path, tmp_path: Path
) -> None:
    options = ConvertOptions(str(qwen2_moe), tmp_path / "out", mode="full")
    for refused in (options, replace(options, mode="adapter", generator="transformers")):
        with pytest.raises(ConfigError, match="give the safetensors checkpoint"):
            convert(refused, TerminalScreen(Console(quiet=True)))
    assert not list(tmp_path.iterdir())
