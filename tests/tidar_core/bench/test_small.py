"""Small measurements: perplexity against transformers', what a known prefix saves; checkpoints with random weights."""

import math
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tidar_core.engines import tiny_engine
from tests.tiny import tiny_checkpoint
from tidar_core.bench import prefix
from tidar_core.bench.exact import Comparison, ExactResult, shows_drafts
from tidar_core.bench.perplexity import measure_perplexity
from tidar_core.bench.prefix import measure_prefix
from tidar_core.bench.prompts import read_text
from tidar_core.bench.random_checkpoint import main as write_random_checkpoint
from tidar_core.bench.shapes import QWEN3_8B, QWEN25_1_5B, SHAPES, SMOLLM2_135M
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.engine import load_engine
from tidar_core.model.configuration import load_config
from tidar_core.model.sources import find_model

TEXTS = ["def add(first, second):\n    return first + second\n", "", "x", "The sum of two numbers is one number."]


def test_it_is_the_models_own(tmp_path):
    directory = tiny_checkpoint(tmp_path / "model")
    engine = load_engine(EngineConfig(str(directory), "none", "float32", "cpu"))
    found = measure_perplexity(engine, TEXTS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = [torch.tensor([ids]) for text in TEXTS if len(ids := engine.tokenizer.encode(text)) > 1]
    with torch.inference_mode():
        nats = [float(model(row, labels=row).loss) * (row.shape[1] - 1) for row in rows]
    assert (found.texts, found.tokens) == (len(rows), sum(row.shape[1] - 1 for row in rows))
    assert found.nats == pytest.approx(sum(nats) / found.tokens, rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(found.nats))
    with pytest.raises(ConfigError, match="nothing to measure"):
        measure_perplexity(engine, TEXTS[1:3])


def test_a_known_prefix_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix.time, "perf_counter", time.thread_time)  # others may take the processor meanwhile
    engine = tiny_engine(tmp_path)
    result = measure_prefix(engine, 400, 3)
    assert result.cached == 400
    assert 0 < result.ratio < 1
    with pytest.raises(ConfigError, match="does not fit"):
        measure_prefix(engine, 5000, 1)


def test_a_text_is_its_paragraphs(tmp_path):
    file = tmp_path / "text"
    file.write_text("one\n\n\n\ntwo\nlines\n\nthree")
    assert read_text(file, 2) == ["one", "two\nlines"]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_text(file, 2)


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN25_1_5B, SMOLLM2_135M], ids=["qwen3", "qwen2", "llama"])
def test_a_checkpoint_of_a_shape_is_read_as_that_shape(tmp_path, monkeypatch, shape):
    toy = replace(shape, layers=2, hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_dim=16)
    monkeypatch.setitem(SHAPES, "toy", toy)
    write_random_checkpoint("toy", str(tmp_path))
    assert replace(load_config(find_model(str(tmp_path))), eos_ids=toy.eos_ids) == toy
    engine = load_engine(EngineConfig(str(tmp_path), "none", "bfloat16", "cpu", max_model_len=64))
    assert engine.info.exact


def test_a_shape_that_is_not_known_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"Qwen9 is no shape that is known: choose among SmolLM2-135M, Qwen2\.5-1\.5B"):
        write_random_checkpoint("Qwen9", str(tmp_path))


def test_an_exact_run_without_drafts_that_hold_and_fall_shows_nothing_of_drafts():
    def ran(way: str, verified: int, held: int) -> dict[str, object]:
        return ExactResult("greedy", "plain decoding", Comparison(way, 1, 0, 0), verified, held).as_record()

    plain = ran("off, alone", 0, 0)
    assert shows_drafts([plain, ran("full, alone", 9, 4)])
    for verified, held in ((0, 0), (9, 0), (9, 9)):
        assert not shows_drafts([plain, ran("full, alone", verified, held)])
    assert not shows_drafts([plain])
