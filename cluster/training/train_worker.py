"""What one worker of `train` does, in a process that Ray Train has started and joined to a torch group."""

import os
import pickle
import socket
from collections.abc import Callable, Sequence
from operator import methodcaller

import torch
import torch.distributed as dist
from ray.util.queue import Queue
from torch import Tensor

from tidar_core.config import ConfigError
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.crew import Crew
from tidar_core.convert.held_out import HeldOutResult
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.own_words import GatherProgress, Goal
from tidar_core.convert.run import train_gathered
from tidar_core.convert.trainer import StepReport


def work(options: ConvertOptions, spent: float, queue: Queue) -> Progress:
    """`train_gathered` as one of the crew; `queue` gets, pickled, calls for the user's screen and what ends the run.

    Raises ConfigError for what the user can mend.
    """
    crew = crew_of_this_process()

    def tell(news: object) -> None:
        queue.put(pickle.dumps(news))  # as bytes, or the queue's process would import all that is in it

    try:
        check_seen(options)
        return train_gathered(options, spent, Relay(tell if crew.leads else lambda news: None), crew)
    except ConfigError as error:
        tell(error)  # to start again would not help: whoever listens ends the run
        raise


def check_seen(options: ConvertOptions) -> None:
    """Raise ConfigError where this node does not have a path that is there on the one that gathered: it would be told
    as if it were nowhere."""
    for path in (options.model, options.start, options.shards, options.work):
        if os.path.isabs(path) and not os.path.exists(path):
            raise ConfigError(
                f"{path} is not there on {socket.gethostname()}, where one of the workers is: put it where every node "
                "sees it"
            )


def crew_of_this_process() -> Crew:
    """The crew of the torch process group that this process has joined; tensors lie on its current device."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def add_up(tensors: Sequence[Tensor]) -> None:
        together = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(together)
        for tensor, total in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def agree(number: float) -> float:
        agreed = torch.tensor(number, dtype=torch.float64, device=device)
        dist.broadcast(agreed, src=0)
        return float(agreed)

    return Crew(dist.get_rank(), dist.get_world_size(), add_up, agree)


class Relay:
    """A `Screen` that is elsewhere: what it is told goes out as calls to be made there."""

    def __init__(self, tell: Callable[[object], None]):
        self._tell = tell

    def line(self, text: str) -> None:
        self._tell(methodcaller("line", text))

    def loading(self, done: int, total: int) -> None:
        self._tell(methodcaller("loading", done, total))

    def gathered(self, gathered: GatherProgress, goal: Goal) -> None:
        self._tell(methodcaller("gathered", gathered, goal))

    def trained(self, report: StepReport, used: float, fraction: float | None) -> None:
        self._tell(methodcaller("trained", report, used, fraction))

    def measured(self, result: HeldOutResult, progress: Progress, best: bool) -> None:
        self._tell(methodcaller("measured", result, progress, best))
