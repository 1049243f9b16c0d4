"""Token shards: what was put in comes out, whatever happens to the last file or to the disk."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tidar_core.convert.documents import HEADER, document
from tidar_core.config import ConfigError
from tidar_core.convert.shards import Corpus, ShardStore, open_store, prompt_number, read_header


def test_shards_give_back_what_was_put_in(tmp_path):
    store = open_store(tmp_path, HEADER)
    store.append([document(0), document(1, 7)], [0, 1, 2], 3.0)
    store.append([document(3)], [3], 4.5)
    stored = open_store(tmp_path, HEADER).read()
    assert stored.done == {0, 1, 2, 3}
    assert stored.seconds == 7.5
    assert len(stored.corpus) == 3
    for index, job in enumerate((0, 1, 3)):
        tokens, own = stored.corpus.document(index)
        expected = document(job, 7 if job == 1 else 20)
        assert tokens.tolist() == list(expected.tokens)
        assert own.tolist() == list(expected.own)


def test_a_torn_last_shard_is_dropped_with_one_line(tmp_path):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    store.append([document(1)], [1], 1.0)
    torn = tmp_path / "shard-000001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])
    (tmp_path / "shard-000002.safetensors.part").write_bytes(b"half")
    theirs = [tmp_path / name for name in ("film.mkv.part", "shard-of-mine.safetensors.part")]
    for path in theirs:
        path.write_bytes(b"half a download")
    again = open_store(tmp_path, HEADER)
    assert len(again.notes) == 1
    assert "shard-000001" in again.notes[0]
    assert again.read().done == {0}
    again.append([document(1)], [1], 1.0)
    assert open_store(tmp_path, HEADER).read().done == {0, 1}
    assert sorted(tmp_path.glob("*.part")) == sorted(theirs)


def test_what_a_kill_left_where_nothing_can_be_removed_is_left_out(tmp_path, monkeypatch):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    store.append([document(1)], [1], 1.0)
    torn, part = tmp_path / "shard-000001.safetensors", tmp_path / "shard-000002.safetensors.part"
    torn.write_bytes(torn.read_bytes()[:-9])
    part.write_bytes(b"half")

    def refused(*given: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    again = open_store(tmp_path, HEADER)
    assert again.notes == (
        "left out shard-000001.safetensors, which was not written to its end and cannot be removed (Permission "
        "denied): its jobs count as not done",
    )
    assert again.read().done == ShardStore(tmp_path, HEADER).read().done == {0}
    assert torn.exists()
    assert part.exists()
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(ConfigError, match=r"shard-000002\S+ it cannot be written \(Permission denied\)"):
        again.append([document(2)], [2], 1.0)


def test_a_torn_shard_that_stays_where_others_would_be_written_is_one_line(tmp_path, monkeypatch):
    """As another user's in a folder where each may remove their own alone."""
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    torn = tmp_path / "shard-000000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])

    def refused(*given: object, **named: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(ConfigError, match=r"shard-000000.* cannot be removed \(Operation not permitted\): remove it"):
        open_store(tmp_path, HEADER)


@pytest.mark.parametrize("harm", ["cut", "garbage", "columns"])
def test_an_unreadable_shard_is_one_line(tmp_path, harm):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    store.append([document(1)], [1], 1.0)
    path = tmp_path / "shard-000000.safetensors"
    content = path.read_bytes()
    harmed = {"cut": content[:-1], "garbage": b"\xff" * 64, "columns": content.replace(b'"kinds"', b'"kings"')}
    path.write_bytes(harmed[harm])
    with pytest.raises(ConfigError, match=r"shard-000000.* cannot be read .*delete it") as raised:
        open_store(tmp_path, HEADER).read()
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="the disk is full: free some space"):
            store.append([document(1)], [1], 1.0)
    assert not list(tmp_path.glob("*.part"))
    assert open_store(tmp_path, HEADER).read().done == {0}


def test_other_tokens_are_refused_and_other_weights_told(tmp_path):
    open_store(tmp_path, HEADER)
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_store(tmp_path, HEADER.model_copy(update={"tokenizer": "x"}))
    store = open_store(tmp_path, HEADER.model_copy(update={"seed": 1, "fingerprint": ""}))
    assert store.header == HEADER
    with pytest.raises(ConfigError, match="--seed 0"):
        store.check_seed(1)
    store.check_seed(0)
    assert "other weights" in store.words_come_from(HEADER.model_copy(update={"fingerprint": "x"}))
    assert store.words_come_from(HEADER) == ""


