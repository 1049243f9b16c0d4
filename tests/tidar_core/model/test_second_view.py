"""Drafters that others made, Orthrus' above all: the base's text, and the drafts that their definition says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tidar_core.engine.test_flight import answers
from tests.tidar_core.engine.test_graphs import Spoiling, decoded
from tests.tidar_core.engines import prompts
from tests.tidar_core.model.second_views import BLOCK, FORM, MASK, second_view_checkpoint, slot_scores
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.bench.drive import EngineAnswer, answer_all
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.run import convert
from tidar_core.convert.screen import TerminalScreen
from tidar_core.convert.trainer import TrainConfig
from tidar_core.engine import Engine, load_engine, start
from tidar_core.engine.graphs import Graphs, Reach
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.layout import BlockForm
from tidar_core.model.adapter import identify_base, load_trained
from tidar_core.model.adapter_config import BaseIdentity
from tidar_core.model.configuration import load_config
from tidar_core.model.loading import load_weights
from tidar_core.model.sources import find_model
from tidar_core.model.tokenizer import load_tokenizer
from tidar_core.request import SamplingParams

FULL = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, drafts="full")
PROMPTS = [(7,), *prompts(5)]


def engine_of(path: Path, **settings: object) -> Engine:
    config = EngineConfig(model=str(path), dtype="float32", device="cpu")
    return load_engine(replace(config, **settings))  # type: ignore[arg-type]


def drafts_are_as_defined(
    path: Path, form: BlockForm, prompt: tuple[int, ...], answer: EngineAnswer, never: int | None = None
) -> int:
    """Each step's drafts are what the block behind the text before says, its last token left out: that was not known
    when the block was laid. How many were looked at. Slots have projections of their own where the checkpoint has; the
    token `never` is not guessed."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tensors, seen = load_file(path / "model.safetensors"), 0
    tensors = {name.replace(".weight", "_diff.weight"): tensor for name, tensor in tensors.items()} | tensors
    text, fresh = [*prompt, *answer.tokens[:1]], True
    for step in answer.steps[1:]:
        if fresh and step.drafted:
            scores = slot_scores(model, tensors, text[:-1], form)[1 : len(step.drafted) + 1]
            if never is not None:
                scores[:, never] = -torch.inf
            said = scores.gather(1, torch.tensor(step.drafted)[:, None])[:, 0]
            assert (scores.max(1).values - said).max() < 1e-4
            seen += len(step.drafted)
        text += answer.tokens[len(text) - len(prompt) :][: step.accepted + 1]
        fresh = step.used is not None
    return seen


