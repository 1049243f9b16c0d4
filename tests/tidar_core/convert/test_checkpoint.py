"""Checkpoints of a training: only torn ones are removed, other versions' are read, nothing piles up."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidar_core.config import ConfigError
from tidar_core.convert.checkpoint import Progress, load_checkpoint, save_checkpoint

TENSORS = {"parameter/a": torch.arange(64.0)}


def save_at(directory: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(directory, {"block": 4}, Progress(step=step, best=2.0), TENSORS)


def rewrite(path: Path, about: str) -> None:
    save_file(TENSORS, path, metadata={"about": about})


def test_a_checkpoint_that_the_disk_does_not_give_is_kept(tmp_path):
    save_at(tmp_path, 1)
    (tmp_path / "step-00000002.safetensors").mkdir()  # it can be opened and not be read
    with pytest.raises(ConfigError, match=r"step-00000002.* cannot be read .*nothing was removed") as raised:
        load_checkpoint(tmp_path, {"block": 4})
    assert "\n" not in str(raised.value)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("harm", ["cut", "empty", "about"])
def test_a_torn_checkpoint_is_removed(tmp_path, harm):
    save_at(tmp_path, 1, 2)
    last = tmp_path / "step-00000002.safetensors"
    if harm == "about":
        rewrite(last, '{"settings": {"blo')
    else:
        last.write_bytes(last.read_bytes()[:-9] if harm == "cut" else b"")
    progress, tensors, notes = load_checkpoint(tmp_path, {"block": 4})
    assert progress.step == 1
    assert torch.equal(tensors["parameter/a"], TENSORS["parameter/a"])
    assert notes == ["step-00000002.safetensors cannot be read: going on from the one before"]
    assert not last.exists()


def test_a_checkpoint_of_another_version_is_read(tmp_path):
    """Where it names all that must not differ: it may name and count more."""
    about = {"settings": {"block": 4, "base": "a", "suns": 2}, "progress": {"step": 7, "moons": 3}}
    rewrite(tmp_path / "step-00000007.safetensors", json.dumps(about))
    progress, _, notes = load_checkpoint(tmp_path, {"block": 4, "base": "a"})
    assert progress == Progress(step=7)
    assert notes == []
    for settings, message in (({"base": "b"}, "with base a, not b"), ({"slot_head": 0}, "with slot head None, not 0")):
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(tmp_path, {"block": 4} | settings)


@pytest.mark.parametrize("about", ["{}", "[]", '{"settings": {}}'])
def test_what_is_no_checkpoint_is_said_and_kept(tmp_path, about):
    path = tmp_path / "step-00000007.safetensors"
    rewrite(path, about)
    with pytest.raises(ConfigError, match="is no checkpoint that this version can read"):
        load_checkpoint(tmp_path, {"block": 4})
    assert path.exists()


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path):
    save_at(tmp_path, 1)
    copy = tmp_path / "step-00000001 (copy).safetensors"
    copy.write_bytes(b"kept")
    save_at(tmp_path, 2, 3)
    assert copy.read_bytes() == b"kept"
    assert load_checkpoint(tmp_path, {"block": 4})[0].step == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_what_a_killed_write_left_is_removed(tmp_path):
    tmp_path.joinpath("step-00000003.safetensors.part").write_bytes(b"half")
    save_at(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.safetensors"]
