"""Fixtures that more than one of this room's modules share. A module may have one of the same name of its own."""

import pytest
import torch

from tests.tidar_core.trained import SIMPLE, TinyBase, own_words_of, tiny_base
from tidar_core.convert.shards import Corpus


@pytest.fixture
def one_thread() -> None:
    """Threads only get in each other's way on small tensors; `threads_as_before` sees to what comes behind."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_base(tmp_path_factory.mktemp("tiny"), **SIMPLE)


@pytest.fixture(scope="module")
def corpus(tiny: TinyBase) -> Corpus:
    return own_words_of(tiny, 160)