@pytest.mark.parametrize("compiled", [True, False], ids=["CPU kernels", "plain torch"])
def test_drafts_are_what_the_second_view_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    path = second_view_checkpoint(tmp_path / "model")
    if not compiled:
        monkeypatch.setattr(start, "ops_for", lambda *given: REFERENCE_OPS)
    engine = engine_of(path)
    assert engine.info.exact or not compiled
    assert engine.info.block_length == BLOCK
    answered = answer_all(engine, PROMPTS, [FULL] * len(PROMPTS))
    seen = sum(drafts_are_as_defined(path, FORM, *pair) for pair in zip(PROMPTS, answered, strict=True))
    steps = [step for answer in answered for step in answer.steps]
    assert seen > 100
    assert any(step.accepted == 0 < len(step.drafted) for step in steps)
    assert any(step.accepted > 1 for step in steps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_text_is_the_bases(tmp_path: Path, dtype: str) -> None:
    engine = engine_of(second_view_checkpoint(tmp_path / "model"), dtype=dtype)
    plain = engine_of(tiny_checkpoint(tmp_path / "base", "qwen3"), dtype=dtype)
    for chosen in (FULL, replace(FULL, temperature=0.8, seed=3, top_p=0.9)):
        expected = answer_all(plain, PROMPTS, [replace(chosen, drafts="off")] * len(PROMPTS))
        for ways in (["off"], ["auto"], ["full"], ["full", "off", "auto"]):
            params = [replace(chosen, drafts=ways[index % len(ways)]) for index in range(len(PROMPTS))]
            found = answer_all(engine, PROMPTS, params, cache_salt=str(ways))
            assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("params", [FULL, replace(FULL, temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_steps_ahead_say_and_draft_the_same(tmp_path: Path, params: SamplingParams) -> None:
    """The token that a proposal begins with is known to the device alone then. (An answer's last steps may draft less:
    they were planned for the most that might have come.)"""
    path = second_view_checkpoint(tmp_path / "model")
    modes = [("full", None), ("full", 2), ("off", None), ("full", 3), ("full", None)]
    asked = [replace(params, drafts=drafts, block=block, max_tokens=40) for drafts, block in modes]
    one, none = answers(engine_of(path), asked)
    two, overlapped = answers(engine_of(path, overlap_steps=True), asked)
    assert none == 0
    assert overlapped > 10
    for ours, theirs in zip(two, one, strict=True):
        assert ours.tokens == theirs.tokens
        sure = [(step.drafted, step.accepted, step.used) for step in theirs.steps[:-8]]
        assert [(step.drafted, step.accepted, step.used) for step in ours.steps[: len(sure)]] == sure
    assert any(step.accepted for answer in two for step in answer.steps)


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_captured_steps_give_the_same_answers(tmp_path: Path, overlap_steps: bool) -> None:
    engine = engine_of(second_view_checkpoint(tmp_path / "model"), overlap_steps=overlap_steps)
    params = [replace(FULL, drafts=mode, temperature=heat, seed=5) for mode in ("full", "off") for heat in (0.0, 0.8)]
    graphs = Graphs(Spoiling(), Reach(64, 64), 1)
    expected, found = decoded(engine, None, params), decoded(engine, graphs, params)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert sum(step.accepted for answer in found for step in answer.steps) > 0
    assert len(graphs) > 1


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def test_what_cannot_draft_is_one_line(tmp_path: Path) -> None:
    path = second_view_checkpoint(tmp_path / "model")
    stated, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")

    def told(changes: dict[str, object], left_out: str = "") -> str:
        (path / "config.json").write_text(json.dumps(stated | changes))
        save_file(without(left_out)(tensors), path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError) as error:
            engine_of(path)
        assert engine_of(path, adapter="none").info.block_length == 0
        return str(error.value)

    assert "block_size above 1" in told({"block_size": None})
    assert "mask_token_id 512 of model is not in its vocabulary of 512 tokens" in told({"mask_token_id": 512})
    missing = "model.layers.1.self_attn.k_norm_diff.weight"
    assert f"lacks the tensor {missing}" in told({}, missing)


def test_the_base_may_say_the_mask_token(tmp_path: Path) -> None:
    """With a second view the mask is a word of the base like any other: its text is the base's to the last."""
    wanted = [replace(FULL, logit_bias=((MASK, 4.0),), temperature=1.0, seed=seed) for seed in range(6)]
    plain = engine_of(tiny_checkpoint(tmp_path / "base", "qwen3"))
    expected = answer_all(plain, PROMPTS, wanted)
    found = answer_all(engine_of(second_view_checkpoint(tmp_path / "model")), PROMPTS, wanted)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert any(MASK in answer.tokens for answer in found)


def test_a_mask_that_would_keep_answers_from_ending_is_refused(tmp_path: Path) -> None:
    path, contract = tiny_checkpoint(tmp_path / "model"), tmp_path / "tidar.json"
    contract.write_text('{"mask_token_id": 2, "block_length": 4}')
    with pytest.raises(ConfigError, match="mask_token_id 2 of model is a token that ends answers"):
        engine_of(path, adapter=str(contract))


@pytest.mark.parametrize(
    "form", [BlockForm(), BlockForm(labels="shifted"), FORM], ids=lambda form: f"{form.slot_0}, {form.labels}"
)
def test_weights_that_draft_by_themselves_do_so_in_the_form_that_is_stated(tmp_path: Path, form: BlockForm) -> None:
    """By a file that lies elsewhere: nothing has to be written beside weights that a hub's cache holds."""
    path, contract = tiny_checkpoint(tmp_path / "model", "qwen3"), tmp_path / "tidar.json"
    stated = {"mask_token_id": MASK, "block_length": BLOCK, "slot_0": form.slot_0, "labels": form.labels}
    contract.write_text(json.dumps(stated))
    engine = engine_of(path, adapter=str(contract))
    answered = answer_all(engine, PROMPTS, [FULL] * len(PROMPTS))
    pairs = zip(PROMPTS, answered, strict=True)
    assert sum(drafts_are_as_defined(path, form, *pair, never=MASK) for pair in pairs) > 100
    plain = answer_all(engine, PROMPTS, [replace(FULL, drafts="off")] * len(PROMPTS), cache_salt="plain")
    assert [answer.tokens for answer in answered] == [answer.tokens for answer in plain]


def test_low_rank_drafters_of_that_form_are_served_and_not_trained(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    adapter = tiny_adapter(tmp_path / "adapter", model)
    described = json.loads((adapter / "adapter.json").read_text())
    (adapter / "adapter.json").write_text(json.dumps(described | {"slot_0": "anchor", "labels": "shifted"}))
    engine = engine_of(model, adapter=str(adapter))
    one = answer_all(engine, PROMPTS, [FULL] * len(PROMPTS))
    off = answer_all(engine, PROMPTS, [replace(FULL, drafts="off")] * len(PROMPTS), cache_salt="off")
    assert [answer.tokens for answer in one] == [answer.tokens for answer in off]
    refused = "labels 'shifted' can be served, but not trained on"
    with pytest.raises(ConfigError, match=refused):
        load_trained(adapter, engine_base(model), torch.float32, "cpu")
    asked = ConvertOptions(str(model), tmp_path / "out", start=str(adapter), train=TrainConfig(block=BLOCK))
    with pytest.raises(ConfigError, match=refused):
        convert(asked, TerminalScreen(Console(stderr=True)))
    assert not asked.work.exists(), "told before anything is gathered"


def engine_base(path: Path) -> BaseIdentity:
    source = find_model(str(path))
    config = load_config(source)
    return identify_base(
        source.name, config, load_weights(source, config, torch.float32, "cpu"), load_tokenizer(source)
    )
