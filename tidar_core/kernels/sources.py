"""The code that decides a row's bits and its token, by a name: other code may give others."""

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

BESIDE = ("sampling.py", "philox.py", "penalties.py", "model/decoder.py", "model/rope.py", "data/gemm_tiles.json")
"""What counts besides the kernels: the token rule, the order of operations, and how products are cut."""
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def code_digest() -> str:
    """Names the sources of the kernels and BESIDE, 12 characters. Comments, docstrings and white space do not count."""
    return digest_of(_sources())


def digest_of(files: Iterator[Traversable]) -> str:
    """What `code_digest` says of these files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n{_without_words(file.name, file.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Traversable]:
    package = resources.files("tidar_core")
    for file in sorted(package.joinpath("kernels").iterdir(), key=lambda file: file.name):
        if file.name.endswith((".py", ".cpp")):
            yield file
    yield from (package.joinpath(name) for name in BESIDE)


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
