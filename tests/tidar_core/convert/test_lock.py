"""Two conversions at once: one that would write where the other does is refused, whatever the other ends by."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tidar_core.convert.test_command import KILLED
from tests.tidar_core.convert.test_full import full_weights
from tests.tidar_core.convert.trained import BRIEF, SMALL, run_command
from tests.tiny import tiny_checkpoint
from tidar_core.convert import run
from tidar_core.convert.lock import alone_in
from tidar_core.convert.trainer import train_drafter


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", **BRIEF)


def shards(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.glob("*.safetensors")}


def test_a_second_run_does_not_gather_into_the_same_data_until_the_first_is_gone(model, tmp_path):
    data = tmp_path / "data"
    common = (model, "--data", data, "--steps", 1, *SMALL)
    arguments = [str(word) for word in (*common, "--out", tmp_path / "first", "--own-tokens", 10**7)]
    with open(tmp_path / "errors", "wb") as errors:
        first = subprocess.Popen([sys.executable, "-c", KILLED.format(arguments=arguments)], stderr=errors)
    try:
        until = time.monotonic() + 120
        while len(shards(data)) < 2 and time.monotonic() < until:
            assert first.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.02)
        first.send_signal(signal.SIGSTOP)
        before = shards(data)
        status, output = run_command(*common, "--out", tmp_path / "second")
        assert (status, output) == (
            1,
            f"tidar: another tidar convert is gathering in {data}: wait until it has ended, or choose another --data\n",
        )
        assert shards(data) == before
    finally:
        first.kill()
        first.wait()
    status, output = run_command(*common, "--out", tmp_path / "second")
    assert status == 0, output
    assert shards(data).items() >= before.items()


def test_a_second_run_does_not_go_on_with_the_same_folder(model, tmp_path):
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    for name, other_data in ((out, ()), (out, ("--data", tmp_path / "data")), (link, ())):
        with alone_in(tmp_path / "out.work", "running", "--out"):
            status, output = run_command(model, "--out", name, *other_data, "--steps", 1, *SMALL)
        assert (status, output) == (
            1, f"tidar: another tidar convert is running in {out}.work: wait until it has ended, or choose another "
            "--out\n"
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".running", "link", "out", "out.work"]


def test_a_second_run_leaves_alone_what_the_first_is_replacing(model, tmp_path):
    """Full weights take their folder's name in two renames. Between them nothing has that name, and what had it lies
    aside, as where a run was killed."""
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    aside = full_weights(tmp_path / "out.replaced")
    with alone_in(tmp_path / "out.work", "running", "--out"):
        status, output = run_command(model, "--mode", "full", "--out", out, "--text", text, "--steps", 1)
    assert status == 1
    assert f"another tidar convert is running in {out}.work" in output
    assert (out.exists(), aside.exists()) == (False, True)


def test_data_that_are_gathered_may_be_trained_on_by_several_at_once(gathered, tmp_path, monkeypatch):
    """Also where the data lie in the folder that is worked in."""
    model, data = gathered
    common = (model, "--data", data.rename(tmp_path / "first.work"), "--steps", 1, *SMALL)
    beside: list[tuple[int, str]] = []

    def training(*given):
        monkeypatch.setattr(run, "train_drafter", train_drafter)
        beside.append(run_command(*common, "--out", tmp_path / "second"))
        return train_drafter(*given)

    monkeypatch.setattr(run, "train_drafter", training)
    status, output = run_command(*common, "--out", tmp_path / "first")
    assert (status, beside[0][0]) == (0, 0), (output, beside)


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refused(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with alone_in(tmp_path / "new", "gathering", "--data"), alone_in(tmp_path / "new", "gathering", "--data"):
        assert (tmp_path / "new").is_dir()
