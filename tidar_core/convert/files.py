"""What a conversion keeps in files, and what to tell the user where one cannot be written."""

import errno
import os
import re
from pathlib import Path

from tidar_core.config import ConfigError
from tidar_core.error_text import first_line
from tidar_core.files import write_atomically

_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


def keep_file(path: Path, content: bytes) -> None:
    """The file appears whole or not at all. Raises ConfigError, `cannot_write`."""
    try:
        write_atomically({path: content})
    except OSError as error:
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
