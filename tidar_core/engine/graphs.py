"""Steps as CUDA graphs: sizes come in buckets, each is captured and replayed over static buffers.

A step of a small model is hundreds of launches of a few microseconds each, more than a processor can launch in that
time. A graph is one launch for all of them, of fixed tensors and fixed sizes; so a batch is padded up to the next of a
few sizes with rows that see and write the trash page alone, and its numbers are copied into the graph's own. What a
graph gives is what the same work gives without one; where a size cannot be captured it runs without.

All buckets of texts that are not very long are captured before the engine serves (`warmup.capture_graphs`): drafts make
steps of many sizes, and amid traffic each that is new would hold up every answer. A bucket of longer texts is captured
once it is common: capturing takes longer than a few steps without a graph.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tidar_core.engine.batch import BatchSize
from tidar_core.error_text import first_line

VERIFY_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # a chunk of a prompt too
MASK_ROWS = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NARROWEST = 512  # pages of a page table; wider ones double from bucket to bucket
CAPTURE_AT = 3  # comings of a size while requests are served; of very long texts' many sizes most never come so often
AGAIN_AFTER = 1000  # further comings of a size for which there was no memory: there may be some then
REMEMBERED = 256  # sizes that came less often, the latest
WARM_UP = 2  # runs before a capture: kernels are compiled and buffers made
LEFT_FREE = 512 << 20  # bytes of the GPU's memory that steps without a graph want, scores apart

log = logging.getLogger("tidar")

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Records some work; gives what repeats it, and the tensor that holds its result then."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The most sequences of a step and pages of a sequence; before an engine serves there may be more."""

    sequences: int
    pages: int


def bucket(size: BatchSize, reach: Reach) -> BatchSize | None:
    """The size that a batch is padded up to; None for one that is too large for a graph: it is bound by arithmetic, and
    launching does not matter."""
    if size.verify > VERIFY_ROWS[-1] or size.mask > MASK_ROWS[-1]:
        return None
    verify, mask = VERIFY_ROWS[bisect_left(VERIFY_ROWS, size.verify)], MASK_ROWS[bisect_left(MASK_ROWS, size.mask)]
    table, pages = 1 + min(verify, reach.sequences), min(NARROWEST, reach.pages)
    while pages < size.pages:
        pages *= 2
    if size.pages <= reach.pages:
        pages = min(pages, reach.pages)
    return BatchSize(verify, mask, 1 + verify if size.sequences > table else table, pages)


def narrow_buckets(reach: Reach, block_length: int) -> list[BatchSize]:
    """The buckets of all steps whose texts the narrowest page table holds, from few verify rows to many."""
    found = []
    decoding = block_length * reach.sequences  # rows of a step that reads no prompt
    beside_prompt = decoding - block_length + 1
    for fewer, verify in pairwise((0, *VERIFY_ROWS)):
        proposals = min(verify, decoding if fewer < decoding else beside_prompt)  # one for each draft row at most
        masks = MASK_ROWS[: bisect_left(MASK_ROWS, block_length * proposals) + 1]
        found += [bucket(BatchSize(verify, mask, 1, 1), reach) for mask in masks]
    return [size for size in found if size is not None]


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: tuple[Tensor, ...]
    replay: Replay
    result: Tensor


