"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from tidar_core.files import write_atomically


def test_files_take_the_place_of_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    write_atomically({tmp_path / "a": b"now", tmp_path / "b": b"too"}, ".{}.mine")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"now", "b": b"too"}


def test_where_one_cannot_be_written_none_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="nowhere"):
        write_atomically({tmp_path / "a": b"now", tmp_path / "nowhere" / "b": b"too"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"
