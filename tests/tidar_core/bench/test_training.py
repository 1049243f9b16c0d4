"""`tidar bench training`: the trainer's own steps, counted and looked into."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from tidar_core.bench.training import LISTED, PROFILED, Work, _work_of, random_corpus
from tidar_core.cli import app


def test_rows_are_counted_and_the_time_is_told_apart(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    record = tmp_path / "record.json"
    asked = ["bench", "training", "--model", str(model), "--rank", "4", "--rows", "1024", "--steps", "3"]
    done = CliRunner().invoke(app, [*asked, "--device", "cpu", "--json", str(record)])
    assert done.exit_code == 0, done.output
    assert "mask rows a second" in done.output
    speed = json.loads(record.read_text())["training"]
    assert speed["mask_rows_per_second"] == pytest.approx(1024 / speed["seconds_a_step"], rel=0.5)
    assert speed["clean_rows_per_second"] > 0
    assert 0 < speed["fraction"] < 1
    assert speed["busy"] is None
    shares = [work["share"] for work in speed["work"]]
    assert len(shares) == LISTED
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < sum(shares) <= 1
    assert any("mm" in work["name"] and work["calls"] >= 1 for work in speed["work"])


@pytest.mark.parametrize(("microseconds", "found"), [(0.0, ()), (5.0, (Work("launch", 1.0, 2.0),))])
def test_a_profiler_that_sees_nothing_of_the_gpu_costs_no_measurement(microseconds, found):
    event = SimpleNamespace(self_device_time_total=microseconds, key="launch", count=2 * PROFILED)
    assert _work_of(SimpleNamespace(key_averages=lambda: [event]), on_gpu=True) == (found, microseconds / 1e6)


def test_a_random_corpus_is_one():
    corpus = random_corpus(500)
    lengths = np.diff(corpus.ends, prepend=0)
    assert len(corpus) == len(lengths) == len(set(corpus.keys.tolist()))
    assert corpus.ends[-1] == len(corpus.tokens) == len(corpus.own)
    assert corpus.tokens.min() >= 0
    assert corpus.tokens.max() < 500
    learnt, held = corpus.split()
    assert 0 < len(held) < len(learnt)
    again = random_corpus(500)
    assert (again.tokens == corpus.tokens).all()
