"""Experts that a safetensors file has in two tensors a layer, as transformers has them in memory: one of them is a part
of these.

    gate_up_proj  [experts, 2 * inner, hidden], gate above up
    down_proj     [experts, hidden, inner]

Some files (Qwen3-VL's) have each expert's matrices transposed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_ONE_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class InStack:
    """Where a matrix of one expert lies. stack: a file's lazily read tensor; rows: of the matrix as the file would have
    it were it not transposed."""

    stack: Any
    expert: int
    rows: slice
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        whole = self.stack.get_shape()[1:]
        return self.rows.stop - self.rows.start, whole[0] if self.transposed else whole[1]

    def read(self) -> Tensor:
        one = slice(self.expert, self.expert + 1)
        if self.transposed:
            return self.stack[one, :, self.rows][0].T
        return self.stack[one, self.rows, :][0]


def in_stack(files: Mapping[str, Any], name: str) -> InStack | None:
    """Where the files have the matrix that would be called `name` if it lay by itself; None where they do not."""
    found = _ONE_EXPERT.fullmatch(name)
    if found is None:
        return None
    stem, expert, part = found[1], int(found[2]), found[3]
    names = [f"{stem}{stack}_proj" for stack in ("gate_up", "down")]
    if not all(each in files for each in names):
        return None
    gate_up, down = (files[each].get_slice(each) for each in names)
    sizes = [tuple(stack.get_shape()) for stack in (gate_up, down)]
    if any(len(size) != 3 for size in sizes) or expert >= min(size[0] for size in sizes):
        return None
    (_, above, across), (_, outs, ins) = sizes
    transposed = (across, above) == (2 * outs, ins)
    if transposed:
        above, outs, ins = across, ins, outs
    inner = above // 2
    rows = {"gate": slice(0, inner), "up": slice(inner, above), "down": slice(0, outs)}[part]
    return InStack(down if part == "down" else gate_up, expert, rows, transposed)
