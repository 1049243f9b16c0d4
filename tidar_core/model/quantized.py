"""A matrix of a quantized checkpoint: the tensors that it is stored as, and plain numbers of them a few rows at a time.

What every layout is made of; the layouts themselves are in quantized_layouts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from tidar_core.config import ConfigError

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_CHUNK_WEIGHTS = 1 << 20

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The tensors that a file has for one linear layer. where: the file and the layer, for errors; find: a tensor by
    the rest of its name, None where there is none."""

    where: str
    find: Callable[[str], Tensor | None]

    def tensor(self, part: str, *dtypes: torch.dtype, dims: int = 2) -> Tensor:
        """The tensor `part` of one of `dtypes`. Raises ConfigError where it is not there or is another."""
        found = self._needed(part)
        if found.dtype not in dtypes:
            raise self.error(f"{part} is stored as {_named(found.dtype)}, not as {' or '.join(map(_named, dtypes))}")
        if found.dim() != dims:
            raise self.error(f"{part} is {list(found.shape)}, not of {dims} dimensions")
        return found

    def scale(self, part: str) -> Tensor:
        """The tensor `part` as fp32, a vector as a column. Raises ConfigError where it is not there or no float."""
        found = self._needed(part)
        if not found.dtype.is_floating_point:
            raise self.error(f"{part} is stored as {_named(found.dtype)}, not as floating point")
        return as_column(found.float())

    def require(self, part: str, found: Tensor, *expected: int) -> None:
        """Raises ConfigError where the shape of `part` is not as `expected`."""
        if tuple(found.shape) != expected:
            raise self.error(f"{part} is {list(found.shape)}, but {list(expected)} was expected")

    def error(self, what: str) -> ConfigError:
        """The error `what`, with the file and the layer in front."""
        return ConfigError(f"{self.where}: {what}")

    def _needed(self, part: str) -> Tensor:
        found = self.find(part)
        if found is None:
            raise ConfigError(f"{self.where} lacks its {part}: the checkpoint is incomplete")
        return found


def as_column(numbers: Tensor) -> Tensor:
    """A single number or a vector as [numbers, 1]."""
    return numbers.reshape(-1, 1) if numbers.dim() < 2 else numbers


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix of `shape` [rows, columns]. rows(start, stop): that part of it, fp32 [stop - start, columns]."""

    shape: tuple[int, int]
    rows: Callable[[int, int], Tensor]

    def copy_into(self, out: Tensor) -> None:
        """Dequantize into `out` (its shape, any float dtype and device), so that never all of it stands in fp32."""
        chunk = max(1, _CHUNK_WEIGHTS // self.shape[1])
        for start in range(0, self.shape[0], chunk):
            stop = min(start + chunk, self.shape[0])
            out[start:stop].copy_(self.rows(start, stop))


@dataclass(frozen=True, slots=True)
class Shared:
    """Numbers that parts of a matrix share. numbers: [blocks of rows, blocks of columns]; block: rows and columns of
    one; order: the block of each column, [columns], where they do not lie side by side."""

    numbers: Tensor
    block: Block
    order: Tensor | None = None

    def rows(self, start: int, stop: int, columns: int) -> Tensor:
        """fp32, [stop - start, columns], or [stop - start, 1] where whole rows share."""
        numbers = self.numbers[torch.arange(start, stop) // self.block[0]].float()
        if self.order is not None:
            return numbers[:, self.order]
        if numbers.shape[1] == 1:
            return numbers
        return numbers[:, :, None].expand(-1, -1, self.block[1]).flatten(1)[:, :columns]


def shared(
    linear: StoredLinear, part: str, numbers: Tensor, shape: tuple[int, int], blocks: tuple[Block, ...]
) -> Shared:
    """`numbers`, by their shape those of the whole matrix, of its rows or of one of `blocks`. Raises ConfigError, also
    where several of these fit that share in different ways."""
    numbers = as_column(numbers)
    within = ((min(block[0], shape[0]), min(block[1], shape[1])) for block in (shape, (1, shape[1]), *blocks))
    fitting = {
        block for block in within if tuple(numbers.shape) == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    }
    if len(fitting) == 1:
        return Shared(numbers, fitting.pop())
    if fitting:
        each = " and ".join(f"{rows}x{columns}" for rows, columns in sorted(fitting))
        raise linear.error(f"{part} is {list(numbers.shape)}, which fits blocks of {each} in a matrix of {list(shape)}")
    raise linear.error(f"{part} is {list(numbers.shape)}, which fits no block of a matrix of {list(shape)}")


def column_order(linear: StoredLinear, part: str, columns: int, groups: int) -> Tensor | None:
    """The group of each column, [columns]; None where the file does not say it or leaves it open (-1).

    Raises ConfigError."""
    if linear.find(part) is None:
        return None
    order = linear.tensor(part, torch.int32, torch.int64, dims=1)
    linear.require(part, order, columns)
    if int(order.min()) < 0:
        return None
    if int(order.max()) >= groups:
        raise linear.error(f"{part} names group {int(order.max())} of {groups}")
    return order.long()


def affine(
    shape: tuple[int, int], values: Callable[[int, int], Tensor], scale: Shared, zero: Shared | None = None
) -> QuantizedMatrix:
    """(values - zero) * scale. values(start, stop): [stop - start, columns] of any dtype."""

    def rows(start: int, stop: int) -> Tensor:
        found = values(start, stop).float()
        if zero is not None:
            found = found - zero.rows(start, stop, shape[1])
        return found * scale.rows(start, stop, shape[1])

    return QuantizedMatrix(shape, rows)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers in each row of int32 words, `bits` bits each, from the lowest bit on and over the ends
    of words: [rows, words] to int32 [rows, count]."""
    period = bits // gcd(bits, 32)  # words until a number begins with a word again
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % period)).unflatten(1, (-1, period))
    numbers = []
    for bit in range(0, 32 * period, bits):
        word, shift = divmod(bit, 32)
        number = padded[:, :, word] >> shift
        if shift + bits > 32:
            number = number & ((1 << (32 - shift)) - 1) | padded[:, :, word + 1] << (32 - shift)
        numbers.append(number & ((1 << bits) - 1))
    return torch.stack(numbers, dim=-1).flatten(1)[:, :count]


def words_for(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` numbers of `bits` bits each."""
    return -(-count * bits // 32)


def bits_of(linear: StoredLinear, part: str, words: int, count: int, possible: tuple[int, ...]) -> int:
    """How many bits each of `count` numbers has if together they fill `words` words. Raises ConfigError."""
    for bits in possible:
        if 1 <= bits <= 8 and words_for(count, bits) == words:
            return bits
    sizes = " or ".join(map(str, possible))
    raise linear.error(f"{part} has {words} words for {count} numbers, which are not {sizes} bits each")
