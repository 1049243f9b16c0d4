"""The user's own files, read: text to learn from, and prompts to answer. UTF-8, with a mark in front or without."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tidar_core.config import ConfigError

TEXT_PIECE = 1 << 16  # characters tokenized at once
LONGEST_PROMPT = 1 << 16  # characters; far more than any document has room for, and slow to tokenize


def read_text(path: Path) -> Iterator[str]:
    """The text of a file in pieces of whole lines; a line that is longer than a piece is cut at a space, if it has one.
    Raises ConfigError, in one line, where the file is no text, and where it changes while it is read."""
    piece = ""
    with _opened("text", path) as file:
        while line := file.readline(TEXT_PIECE):
            if "\0" in line:
                raise _not_text("text", path, "it holds NUL characters")
            piece += line
            if len(piece) > TEXT_PIECE:
                space = piece.rfind(" ", len(piece) - TEXT_PIECE)  # no earlier: what is left must not grow
                cut = len(piece) if space < 0 or piece.endswith("\n") else space
                yield piece[:cut]
                piece = piece[cut:]
    if piece:
        yield piece


def check_text(path: Path) -> None:
    """Raises ConfigError where `read_text` would, also at its end."""
    for _ in read_text(path):
        pass


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: plain text, or JSON with a "prompt". Raises ConfigError, in one line of text; where a line of
    the file is at fault, it names that line."""
    with _opened("prompts", path) as file:
        read = [_prompt(path, number, line) for number, line in enumerate(file, 1)]
    prompts = [prompt for prompt in read if prompt]
    if not prompts:
        raise ConfigError(f'{path} holds no prompts: one a line, plain or as JSON with a "prompt"')
    return prompts


def _prompt(path: Path, number: int, line: str) -> str:
    """The prompt of one line, empty where there is none."""
    if "\0" in line:
        raise _not_text("prompts", path, f"line {number} holds NUL characters")
    prompt = line.strip()
    if prompt.startswith("{"):
        try:
            prompt = json.loads(prompt)["prompt"].strip()
            prompt.encode()  # half a surrogate pair is no text
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ConfigError(f'{path}, line {number}: no JSON object with a string "prompt"') from None
    if len(prompt) > LONGEST_PROMPT:
        raise ConfigError(
            f"{path}, line {number}: a prompt of {len(prompt):,} characters is too long to be answered: shorten it to "
            f"{LONGEST_PROMPT:,} at most, or leave it out"
        )
    return prompt


@contextmanager
def _opened(what: str, path: Path) -> Iterator[TextIO]:
    """The file, open; problems with it become ConfigErrors that say what to do. what: the option's name."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(  # besides, a pipe may never end
                f"the {what} {path} cannot be read (it is a pipe or a device, and what is read must be there again): "
                f"write what comes out of it to a file, and give that to --{what}"
            )
        with open(path, encoding="utf-8-sig") as file:
            before = os.fstat(file.fileno())
            yield file
            after = os.fstat(file.fileno())
    except UnicodeDecodeError:
        raise _not_text(what, path, "it is not in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read ({error.strerror or error})") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ConfigError(f"the {what} {path} was written to while it was read: start again when it is complete")


def _not_text(what: str, path: Path, why: str) -> ConfigError:
    return ConfigError(f"the {what} {path} cannot be read ({why}): save it as plain text in UTF-8")
