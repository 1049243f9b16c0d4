"""Who trains a drafter: one process, or several that take every step together (`cluster.training`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Crew:
    """Workers that hold the same drafter, each with a part of a step's blocks; alone where nothing else is said.

    rank: which of `size` this worker is; the first writes what is written. add_up: puts into fp32 tensors their sums
    over all workers, to the bit the same on each. agree: a number as the first worker has it. Both are called by all
    workers in the same order.
    """

    rank: int = 0
    size: int = 1
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None
    agree: Callable[[float], float] = lambda number: number

    def agree_digest(self, mine: str) -> str:
        """Twelve hex digits (`shards.digest_of`) as the first worker has them."""
        return f"{int(self.agree(int(mine, 16))):012x}"  # exact: a double holds their 48 bits

    @property
    def leads(self) -> bool:
        """Whether this worker writes what is written."""
        return self.rank == 0

    def part(self, count: int) -> tuple[int, int]:
        """Where this worker's part of `count` things begins and ends."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size


ALONE = Crew()
