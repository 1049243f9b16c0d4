"""Full TiDAR: masks and loss as the paper has them, a checkpoint that serves itself, the folder that it goes to."""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, product
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tidar_core.convert.trained import Killed, run_command
from tests.tidar_core.ways import decode_ways
from tests.tiny import tiny_checkpoint
from tidar_core.bench.drive import answer_all, tokens_per_step
from tidar_core.bench.exact import (
    compare_ways,
    compare_with_reference,
    greedy_params,
    reference_answers,
    sampled_params,
)
from tidar_core.config import ConfigError, EngineConfig
from tidar_core.convert import full, full_folder
from tidar_core.convert.full import _visible, document_logits, doubled, joint_loss
from tidar_core.convert.full_folder import (
    check_replaceable,
    kept_tokens_per_step,
    part_of,
    remove,
    replace_folder,
    take_back,
)
from tidar_core.engine import load_engine
from tidar_core.model.contract import CONTRACT_FILE, OwnDrafter, read_own_drafter

SENTENCE = "the quick brown fox jumps over the lazy dog. "


@settings(deadline=None)
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


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text", "qwen2"])
def test_in_layers_with_a_window_rows_see_no_further_back(tmp_path, architecture):
    path = tiny_checkpoint(tmp_path, architecture, stated={"sliding_window": 5})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    document = doubled(np.arange(30, 60), 2, 4, 1, "bidirectional")
    with torch.no_grad():
        following, _ = document_logits(model, document)
        expected = model(document.tokens[None, :30]).logits[0]
    torch.testing.assert_close(following, expected, rtol=1e-5, atol=2e-5)
    seen = _visible(model.config, document, torch.device("cpu"))
    if architecture == "qwen2":  # whose window is not in use
        assert torch.equal(seen[0, 0], document.visible)
        return
    if architecture == "gemma3_text":
        assert torch.equal(seen["full_attention"][0, 0], document.visible)
        seen = seen["sliding_attention"]
    for row, column in product(range(60), repeat=2):
        near = column >= 30 or row % 30 - column < 5
        assert seen[0, 0, row, column] == (document.visible[row, column] and near)


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
    """A checkpoint made by two runs of the command, the second going on where the first ended; how they ended."""
    directory = tmp_path_factory.mktemp("full")
    model = tiny_checkpoint(directory / "model", likely=0, vocab=511)
    (directory / "text").write_text("".join(f"{i} {SENTENCE}" for i in range(400)), encoding="utf-8")
    common = (
        model, "--mode", "full", "--out", directory / "out", "--text", directory / "text", "--block-length", 4,
        "--learning-rate", 0.01, "--rows", 750, "--threads", 1, "--dtype", "float32",
    )  # fmt: skip
    runs = [run_command(*common, "--steps", steps) for steps in (15, 110)]
    return directory, runs


def test_tokens_per_step_rise_and_a_run_goes_on(trained):
    directory, runs = trained
    assert [status for status, _ in runs] == [0, 0], runs
    assert "going on from step 15" in runs[1][1]
    assert f"tidar up --model {directory / 'out'}" in runs[1][1]
    contract = read_own_drafter(directory / "out")
    assert contract is not None
    assert contract.block_length == 4
    assert contract.training["dtype"] == "float32"
    assert contract.training["tokens_per_step"] > 1.5
    assert len(contract.holds) == 3
    expected = 1 + sum(accumulate(contract.holds, mul))
    assert contract.training["tokens_per_step"] == pytest.approx(expected, abs=0.005), "both are of the same drafts"
    assert "a mean over blocks one behind the other" in (directory / "out" / "README.md").read_text()
    assert json.loads((directory / "out" / "config.json").read_text())["dtype"] == "bfloat16", "as the weights are"


