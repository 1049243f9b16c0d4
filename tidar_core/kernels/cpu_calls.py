"""How functions of the compiled library are called: their names, and what they take for an argument of ours."""

import ctypes
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tidar_core.config import Activation

Suffix = Literal["bf16", "float"]
SUFFIXES: dict[torch.dtype, Suffix] = {torch.bfloat16: "bf16", torch.float32: "float"}  # of a function's name
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}  # as `cpu_kernels.cpp` counts them


def bound(library: ctypes.CDLL, name: str, *types: type) -> Callable[..., None]:
    """A function of the compiled library that takes these types and gives nothing."""
    found: Callable[..., None] = getattr(library, name)
    found.argtypes, found.restype = types, None  # type: ignore[attr-defined]
    return found


def address(tensor: Tensor | None) -> int | None:
    """The address that the library is given; None where there is no tensor."""
    return None if tensor is None else tensor.data_ptr()
