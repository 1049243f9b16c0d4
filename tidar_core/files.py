"""Files that appear whole or not at all."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_atomically(contents: Mapping[Path, bytes], part: str = "{}.part") -> None:
    """Each file appears whole or not at all, also where the process is killed or the machine stops, and none before all
    are on disk. part: the name under which a file is written first, with its own name for the braces.

    Raises OSError, and then leaves no part behind.
    """
    parts = {path: path.with_name(part.format(path.name)) for path in contents}
    try:
        for path, content in contents.items():
            parts[path].write_bytes(content)
        for written in parts.values():
            with open(written, "rb") as file:
                os.fsync(file.fileno())
        for path, written in parts.items():
            os.replace(written, path)
    except OSError:  # a full disk needs the room
        for written in parts.values():
            with suppress(OSError):  # one of an earlier run, where nothing can be removed
                written.unlink(missing_ok=True)
        raise
