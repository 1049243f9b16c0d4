"""Files that appear whole or not at all, and what to tell the user where one cannot be written."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from tidar_core.config import ConfigError
from tidar_core.error_text import first_line

_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all, also where the process is killed. Raises ConfigError on a full disk."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):  # one of an earlier run, where nothing can be removed
            part.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: Exception) -> ConfigError:
    """What to tell the user where a file cannot be written."""
    number = system_error(error)
    full = number in (errno.ENOSPC, errno.EDQUOT)
    reason = os.strerror(number) if number else first_line(error)
    why = "the disk is full: free some space" if full else f"it cannot be written ({reason})"
    return ConfigError(f"{path}: {why}; what was written before is kept, and the same command goes on from there")


def system_error(error: Exception) -> int | None:
    """The system's number of an error, also where a library names it in its message alone; None for any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _ERROR_NUMBER.search(str(error))
    return int(found[1]) if found else None
