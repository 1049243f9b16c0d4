"""Full TiDAR: masks and loss as the paper has them, a training that resumes, a checkpoint that serves itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.tidar_core.test_convert_training import run_command
from tests.tiny import tiny_checkpoint
from tidar_core.bench.drive import answer_all, tokens_per_step
from tidar_core.bench.exact import (
    compare_ways,
    compare_with_reference,
    decode_ways,
    greedy_params,
    reference_answers,
    sampled_params,
)
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert.full import doubled, joint_loss
from tidar_core.engine import load_engine
from tidar_core.model.own_drafter import CONTRACT_FILE, OwnDrafter, read_own_drafter

SENTENCE = "the quick brown fox jumps over the lazy dog. "


@given(st.integers(2, 40), st.integers(2, 9), st.data(), st.sampled_from(["bidirectional", "causal"]))
def test_masks_see_the_text_before_their_block_and_one_another(length, block, data, within_block):
    offset = data.draw(st.integers(1, block))
    made = doubled(np.arange(3, 3 + length), 2, block, offset, within_block)
    assert made.tokens.tolist() == [*range(3, 3 + length), *[2] * length]
    assert made.positions.tolist() == [*range(length)] * 2

    def block_of(place: int) -> int:
        return -1 if place < offset else (place - offset) // block

    for row in range(length):
        for column in range(length):
            assert made.visible[row, column] == (column <= row)
            assert not made.visible[row, length + column]
            same = block_of(row) == block_of(column)
            first = 0 if row < offset else offset + block_of(row) * block
            assert made.visible[length + row, column] == (column < first)
            seen = same and (within_block == "bidirectional" or column <= row)
            assert made.visible[length + row, length + column] == seen


def test_the_loss_is_the_papers():
    generator = torch.Generator().manual_seed(0)
    following, masked = torch.randn(2, 9, 30, generator=generator)
    tokens = torch.randint(30, (9,), generator=generator)
    wanted = torch.tensor([True, True, False, True, True, True, True, True, False])
    rows = [1, 3, 4, 5, 6, 7]
    autoregressive = sum(F.cross_entropy(following[row - 1], tokens[row]) for row in rows)
    diffusion = sum(F.cross_entropy(masked[row], tokens[row]) for row in rows)
    for alpha in (0.0, 1.0, 3.0):
        expected = (alpha * autoregressive + diffusion) / (1 + alpha)
        torch.testing.assert_close(joint_loss(following, masked, tokens, wanted, alpha), expected)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint made by two runs of the command, the second going on where the first ended; what they said."""
    directory = tmp_path_factory.mktemp("full")
    model = tiny_checkpoint(directory / "model", likely=0, vocab=511)
    (directory / "text").write_text("".join(f"{i} {SENTENCE}" for i in range(400)), encoding="utf-8")
    common = (
        model, "--mode", "full", "--out", directory / "out", "--text", directory / "text", "--block-length", 4,
        "--learning-rate", 0.01, "--rows", 1500, "--threads", 1,
    )  # fmt: skip
    said = [run_command(*common, "--steps", steps) for steps in (15, 110)]
    return directory, said


def test_tokens_per_step_rise_and_a_run_goes_on(trained):
    directory, said = trained
    assert [status for status, _ in said] == [0, 0], said
    assert "going on from step 15" in said[1][1]
    assert f"tidar up --model {directory / 'out'}" in said[1][1]
    contract = read_own_drafter(directory / "out")
    assert contract is not None
    assert contract.block_length == 4
    assert contract.training["tokens_per_step"] > 1.5
    assert "Measured: " in (directory / "out" / "README.md").read_text()


def test_it_serves_itself_and_equals_its_own_plain_decoding(trained):
    directory, _ = trained
    engine = load_engine(EngineConfig(str(directory / "out"), dtype="float32", device="cpu"))
    assert engine.info.adapter == "of its own"
    assert engine.info.block_length == 4
    prompts = [tuple(engine.tokenizer.encode(f"{i} the quick brown")) for i in (7, 30, 411)]
    ways = decode_ways(engine, prompts, lambda mode: greedy_params(40, mode), 3)
    assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
    model = AutoModelForCausalLM.from_pretrained(directory / "out", dtype=torch.float32).eval()
    comparisons = compare_with_reference(model, prompts, reference_answers(model, prompts, 40), ways)
    assert [comparison.different for comparison in comparisons] == [0] * 6
    full = answer_all(engine, prompts, [replace(greedy_params(40, "full"))] * 3)
    print(f"{tokens_per_step(full):.2f} tokens a step")
    assert tokens_per_step(full) > 1.3
    assert load_engine(EngineConfig(str(directory / "out"), "none", "float32", "cpu")).info.adapter is None


def test_the_mask_is_never_said(tmp_path):
    """A model whose likeliest word is called its mask says other words, in any mode; so does one that samples."""
    model = tiny_checkpoint(tmp_path / "model")
    config = EngineConfig(str(model), dtype="float32", device="cpu")
    prompts = [tuple(range(40, 50)), tuple(range(300, 330))]
    said = answer_all(load_engine(config), prompts, [greedy_params(30, "off")] * 2)[0].tokens
    mask = max(set(said), key=said.count)
    (model / CONTRACT_FILE).write_text(OwnDrafter(mask_token_id=mask, block_length=4).model_dump_json())
    engine = load_engine(config)
    for rule in (greedy_params, sampled_params):
        ways = decode_ways(engine, prompts, lambda mode, rule=rule: rule(30, mode), 2)
        assert [comparison.different for comparison in compare_ways(ways)] == [0] * 6
        for mode in ("off", "full"):
            answers = answer_all(engine, prompts, [rule(30, mode)] * 2)
            assert all(mask not in answer.tokens for answer in answers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 99999}, "names mask_token_id 99999, but the vocabulary has"),
        ({"blok_length": 4}, "is not valid"),
        ({"block_length": 1}, "is not valid"),
    ],
)
def test_a_contract_that_cannot_be_kept_is_one_line(tmp_path, change, message):
    model = tiny_checkpoint(tmp_path / "model")
    contract = OwnDrafter(mask_token_id=3, block_length=4).model_dump() | change
    (model / CONTRACT_FILE).write_text(json.dumps(contract))
    with pytest.raises(ConfigError, match=message) as told:
        load_engine(EngineConfig(str(model), dtype="float32", device="cpu"))
    assert "\n" not in str(told.value)


def test_text_is_too_little_is_said(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "text").write_text("A word.")
    status, said = run_command(
        model, "--mode", "full", "--out", tmp_path / "out", "--text", tmp_path / "text", "--steps", 2
    )
    assert status == 1
    assert "give more --text" in said
