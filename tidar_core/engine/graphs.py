"""Steps as CUDA graphs: sizes come in buckets, each is captured and replayed over static buffers.

A step of a small model is hundreds of launches of a few microseconds each, more than a processor can launch in that
time. A graph is one launch for all of them, of fixed tensors and fixed sizes; so a batch is padded up to the next of a
few sizes with rows that see and write the trash page alone, and its numbers are copied into the graph's own. What a
graph gives is what the same work gives without one; where a size cannot be captured it runs without.

All buckets of texts that are not long are captured before the engine serves (`warmup.capture_graphs`): drafts make
steps of many sizes, and amid traffic each that is new would hold up every answer. A bucket of longer texts is captured
once it is common: capturing takes longer than a few steps without a graph.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidar_core.engine.batch import BatchSize

VERIFY_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # a chunk of a prompt too
MASK_ROWS = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_PAGES, WIDER = 64, 4  # of the page table's width, and how many times as wide the next is
CAPTURE_AT = 3  # comings of a size while requests are served; of long texts' many sizes most never come so often
REMEMBERED = 256  # sizes that came less often, the latest
WARM_UP = 2  # runs before a capture: kernels are compiled and buffers made

log = logging.getLogger("tidar")

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Records some work; gives what repeats it, and the tensor that holds its result then."""


def bucket(size: BatchSize, sequences: int) -> BatchSize | None:
    """The size that a batch is padded up to where mostly no more than `sequences` run; None for one that is too large
    for a graph: it is bound by arithmetic, and launching does not matter."""
    if size.verify > VERIFY_ROWS[-1] or size.mask > MASK_ROWS[-1]:
        return None
    verify, mask = VERIFY_ROWS[bisect_left(VERIFY_ROWS, size.verify)], MASK_ROWS[bisect_left(MASK_ROWS, size.mask)]
    table, pages = 1 + min(verify, sequences), LEAST_PAGES
    while pages < size.pages:
        pages *= WIDER
    return BatchSize(verify, mask, 1 + verify if size.sequences > table else table, pages)


def short_buckets(sequences: int, block_length: int) -> list[BatchSize]:
    """The buckets of all steps of `sequences` at most whose texts the narrowest page table holds, the smallest
    first."""
    found = []
    for verify in VERIFY_ROWS:
        drafting = block_length * min(verify, block_length * sequences)  # each row of a draft may have a proposal
        masks = MASK_ROWS[: bisect_left(MASK_ROWS, drafting) + 1]
        found += [BatchSize(verify, mask, 1 + min(verify, sequences), LEAST_PAGES) for mask in masks]
    return found


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: tuple[Tensor, ...]
    replay: Replay
    result: Tensor


class Graphs:
    """Work that was captured, by key, when the key came for the `capture_at`-th time. A result may be overwritten by
    the next run of any key: use it before. sequences: of a step, mostly. untypical: how many runs took longer than
    further ones of their key will, before its capture or with it."""

    def __init__(self, capture: Capture, sequences: int, capture_at: int = CAPTURE_AT):
        self.sequences = sequences
        self.untypical = 0
        self._capture = capture
        self._capture_at = capture_at
        self._captured: dict[Hashable, _Captured | None] = {}
        self._came: dict[Hashable, int] = {}  # the latest last

    def __len__(self) -> int:
        """How many keys were tried, captured or not."""
        return len(self._captured)

    def run(self, key: Hashable, device: torch.device, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`work` over copies of the inputs on `device`. A key stands for one piece of work and sizes of its inputs."""
        if key not in self._captured:
            self.untypical += 1
            if self._is_common(key):
                self._captured[key] = self._record(device, work, inputs)
        captured = self._captured.get(key)
        if captured is None:
            return work(*(each.to(device, non_blocking=True) for each in inputs))
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        captured.replay()
        return captured.result

    def at_once(self) -> "Graphs":
        """These graphs, where each further key is captured when it first comes."""
        graphs = self.fresh()
        graphs._captured = self._captured
        return graphs

    def fresh(self) -> "Graphs":
        """The same way of capturing, each key when it first comes, and nothing captured yet."""
        return Graphs(self._capture, self.sequences, 1)

    def _is_common(self, key: Hashable) -> bool:
        came = self._came.pop(key, 0) + 1
        if came >= self._capture_at:
            return True
        self._came[key] = came
        if len(self._came) > REMEMBERED:
            del self._came[next(iter(self._came))]
        return False

    def _record(
        self, device: torch.device, work: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> _Captured | None:
        try:
            static = tuple(each.to(device, copy=True) for each in inputs)
            replay, result = self._capture(lambda: work(*static))
        except RuntimeError as error:  # no memory for it, or something in the work that cannot be captured
            log.warning("a step runs without a CUDA graph: %s", str(error).partition("\n")[0])
            return None
        return _Captured(static, replay, result)


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one pool of memory, since they never run side by side."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    work()
        finally:  # what was launched before it failed may still run, and shares memory with what comes instead
            torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The stream as it was, also where a capture that failed leaves another one behind.
        with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph, pool=pool):
            result = work()
        return graph.replay, result

    return capture
