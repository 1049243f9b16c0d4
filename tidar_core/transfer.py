"""Where the model computes, and numbers on their way there from the host."""

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from tidar_core.config import ConfigError, ServedDType


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's values on `device`.

    On a GPU the copy takes its turn behind what runs there while the host goes on: from ordinary memory, a copy would
    begin by waiting for all of that.
    """
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(made: Tensor, device: torch.device) -> Tensor:
    """A tensor in the host's memory as `on_device` brings it to a device."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def arithmetic_dtype(served: ServedDType) -> torch.dtype:
    """What is computed with where weights are kept as `served`: those in fewer bits are widened to bf16."""
    return torch.float32 if served == "float32" else torch.bfloat16


def choose_device(wanted: str) -> torch.device:
    """The device of a user's choice. Raises ConfigError where it is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible here: install a CUDA build of torch, or use --device cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def give_back_memory(device: torch.device) -> None:
    """Lets what this process has freed count as free memory of the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif psutil.LINUX:  # glibc keeps what was freed of matrices under 32 MiB between those that stay
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Raises ConfigError with this advice where the GPU's memory does not hold what is done within, or where the system
    refuses this process more of its own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"the GPU's memory is full: {advice}") from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"can(no|')t allocate memory", str(error), re.I):
            raise
        raise ConfigError(f"the memory that this process may have is full (see `ulimit -v`): {advice}") from None
