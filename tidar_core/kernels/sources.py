"""The code that decides a row's bits and its token, by a name: other code may give others."""

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

ROOMS = ("kernels", "sampling")
RULE = ("engine/constraint.py", "engine/thought_watch.py")
ORDER = ("model/decoder.py", "model/rope.py", "model/float8.py", "data/gemm_tiles.json")
"""What counts: all of the kernels and of how a token is picked, with what has a say in that elsewhere; in what order,
and of what, rows are computed."""
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def code_digest() -> str:
    """Names the sources of ROOMS, RULE and ORDER by 12 characters. Comments, docstrings and white space do not
    count. Raises OSError where a package has no sources."""
    return digest_of(_sources())


def digest_of(files: Iterator[Traversable]) -> str:
    """What `code_digest` says of these files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n{_without_words(file.name, file.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Traversable]:
    package = resources.files("tidar_core")
    for room in ROOMS:
        for file in sorted(package.joinpath(room).iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".cpp")):
                yield file
    yield from (package.joinpath(name) for name in (*RULE, *ORDER))


def _without_words(name: str, text: str) -> str:
    if name.endswith(".cpp"):
        return " ".join(_CPP_COMMENT.sub(" ", text).split())
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # docstrings, and those of constants
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