def test_it_serves_itself_and_equals_its_own_plain_decoding(trained):
    directory, _ = trained
    engine = load_engine(EngineConfig(str(directory / "out"), dtype="float32", device="cpu"))
    assert engine.info.adapter == "of its own"
    assert engine.info.block_length == 4
    assert engine.info.expected_acceptance == read_own_drafter(directory / "out").holds
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
    tokens = answer_all(load_engine(config), prompts, [greedy_params(30, "off")] * 2)[0].tokens
    mask = max(set(tokens), key=tokens.count)
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
        ({"mask_token_id": 99999}, "mask_token_id 99999 of .* is not in its vocabulary"),
        ({"blok_length": 4}, "is not valid"),
        ({"block_length": 1}, "is not valid"),
    ],
)
def test_a_contract_that_cannot_be_kept_is_one_line(tmp_path, change, message):
    model = tiny_checkpoint(tmp_path / "model")
    contract = OwnDrafter(mask_token_id=3, block_length=4).model_dump() | change
    (model / CONTRACT_FILE).write_text(json.dumps(contract))
    with pytest.raises(ConfigError, match=message) as raised:
        load_engine(EngineConfig(str(model), dtype="float32", device="cpu"))
    assert "\n" not in str(raised.value)


def test_no_position_is_trained_that_the_model_does_not_have(tmp_path, monkeypatch):
    positions: set[int] = set()

    def noted(*arguments):
        made = doubled(*arguments)
        positions.update(made.positions.tolist())
        return made

    monkeypatch.setattr(full, "doubled", noted)
    model = tiny_checkpoint(tmp_path / "model", layers=1, max_positions=64)
    (tmp_path / "text").write_text("".join(f"{i} {SENTENCE}" for i in range(200)))
    status, output = run_command(
        model, "--mode", "full", "--out", tmp_path / "out", "--text", tmp_path / "text", "--rows", 200, "--steps", 2
    )
    assert status == 0, output
    assert positions == set(range(64))


def test_text_is_too_little_is_said(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "text").write_text("A text of a few words, which is more than none and yet one document alone.")
    status, output = run_command(
        model, "--mode", "full", "--out", tmp_path / "out", "--text", tmp_path / "text", "--steps", 2
    )
    assert status == 1
    assert "give more --text" in output


