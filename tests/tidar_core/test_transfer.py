"""Memory that is not there: a line with what to do about it."""

import pytest
import torch

from tidar_core.config import ConfigError
from tidar_core.transfer import enough_memory


def test_memory_that_the_system_refuses_is_a_line() -> None:
    """As under `ulimit -v`."""
    told = r"may have is full \(see `ulimit -v`\): take a smaller model$"
    with pytest.raises(ConfigError, match=told), enough_memory("take a smaller model"):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "this process may have is full"),
        (torch.OutOfMemoryError("CUDA out of memory"), "the GPU's memory is full: take"),
    ],
)
def test_whose_memory_is_full_is_told(error: Exception, told: str) -> None:
    with pytest.raises(ConfigError, match=told), enough_memory("take a smaller model"):
        raise error


def test_what_has_nothing_to_do_with_memory_passes() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("take a smaller model"):
        raise RuntimeError("shapes cannot be multiplied")
