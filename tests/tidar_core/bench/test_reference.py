"""What answers are compared with: transformers' own model, as transformers reads it wherever it can."""

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_checkpoint, tiny_gguf
from tidar_core.bench import exact
from tidar_core.bench.exact import load_reference, read_by_transformers
from tidar_core.model.sources import find_model

TOKENS = torch.tensor([list(range(30, 90))])


def test_what_the_engine_misreads_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(exact, "dense_model", None)
    for place in (path, tiny_gguf(tmp_path / "model.gguf", path)):
        model = load_reference(find_model(str(place)), torch.float32)
        assert model(TOKENS).logits.isfinite().all()


def test_where_transformers_makes_weights_up_the_engine_reads_them(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", tied=False)
    with torch.no_grad():
        expected = load_reference(find_model(str(path)), torch.float32)(TOKENS).logits
        (path / "model.safetensors").rename(path / "weights.safetensors")
        assert read_by_transformers(find_model(str(path)), torch.float32) is None
        assert torch.equal(load_reference(find_model(str(path)), torch.float32)(TOKENS).logits, expected)