def test_weights_that_are_not_there_are_not_made_up(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text").write_text("".join(f"{i} {SENTENCE}" for i in range(200)))
    common = (model, "--mode", "full", "--out", tmp_path / "out", "--text", tmp_path / "text", "--steps", 2)
    status, output = run_command(*common)
    assert status == 1
    assert "model.layers.1.mlp.up_proj.weight" in output
    assert not (tmp_path / "out.work").exists(), "it is told before anything is gathered"
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")
    status, output = run_command(*common)
    assert status == 1
    assert "safetensors" in output
    assert "Traceback" not in output


# The folder


def full_weights(folder: Path, tokens_per_step: float = 2.0) -> Path:
    """A folder as the conversion leaves it, without the weights."""
    folder.mkdir()
    record = {"base": "tiny", "tokens_per_step": tokens_per_step}
    contract = OwnDrafter(mask_token_id=3, block_length=4, training=record)
    (folder / CONTRACT_FILE).write_text(contract.model_dump_json())
    return folder


@pytest.mark.parametrize("where", ["model", ".", "notes", "file", "others"])
def test_a_folder_with_something_else_is_left_alone(tmp_path, monkeypatch, where):
    model = tiny_checkpoint(tmp_path / "model")
    for folder in ("notes", "others"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "text").write_text(SENTENCE * 400)
    (tmp_path / "others" / CONTRACT_FILE).write_text(OwnDrafter(mask_token_id=3, block_length=4).model_dump_json())
    monkeypatch.chdir(tmp_path / "notes")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, output = run_command(
        model, "--mode", "full", "--out", tmp_path / where, "--text", tmp_path / "text", "--steps", 1
    )
    assert status == 1
    assert "choose a new" in output
    assert len(output.splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_with_what_is_needed_is_left_alone(tmp_path):
    out = full_weights(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out will be replaced, and with it .*text: choose a new folder"):
        check_replaceable(out, [out / "text"])
    check_replaceable(out, [tmp_path / "text"])
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty", [])
    check_replaceable(tmp_path / "new", [])


@pytest.mark.parametrize("content", ["nothing", "lost+found"])
def test_a_mounted_volume_is_refused_before_anything_is_gathered(tmp_path, monkeypatch, content):
    model, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "my volume"
    out.mkdir()
    if content != "nothing":
        (out / content).mkdir()
    (tmp_path / "text").write_text(SENTENCE * 400)
    shown = str(out).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(
        f"36 35 98:0 / / rw shared:1 - ext4 /dev/a rw\n37 36 0:5 / {shown} rw - ext4 b rw\n"
    )
    monkeypatch.setattr(full_folder, "MOUNTS", tmp_path / "mounts")
    common = (model, "--mode", "full", "--text", tmp_path / "text", "--steps", 1)
    status, output = run_command(*common, "--out", out)
    assert status == 1
    assert f"{out} is the root of a volume, which cannot be replaced: give a folder in it" in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "my volume.work").exists()
    status, output = run_command(*common, "--out", out / "model")
    assert status == 0, output


@pytest.mark.parametrize("listed", [True, False])
def test_the_root_of_a_file_system_that_is_not_mounted_can_be_replaced(tmp_path, monkeypatch, listed):
    """As of a btrfs subvolume, for which `ismount` is true."""
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    monkeypatch.setattr(full_folder, "MOUNTS", tmp_path / "mounts")
    if listed:
        (tmp_path / "mounts").write_text("36 35 98:0 / / rw shared:1 - btrfs /dev/a rw\n")
    with nullcontext() if listed else pytest.raises(ConfigError, match="is the root of a volume"):
        check_replaceable(tmp_path / "new", [])


def test_the_root_of_all_folders_is_refused_in_one_line(tmp_path):
    status, output = run_command(tiny_checkpoint(tmp_path / "model"), "--mode", "full", "--out", "/")
    assert (status, len(output.splitlines())) == (1, 1)
    assert "/ is the root of a volume" in output


@pytest.mark.parametrize("name", ["out.part", "out.replaced"])
def test_a_folder_that_only_has_the_name_of_ours_is_left_alone(tmp_path, name):
    (tmp_path / name).mkdir()
    check_replaceable(tmp_path / "out", [])  # there is nothing to lose
    (tmp_path / name / "mine.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=f"{name} holds no full weights that were made here"):
        check_replaceable(tmp_path / "out", [])


def test_what_a_kill_leaves_of_a_removal_is_known_for_ours(tmp_path, monkeypatch):
    aside = full_weights(tmp_path / "out.replaced")
    (aside / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        remove(aside)
    assert [path.name for path in aside.iterdir()] == [CONTRACT_FILE]
    check_replaceable(tmp_path / "out", [])


def test_the_new_folder_is_on_the_disk_before_the_one_before_is_moved(tmp_path, monkeypatch):
    out = full_weights(tmp_path / "out", 2.0)
    part = full_weights(part_of(out), 3.0)
    (part / "model.safetensors").write_bytes(b"weights")
    files = {path.stat().st_ino for path in part.iterdir()}
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        replace_folder(out)
    assert flushed == files


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_kill_while_the_folder_is_replaced_loses_neither_model(tmp_path, monkeypatch, moves):
    out = full_weights(tmp_path / "out", 2.0)
    full_weights(part_of(out), 3.0)
    replace, left = os.replace, iter(range(moves))

    def killed(*paths) -> None:
        if next(left, None) is None:
            raise Killed
        replace(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        if moves < 2:
            with pytest.raises(Killed):
                replace_folder(out)
        else:
            replace_folder(out)
    check_replaceable(out, [])
    take_back(out)
    assert kept_tokens_per_step(out) == (3.0 if moves == 2 else 2.0)
    assert kept_tokens_per_step(tmp_path / "out.replaced") == 0.0