class Graphs:
    """CUDA graphs by key. A key is captured the `capture_at`-th time it is run; until then the work runs directly.

    The next run of any key may overwrite a result: use it before then. Its memory stays with the graph. untypical: how
    many runs took longer than later runs of the same key will, because the key was not captured yet or just then.
    """

    def __init__(self, capture: Capture, reach: Reach, capture_at: int = CAPTURE_AT):
        self.reach = reach
        self.untypical = 0
        self._capture = capture
        self._capture_at = capture_at
        self._captured: dict[Hashable, _Captured | None] = {}
        self._came: dict[Hashable, int] = {}  # the latest last; below 0 where there was no memory
        self._insists = False

    def __len__(self) -> int:
        """How many keys were tried, captured or not."""
        return len(self._captured)

    def run(self, key: Hashable, device: torch.device, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Runs `work` over copies of the inputs on `device`. A key stands for one piece of work at fixed input
        sizes."""
        if key not in self._captured:
            self.untypical += self._came.get(key, 0) >= 0
            if self._is_common(key):
                try:
                    self._captured[key] = self._recorded(device, work, inputs)
                except RuntimeError as error:  # no memory for it, or something in the work that cannot be captured
                    if self._insists:
                        raise
                    if isinstance(error, torch.OutOfMemoryError):
                        self._came[key] = -AGAIN_AFTER
                    else:
                        self._captured[key] = None
                    log.warning("a step runs without a CUDA graph: %s", first_line(error))
        captured = self._captured.get(key)
        if captured is None:
            return work(*(each.to(device, non_blocking=True) for each in inputs))
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        captured.replay()
        return captured.result

    def prepare(self, key: Hashable, device: torch.device, work: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Captures a key before it is run. Raises RuntimeError where that fails, torch.OutOfMemoryError where there is
        no memory for it; the key then counts as never seen."""
        if key not in self._captured:
            self._captured[key] = self._recorded(device, work, inputs)

    def at_once(self) -> "Graphs":
        """A view of these graphs that captures each new key the first time it is run, and whose `run` raises what
        `prepare` does."""
        graphs = self.fresh()
        graphs._captured, graphs._insists = self._captured, True
        return graphs

    def fresh(self) -> "Graphs":
        """Graphs captured in the same way, each key the first time it is run; none is captured yet."""
        return Graphs(self._capture, self.reach, 1)

    def _is_common(self, key: Hashable) -> bool:
        came = self._came.pop(key, 0) + 1
        if came >= self._capture_at:
            return True
        self._came[key] = came
        if len(self._came) > REMEMBERED:
            del self._came[next(iter(self._came))]
        return False

    def _recorded(self, device: torch.device, work: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Captured:
        static = tuple(each.to(device, copy=True) for each in inputs)
        replay, result = self._capture(lambda: work(*static))
        return _Captured(static, replay, result)


def left_free(rows: int, vocab: int) -> int:
    """Bytes of the GPU's memory to keep free of graphs: estimated, for fp32 scores of about `rows` rows and a copy of
    them."""
    return LEFT_FREE + 2 * rows * vocab * torch.float32.itemsize


def results_bytes(sizes: list[BatchSize], hidden_size: int, itemsize: int) -> int:
    """Bytes that captured steps of these sizes hold for good, each its hidden states; all else they share."""
    return sum(size.verify + size.mask for size in sizes) * hidden_size * itemsize


def cuda_capture(device: torch.device, left: int) -> Capture:
    """Captures CUDA graphs that share one pool of memory, since they never run side by side. The capture raises
    torch.OutOfMemoryError where fewer than `left` bytes are free, and RuntimeError where CUDA refuses. After a refusal
    every later capture raises it too: torch 2.11, by its source, goes on to treat the pool as one that is being
    captured into."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    refused: list[tuple[torch.cuda.CUDAGraph, str]] = []  # the graph is held: the allocator points into it

    def capture(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if refused:
            raise RuntimeError(f"an earlier capture failed: {refused[0][1]}")
        free, _ = torch.cuda.mem_get_info(device)
        if free < left:  # what torch keeps for itself is not counted
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(device)
        if free < left:
            raise torch.OutOfMemoryError(f"only {free >> 20} MiB of the GPU's memory are free")
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    work()
        finally:  # what was launched before it failed may still run, and shares memory with what comes instead
            torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The stream as it was, also where a capture that failed leaves another one behind.
            with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph, pool=pool):
                result = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the end of a capture that fails hides what it failed of
            refused.append((graph, str(error.__context__ or error)))
            raise RuntimeError(refused[0][1]) from error
        return graph.replay, result

    return capture
