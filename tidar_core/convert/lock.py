"""One run at a time in a folder: a lock of the operating system, which is gone with the process, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tidar_core.config import ConfigError


@contextmanager
def alone_in(folder: Path, doing: str, option: str) -> Iterator[None]:
    """While this is open no other run does the same (`doing`, one word) in the folder, which is made where there is
    none. Raises ConfigError where one does, or where the folder cannot be made: `option` is what chooses another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): choose another {option}") from None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(folder / f".{doing}", "ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another tidar convert is {doing} in {folder}: wait until it has ended, or choose another {option}"
            ) from None
        except OSError:
            pass  # the folder may only be read, or its file system has no locks: no run can keep others out there
        yield
