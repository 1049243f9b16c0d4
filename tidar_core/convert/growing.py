"""Conversations on their way, on disk beside the shards: a run that is killed loses what the last minute brought.

A conversation follows from its job and from what the model answered, so that this is all that is kept. A slow machine
needs minutes for the first whole document, and would begin anew each time.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidar_core.convert.conversations import Conversation, Wish
from tidar_core.convert.files import keep_file
from tidar_core.convert.sources import Completion

GROWING_FILE = "growing.json"


class Growing(BaseModel):
    """One conversation. number: its job's, -1 for the user's `prompt`. heard: the completions of its wishes. so_far:
    what the wish on its way has brought."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    number: int
    prompt: str
    heard: tuple[Completion, ...]
    so_far: tuple[int, ...] = Field(alias="said")  # the file's name for it

    @property
    def job(self) -> int | str:
        """Which job it is: the prompt, or the number of a planned one."""
        return self.prompt if self.number < 0 else self.number


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[2] = 2  # in the first, answers were asked for in other words
    conversations: tuple[Growing, ...]


def growing_of(conversation: Conversation, so_far: tuple[int, ...]) -> Growing:
    """What to keep of a conversation whose wish has brought `so_far`."""
    job = conversation.job
    prompt = job.opening if job.kind == "prompt" else ""
    return Growing(number=job.number, prompt=prompt, heard=tuple(conversation.heard), said=so_far)


def take_up(conversation: Conversation, kept: Growing | None) -> tuple[Wish | None, tuple[int, ...]]:
    """Leads a new conversation to where `kept` was; gives its next wish, and what that has brought already."""
    wish, so_far = conversation.start(), kept.so_far if kept else ()
    for completion in kept.heard if kept else ():
        if wish is not None:
            wish = conversation.advance(completion)
    # It does not fit where the answers of this run are to be shorter than those of the last one.
    fits = wish is not None and len(so_far) < wish.params.max_tokens
    return wish, so_far if fits else ()


def write_growing(directory: Path, conversations: Iterable[Growing]) -> None:
    """Replaces what is kept in a data directory. Raises ConfigError on a full disk."""
    content = _File(conversations=tuple(conversations)).model_dump_json(by_alias=True)
    keep_file(directory / GROWING_FILE, content.encode())


def read_growing(directory: Path) -> list[Growing]:
    """What is kept in a data directory; nothing where it cannot be read, since their jobs can begin anew."""
    try:
        return list(_File.model_validate_json((directory / GROWING_FILE).read_bytes()).conversations)
    except (OSError, ValidationError):
        return []
