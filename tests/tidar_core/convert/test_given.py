"""The user's files in odd forms: read as what they are, or refused in one line, at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.tidar_core.convert.documents import HEADER
from tests.tiny import tiny_tokenizer
from tidar_core.config import ConfigError
from tidar_core.convert import given as given_files
from tidar_core.convert.given import read_prompts, read_text
from tidar_core.convert.own_words import add_text
from tidar_core.convert.shards import open_store

READERS: list[Callable[[Path], list[str]]] = [read_prompts, lambda path: list(read_text(path))]
readers = pytest.mark.parametrize("read", READERS, ids=["prompts", "text"])


def refusal(read: Callable[[Path], list[str]], path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_a_mark_at_the_beginning_and_the_kind_of_line_ends_are_no_part_of_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Why?"}\r\nHow so?\r\n\r\nWhere?\rWhen?')
    assert read_prompts(path) == ["Why?", "How so?", "Where?", "When?"]
    path.write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert list(read_text(path)) == ["One.\nTwo.\n"]


def test_a_prompt_ends_where_its_line_does(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "One\u2028and\x85two"}\nThree\x0cand four\n', encoding="utf-8")
    assert read_prompts(path) == ["One\u2028and\x85two", "Three\x0cand four"]


@readers
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_other_encodings_are_refused(tmp_path, read, encoding):
    path = tmp_path / "file"
    path.write_bytes(("Zähne" * 9).encode(encoding))
    assert refusal(read, path).endswith("save it as plain text in UTF-8")


@readers
def test_a_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    assert "it is a pipe or a device" in refusal(read, tmp_path / "pipe")
    assert "Is a directory" in refusal(read, tmp_path)


@pytest.mark.parametrize(("read", "option"), [*zip(READERS, ("--prompts", "--text"), strict=True)])
def test_what_a_shell_puts_in_place_of_a_file_is_told_what_to_do_with(read, option):
    """`<(zcat text.gz)` is a pipe under such a name, as is `/dev/stdin` behind another one."""
    ends = os.pipe()
    try:
        line = refusal(read, Path(f"/dev/fd/{ends[0]}"))
    finally:
        for end in ends:
            os.close(end)
    assert line.endswith(f"write what comes out of it to a file, and give that to {option}")


@readers
def test_a_file_that_may_not_be_read_is_one_line(tmp_path, read, monkeypatch):
    """As root one may read them all."""

    def denied(_) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    assert "cannot be read (Permission denied)" in refusal(read, tmp_path / "file")


@pytest.mark.parametrize("prompt", [r'{"prompt": "\ud800"}', '{"prompt": ' + "[" * 10**5 + "]" * 10**5 + "}"])
def test_json_that_is_no_text_is_one_line(tmp_path, prompt):
    path = tmp_path / "prompts"
    path.write_text(f"Why?\n{prompt}\n")
    assert 'line 2: no JSON object with a string "prompt"' in refusal(read_prompts, path)


def test_a_prompt_that_nothing_has_room_for_is_one_line(tmp_path):
    path = tmp_path / "prompts"
    path.write_text("Why?\n" + "x" * 10**7)
    assert "line 2: a prompt of 10,000,000 characters is too long" in refusal(read_prompts, path)


def test_a_file_that_is_being_written_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("The quick brown fox.\n" * 20)
    tokenizer = tiny_tokenizer()

    def tokenized(text: str, **how: bool):
        with path.open("a") as file:
            file.write("jumps")
        return tokenizer(text, **how)

    store = open_store(tmp_path / "data", HEADER)
    monkeypatch.setattr(given_files, "TEXT_PIECE", 64)
    with pytest.raises(ConfigError, match="was written to while it was read: start again when it is complete"):
        add_text(tokenized, path, store, 64, 512)
    assert len(store.read().corpus) == 0


def pieces(directory: Path, text: str, piece: int) -> list[str]:
    (directory / "text").write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(given_files, "TEXT_PIECE", piece)
        return list(read_text(directory / "text"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab é\n東"), max_size=200), piece=st.integers(1, 40))
@example(text="a aaaa", piece=2)
def test_the_pieces_of_a_text_are_the_text_and_no_longer_than_asked_for(tmp_path, text, piece):
    found = pieces(tmp_path, text, piece)
    assert "".join(found) == text
    assert all(0 < len(each) <= 2 * piece for each in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.text(st.sampled_from("ab é"), max_size=9), max_size=40), piece=st.integers(10, 40))
def test_lines_that_are_not_long_are_not_cut(tmp_path, lines, piece):
    assert all(each.endswith("\n") for each in pieces(tmp_path, "".join(f"{line}\n" for line in lines), piece))


def test_a_long_line_is_cut_at_a_space(tmp_path):
    assert pieces(tmp_path, "one two three four five\nsix", 10) == ["one two three four", " five\nsix"]


def test_one_huge_line_takes_no_longer_than_as_many_short_ones(tmp_path):
    """Each of its documents had copied all that was behind it, in memory many times the file's."""
    (tmp_path / "text").write_text("The quick brown fox jumps. " * 80_000)
    tokenizer, longest = tiny_tokenizer(), 0

    def tokenized(text: str, **how: bool):
        nonlocal longest
        longest = max(longest, len(text))
        return tokenizer(text, **how)

    assert add_text(tokenized, tmp_path / "text", open_store(tmp_path / "data", HEADER), 512, 512).documents > 1
    assert longest <= 2 * given_files.TEXT_PIECE
