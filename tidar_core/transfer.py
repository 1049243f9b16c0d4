"""Numbers on their way from the host to where the model computes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's values on `device`.

    On a GPU the copy takes its turn behind what runs there while the host goes on: from ordinary memory, a copy would
    begin by waiting for all of that.
    """
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(made: Tensor, device: torch.device) -> Tensor:
    """`on_device` of a tensor in the host's memory."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
