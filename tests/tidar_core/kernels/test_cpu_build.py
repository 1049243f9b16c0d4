"""The kernels' library: made once, made anew where it is damaged, and one line where it cannot be made."""

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidar_core.kernels import cpu_build

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and of the kernels the part that compiles in a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build, "SOURCES", ("cpu_lanes.cpp",))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "tidar"


def compiler(folder: Path, *lines: str) -> str:
    """A compiler by name that does what the lines of a shell script say."""
    script = folder / "compiler"
    script.write_text("\n".join(("#!/bin/sh", *lines)), encoding="latin-1")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def in_another_process() -> subprocess.Popen[bytes]:
    """A start that signals end, were they ignored here, as where a shell runs tests in the background."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "from tidar_core.kernels import cpu_build; cpu_build.SOURCES = ('cpu_lanes.cpp',); "
        "cpu_build.compiled_library('float')"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ})


def test_it_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_build.compiled_library("float")
    (library,) = cache.glob("*.so")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    assert cpu_build.compiled_library("float")
    assert list(cache.glob("*.so")) == [library]


def test_processes_that_start_together_compile_it_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 'case "$*" in *" -c "*) echo >>"$0.calls"; sleep 1; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, count, 'exec g++ "$@"'))
    assert [process.wait() for process in [in_another_process() for _ in range(2)]] == [0, 0]
    assert (tmp_path / "compiler.calls").read_text() == "\n"


def test_parts_are_compiled_beside_each_other_and_each_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiler waits until the other has begun."""
    both_began = '[ "$(ls "$0".* | wc -l)" = 2 ] && exec g++ "$@"'
    wait = f'touch "$0.$$"; for _ in $(seq 600); do {both_began}; sleep 0.1; done; exit 1'
    monkeypatch.setenv("CXX", compiler(tmp_path, f'case "$*" in *" -c "*) {wait};; esac', 'exec g++ "$@"'))
    cpu_build.compiled_libraries(["float", "bf16"])
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    again = cpu_build.compiled_libraries(["bf16", "float", "bf16"])
    assert {library._name for library in again} == {str(path) for path in cache.glob("*.so")}
    assert again[0] is again[2] is not again[1]


