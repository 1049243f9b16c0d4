"""What the scripts of this folder have in common. They run where a client is installed, and our own packages are not.

python use_NAME.py URL MODEL KEY. Their names begin with `use`, since a script called as its client would be imported in
its place. Nor may another file of this folder be called as a package that they import.
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple


class Served(NamedTuple):
    """The server that a script is told of: the address of its API, a model whose template has tools and thoughts, and
    a key."""

    url: str
    model: str
    key: str


SERVED = Served(*sys.argv[1:4])
ASK = "What is the capital of France?"  # which the default model answers in a sentence
# By which an answer of this model begins with thoughts, and says something behind them.
THINK = {"thinking_token_budget": 16, "min_tokens": 40}


def run(package: str, *checks: Callable[[], Any]) -> None:
    """Run one after the other, and print what became of each, on a line of its own whatever a client left before it.
    Exits with the number of those that failed."""
    print(">", package, version(package), flush=True)
    failed = 0
    with asyncio.Runner() as loop:  # one for all: some clients keep connections in it
        for check in checks:
            try:
                found = check()
                if inspect.isawaitable(found):
                    loop.run(found)  # type: ignore[arg-type]
                print(f"\n>   {check.__name__}: ok", flush=True)
            except Exception as error:
                failed += 1
                print(f"\n>   {check.__name__}: FAILED at {places(error)}: {error!r}"[:1500], flush=True)
    sys.exit(failed)


def places(error: Exception) -> str:
    """The lines of the script itself that an error came by."""
    frames = traceback.extract_tb(error.__traceback__)
    return ", ".join(str(frame.lineno) for frame in frames if frame.filename == sys.argv[0])