def test_data_begun_with_text_alone_are_of_the_first_weights_that_say_something(tmp_path):
    """And are planned with their seed."""
    store = open_store(tmp_path, HEADER.model_copy(update={"model": "another", "fingerprint": "", "seed": 1}))
    store.check_seed(0)
    assert store.words_come_from(HEADER) == ""
    assert read_header(tmp_path) == store.header == HEADER
    assert "other weights" in store.words_come_from(HEADER.model_copy(update={"fingerprint": "x"}))


def test_a_shard_that_the_disk_does_not_give_is_kept(tmp_path):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    (tmp_path / "shard-000001.safetensors").mkdir()  # it can be opened and not be read
    with pytest.raises(ConfigError, match=r"shard-000001.* cannot be read .*and start again") as raised:
        open_store(tmp_path, HEADER)
    assert "\n" not in str(raised.value)
    assert (tmp_path / "shard-000001.safetensors").exists()


def test_a_last_shard_of_another_form_is_kept(tmp_path):
    store = open_store(tmp_path, HEADER)
    store.append([document(0)], [0], 1.0)
    path = tmp_path / "shard-000000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"kinds"', b'"kings"'))
    with pytest.raises(ConfigError, match="it has no column kinds"):
        open_store(tmp_path, HEADER)
    assert path.exists()


DOCUMENT_KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=400)


def sides(keys: list[int]) -> tuple[set[int], set[int]]:
    """Keys of the documents that are learnt from and of those held out."""
    ends = np.arange(1, len(keys) + 1)
    learnt, held_out = Corpus(ends, ends, ends, np.array(keys, dtype=np.int64), ends, ends).split()
    assert sorted([*learnt, *held_out]) == list(range(len(keys)))
    return {keys[i] for i in learnt}, {keys[i] for i in held_out}


@given(DOCUMENT_KEYS, st.integers(0, 5))
def test_a_document_that_was_learnt_from_is_never_held_out(keys, first):
    learnt, _ = sides(keys)
    learnt_before, _ = sides(keys[:first])
    assert learnt_before <= learnt


@pytest.mark.parametrize("keys", [list(order) for order in itertools.permutations([2**60, 2**61, 2**62])])
def test_two_documents_that_a_third_joins(keys):
    for count in (1, 2):
        assert sides(keys[:count]) == (set(), set(keys[:count]))
    assert sides(keys) == ({2**62}, {2**60, 2**61})


@given(DOCUMENT_KEYS, st.integers(1, 400))
def test_once_many_are_held_out_they_stay(keys, first):
    _, held_out = sides(keys)
    _, held_out_before = sides(keys[:first])
    assert len(held_out_before) <= 2 or held_out_before <= held_out
    assert len(held_out) >= min(2, len(keys))


def test_where_a_shard_was_deleted_no_other_is_written_over(tmp_path):
    """As the user is told to delete one that cannot be read."""
    store = open_store(tmp_path, HEADER)
    for job in range(3):
        store.append([document(job)], [job], 1.0)
    (tmp_path / "shard-000001.safetensors").unlink()
    open_store(tmp_path, HEADER).append([document(1)], [1], 1.0)
    stored = open_store(tmp_path, HEADER).read()
    assert stored.done == {0, 1, 2}
    assert len(stored.corpus) == 3


def test_a_users_copy_of_a_shard_is_left_alone(tmp_path):
    open_store(tmp_path, HEADER).append([document(0)], [0], 1.0)
    shard = tmp_path / "shard-000000.safetensors"
    (tmp_path / "shard-000000-copy.safetensors").write_bytes(shard.read_bytes())
    assert len(open_store(tmp_path, HEADER).read().corpus) == 1


def test_prompts_are_told_from_jobs_and_from_each_other():
    numbers = {prompt_number(key) for key in (0, 1, 2, 2**62, 2**62 + 1, 2**63 - 1, -2, -(2**62) - 2)}
    assert len(numbers) == 8
    assert -(2**63) <= min(numbers) <= max(numbers) < 0