def test_a_part_that_is_done_is_not_locked_until_the_others_are(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one part waits until the other was taken over by somebody who wants no more than that."""
    begun, taken = tmp_path / "begun", tmp_path / "taken"
    wait = f'touch {begun}; for _ in $(seq 600); do [ -e {taken} ] && exec g++ "$@"; sleep 0.1; done; exit 1'
    count = 'case "$*" in *PART_float*) echo >>"$0.calls"; esac'
    slow = f'case "$*" in *PART_bf16*) {wait};; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, count, slow, 'exec g++ "$@"'))
    with ThreadPoolExecutor() as pool:
        both = pool.submit(cpu_build.compiled_libraries, ["bf16", "float"])
        while not begun.exists() or not (tmp_path / "compiler.calls").exists():
            assert not both.done()
            time.sleep(0.05)
        cpu_build.compiled_library("float")
        taken.touch()
        assert len(both.result()) == 2
    assert (tmp_path / "compiler.calls").read_text() == "\n"


def test_where_one_part_fails_the_compilers_of_the_others_end(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = 'echo $$ >"$0.part"; mv "$0.part" "$0.called"; exec sleep 60'
    fails = f'case "$*" in *PART_bf16*) exit 1;; *" -c "*) {begins};; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, fails))
    with pytest.raises(cpu_build.CompileError, match="no message"):
        cpu_build.compiled_libraries(["float", "bf16"])
    last = time.monotonic() + 10
    while (called := tmp_path / "compiler.called").exists() and runs(int(called.read_text())):
        assert time.monotonic() < last
        time.sleep(0.05)
    assert [path.suffix for path in cache.iterdir()] == [".lock", ".lock"]


def test_a_process_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "SECONDS", 0.3)
    with cpu_build._alone(tmp_path / "lock"):
        began = time.monotonic()
        with cpu_build._alone(tmp_path / "lock"):
            assert time.monotonic() - began >= 0.3


def test_a_library_that_another_kept_meanwhile_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no locks: those that have it loaded would lose it."""
    compile_it = cpu_build._compiled

    def no_locks(file: int, how: int) -> None:
        raise OSError("no locks available")

    def compile_behind_another(*given: Any) -> Any:
        monkeypatch.setattr(cpu_build, "_compiled", compile_it)
        cpu_build.compiled_library("float")
        first.extend(path.stat().st_ino for path in cache.glob("*.so"))
        return compile_it(*given)

    first: list[int] = []
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(cpu_build, "_compiled", compile_behind_another)
    assert cpu_build.compiled_library("float")
    assert [path.stat().st_ino for path in cache.glob("*.so")] == first


def test_where_the_cache_may_run_nothing_a_copy_runs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a home that is mounted noexec."""
    load = ctypes.CDLL

    def refusing(name: str) -> ctypes.CDLL:
        if cache in Path(name).parents:
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", refusing)
    assert cpu_build.compiled_library("float")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    assert cpu_build.compiled_library("float")


@pytest.mark.parametrize("kept", [0, 100, 4096, -1])
def test_a_library_that_was_cut_is_made_anew(cache: Path, kept: int) -> None:
    """In processes of their own: one that is cut ends whoever touches what it lacks."""
    assert in_another_process().wait() == 0
    (library,) = cache.glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[:kept])
    assert in_another_process().wait() == 0
    assert len(library.read_bytes()) == len(whole)


def test_what_cannot_be_loaded_is_not_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo no > "$2"; shift; done'))
    with pytest.raises(cpu_build.CompileError, match=r"kernels\.so"):
        cpu_build.compiled_library("float")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    monkeypatch.delenv("CXX")
    assert cpu_build.compiled_library("float")


@pytest.mark.parametrize("given", ["nice g++", "g++ -m64", "", "no-such-compiler"])
def test_the_environment_may_name_a_compiler_with_arguments(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", given)
    assert cpu_build.compiler() == (given.split() if "g++" in given else ["g++"])
    assert cpu_build.compiled_library("float")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("printf 'k\\374hl\\n' >&2; exit 1", "failed: k.hl"),
        ("exit 1", "no message"),
        ("kill -9 $$", "ended by SIGKILL"),
    ],
)
def test_a_compiler_that_fails_is_one_line(
    does: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, does))
    with pytest.raises(cpu_build.CompileError, match=says) as error:
        cpu_build.compiled_library("float")
    assert "\n" not in str(error.value)


def test_a_compiler_that_takes_too_long_ends_with_all_that_it_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "SECONDS", 2.0)
    monkeypatch.setenv("CXX", compiler(tmp_path, 'sleep 60 & echo $! >"$0.called"; wait'))
    with pytest.raises(cpu_build.CompileError, match=r"^the C\+\+ compiler took longer than 2 seconds: .* later$"):
        cpu_build.compiled_library("float")
    called = int((tmp_path / "compiler.called").read_text())
    last = time.monotonic() + 10
    while runs(called) and time.monotonic() < last:
        time.sleep(0.05)
    assert not runs(called)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_start_that_is_ended_takes_the_compiler_along_and_the_next_one_its_files(
    number: signal.Signals, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = 'case "$*" in *" -c "*) sleep 60 & echo $! >"$0.part"; mv "$0.part" "$0.called"; wait; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, hangs, 'exec g++ "$@"'))
    start = in_another_process()
    last = time.monotonic() + 60
    while not (tmp_path / "compiler.called").exists() and time.monotonic() < last:
        time.sleep(0.05)
    called = int((tmp_path / "compiler.called").read_text())
    start.send_signal(number)
    start.wait(60)
    while runs(called) and time.monotonic() < last:
        time.sleep(0.05)
    assert not runs(called)
    monkeypatch.delenv("CXX")
    cpu_build.compiled_library("float")
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_nothing_of_a_compiler_is_left_that_is_done() -> None:
    before = {child.pid for child in psutil.Process().children()}
    printed = cpu_build._run(["sh", "-c", "echo $$; read -r _ || echo nothing to read"])
    group, said = printed.splitlines()
    last = time.monotonic() + 10
    while (left := in_group(int(group))) and time.monotonic() < last:
        time.sleep(0.05)
    assert not left
    assert said == "nothing to read"
    assert {child.pid for child in psutil.Process().children()} <= before


def in_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.getpgid(process.pid) == group and runs(process.pid):
                found.append(process.pid)
    return found


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cpu_build.CompileError, match="no C\\+\\+ compiler"):
        cpu_build.compiled_library("float")


@pytest.mark.parametrize("home", ["a file", "none"])
def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    home: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user whose home cannot be written, or who has none."""
    (tmp_path / "a file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "not from the root on")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path if home == "none" else str(tmp_path / home))
    assert cpu_build.compiled_library("float")
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_where_no_room_is_left_it_is_compiled_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    assert cpu_build.compiled_library("float")
    assert list(cache.iterdir()) == []


def test_what_a_killed_start_left_behind_is_cleared_away(cache: Path) -> None:
    for name, age in (("old", 7200.0), ("young", 60.0)):
        left = cache / f"{cpu_build.SCRATCH}{name}"
        left.mkdir(parents=True)
        (left / "kernels.o").touch()
        os.utime(left, (time.time() - age,) * 2)
    cpu_build.compiled_library("float")
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{cpu_build.SCRATCH}young"]
