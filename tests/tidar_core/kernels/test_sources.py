"""What names the code: other code is another, other words are not."""

from pathlib import Path

import pytest
import torch

from tidar_core.engine.ops_choice import arithmetic_of
from tidar_core.kernels.reference import REFERENCE_OPS
from tidar_core.kernels.sources import _sources, code_digest, digest_of

PYTHON = '''"""A module."""

LIMIT = 4
"""A number."""


def double(x: int) -> int:
    """Twice."""
    return 2 * x  # why
'''
CPP = "/* What\n this is. */\nint twice(int x) { return 2 * x; } // why\n"


def named(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return digest_of(iter([folder / name]))


@pytest.mark.parametrize(
    ("name", "text", "words", "code"),
    [
        ("a.py", PYTHON, ('"""Twice."""', '"""x + x."""'), ("2 * x", "x * 2")),
        ("a.py", PYTHON, ("  # why", ""), ("LIMIT = 4", "LIMIT = 5")),
        ("a.py", PYTHON, ('"""A number."""\n', ""), ("def double", "def twice")),
        ("a.cpp", CPP, ("this is", "it was"), ("2 * x", "x + x")),
        ("a.cpp", CPP, (" // why", "\n\n"), ("int x", "long x")),
        ("tiles.json", '{"a": 1}', ("a", "a"), ("1", "2")),
    ],
)
def test_words_do_not_count_and_code_does(
    tmp_path: Path, name: str, text: str, words: tuple[str, str], code: tuple[str, str]
) -> None:
    before = named(tmp_path, name, text)
    assert named(tmp_path, name, text.replace(*words)) == before
    assert named(tmp_path, name, text.replace(*code)) != before
    assert named(tmp_path, "b" + name, text) != before


def test_every_kernel_counts() -> None:
    files = list(_sources())
    assert {"triton_gemm.py", "triton_attention.py", "cpu_gemm.cpp", "picking.py", "gemm_tiles.json"} <= {
        file.name for file in files
    }
    assert len(files) == len(set(map(str, files)))


def test_engines_that_compute_otherwise_are_of_another_arithmetic() -> None:
    cpu = torch.device("cpu")
    ways = [
        arithmetic_of(REFERENCE_OPS, cpu, kv_dtype, long, one_by_one)
        for kv_dtype in ("model", "float8")
        for long in (False, True)
        for one_by_one in (False, True)
    ]
    assert len(set(ways)) == 8
    assert all(code_digest() in way for way in ways)
