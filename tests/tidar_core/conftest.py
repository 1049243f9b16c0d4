"""Fixtures that more than one of this room's modules share. A module may have one of the same name of its own.

What makes checkpoints is imported where it is asked for: it takes longer than most modules' tests."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.tidar_core.convert.trained import TinyBase
    from tidar_core.convert.shards import Corpus


@pytest.fixture
def one_thread() -> None:
    """Threads only get in each other's way on small tensors; `threads_as_before` sees to what comes behind."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "TinyBase":
    from tests.tidar_core.convert.trained import SIMPLE, tiny_base

    return tiny_base(tmp_path_factory.mktemp("tiny"), **SIMPLE)


@pytest.fixture(scope="module")
def corpus(tiny: "TinyBase") -> "Corpus":
    from tests.tidar_core.convert.trained import own_words_of

    return own_words_of(tiny, 160)


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model that converts, and the data that a run of the command has gathered from it."""
    from tests.tidar_core.convert.trained import BRIEF, SMALL, run_command
    from tests.tiny import tiny_checkpoint

    directory = tmp_path_factory.mktemp("words")
    model, data = tiny_checkpoint(directory / "model", **BRIEF), directory / "data"
    status, output = run_command(model, "--out", directory / "out", "--data", data, "--steps", 1, *SMALL)
    assert status == 0, output
    return model, data


@pytest.fixture
def gathered(words: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The model, and a copy of the data for a test that trains on them."""
    model, data = words
    return model, Path(shutil.copytree(data, tmp_path / "data"))
