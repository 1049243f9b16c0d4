"""What interpreted tests run in: Triton's interpreter as a GPU is where they differ, and without what it does in vain.

For modules that run in a process where TRITON_INTERPRET=1 was set before triton was imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="session")
def nothing_in_vain() -> Iterator[None]:
    """Halves the time of these tests. A function that a kernel calls looks through the whole language each time for
    what it has to replace, which is needed once a module; whole numbers are computed again in 64 bits for a check that
    is made only when debugging; a table of types is built for every look into it; the type and the sizes of a tile are
    made anew for every value, though there are few, and compared number by number."""
    prepared: set[int] = set()

    def call(self: interpreter.InterpretedFunction, *given: Any, **named: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(module)
        return self.rewrite()(*given, **named)

    plain = cache(interpreter._get_np_dtype)

    def numpy_type(kind: tl.dtype) -> np.dtype:
        return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else plain(kind.scalar)

    @cache
    def sizes_of(*shape: int) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(prod(shape))

    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    new_type = tl.block_type.__init__

    def begin_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = vars(self) | {"sizes_of_tensors": sizes_of(*key[1])}
        vars(self).update(types[key])

    of_scalars = sizes_of()

    def begin_tensor(self: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.sizes_of_tensors if kind.is_block() else of_scalars

    broadcast = TritonSemantic.broadcast_impl_value

    def fit(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        patch.setattr(tl.block_type, "__init__", begin_type)
        patch.setattr(tl.tensor, "__init__", begin_tensor)
        patch.setattr(TritonSemantic, "broadcast_impl_value", fit)
        yield


@pytest.fixture
def poisoned_memory():
    """What a kernel does not write is NaN, or the greatest integer: it must not be read, and it must be noticed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dots_row_by_row(monkeypatch):
    """BLAS gives a row other bits in another place of its matrix; a GPU's matrix unit does not."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(np.float32) * b.data[None, k].astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def float8_to_nearest(monkeypatch):
    """The interpreter rounds to float8 in its own way (127 becomes 64); hardware rounds to nearest, ties to even."""
    converted = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if dst_type.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
            return converted(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(src.data.astype(np.float32)).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
