"""What of `--minutes` the gathering of a conversion has taken, and what that leaves for its training."""

from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tidar_core.convert.checkpoint import has_checkpoint
from tidar_core.convert.files import cannot_write, keep_file
from tidar_core.convert.options import ConvertOptions

SPENT_FILE = "gathering.json"
LEAST_TRAINING = 0.1  # of the time, however long gathering took


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[1] = 1
    seconds: float


class Spent:
    """The seconds of gathering that a conversion has to answer for, those of its earlier runs included.

    Its own data directory has them in its shards. One that others gather into has theirs as well (`--data`): then they
    are kept beside the checkpoints, in `SPENT_FILE`; checkpoints without that file are of a version that counted all
    that the data directory has. in_store: the seconds that it has.
    """

    def __init__(self, options: ConvertOptions, in_store: float):
        own = options.shards.resolve() == (options.work / "data").resolve()
        self._file = None if own else options.work / SPENT_FILE
        self.seconds = in_store if self._file is None else 0.0
        if self._file is not None:
            own_before = (options.work / "data").exists()  # which is in no such file
            if not self._file.exists() and not own_before and has_checkpoint(options.work / "training"):
                self.seconds = in_store
            with suppress(OSError, ValidationError):  # there was no earlier run, or nothing can be known of it
                self.seconds = _File.model_validate_json(self._file.read_bytes()).seconds

    def add(self, seconds: float) -> None:
        """So many more, which are in the data directory already. Raises ConfigError where it cannot be written."""
        self.seconds += seconds
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)  # where `out` is a link the lock lies elsewhere
            except OSError as error:
                raise cannot_write(self._file, error) from None
            keep_file(self._file, _File(seconds=self.seconds).model_dump_json().encode())


def most_gathering(options: ConvertOptions) -> float:
    """Seconds of gathering that leave the least time for training."""
    return (1 - LEAST_TRAINING) * 60 * options.minutes


def left_for_training(options: ConvertOptions, spent: float) -> float:
    """Seconds that are for training after `spent` seconds of gathering; a share of the time in any case."""
    return max(60 * options.minutes - spent, LEAST_TRAINING * 60 * options.minutes)
