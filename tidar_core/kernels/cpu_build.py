"""The CPU kernels' source as libraries: compiled once for this processor, kept, and known to be whole when loaded.

A library has one part of the functions, since a start needs few of them; those that it needs are compiled at once.

A start may be killed in the midst of it, a disk may lose what was written last, a compiler may make what cannot be
loaded: none of that may outlive the start that it happened in, nor may a compiler.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import resources
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import torch

# What is done in a dtype, what is done beside it where weights are kept in fewer bits, and training.
Part = Literal["bf16", "float", "rounded_bf16", "rounded_float", "training"]
SOURCES = (
    "cpu_lanes.cpp",
    "cpu_kernels.cpp",
    "cpu_tiles.cpp",
    "cpu_queries.cpp",
    "cpu_attention_few.cpp",
    "cpu_attention_tiles.cpp",
    "cpu_attention.cpp",
    "cpu_gemm.cpp",
    "cpu_gemm_int8.cpp",
    "cpu_gemm_int4.cpp",
    "cpu_pass.cpp",
    "cpu_experts.cpp",
    "cpu_pick.cpp",
    "cpu_slots.cpp",
    "cpu_training.cpp",
    "cpu_blocks.cpp",
)  # one unit: they share names
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    # For some processors g++ would contract where a row has company and not where it is alone: other bits.
    "--param=avoid-fma-max-bits=0",
    "-fno-math-errno",
    "-pipe",  # no files of its own, which it would leave behind where it is killed
)
LANES = 16  # as `cpu_lanes.cpp` has them: keys a page, and the divisor of head and hidden sizes
COMPILERS = ("g++", "clang++")
SECONDS = 900.0  # for one call of a compiler, and for waiting until another process has compiled
ROOM = 8 * 1024 * 1024  # bytes that source, unit and library take together, with some to spare
LOOK_SECONDS = 0.1  # while waiting
DIGEST_BYTES = 32
SCRATCH = "compiling-"
ABANDONED_SECONDS = 3600.0  # a start that was killed left its scratch behind
# A command, and beside it who waits until nobody has the other end of its standard input open any more, as when the
# caller is killed, and then ends the whole group of processes: the command, and what that called.
WATCHED = 'exec 3<&0; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" 3<&- </dev/null'

Made = TypeVar("Made")
# Waits so many seconds for what comes of a compiler, and gives None where it has not come by then.
Compiling = Callable[[float], Made | None]


class CompileError(RuntimeError):
    """The kernels cannot be compiled here; the message is one line."""


def cache_directory() -> Path:
    """Where compiled kernels are kept between starts, if it can be written. For a user without a home it lies where
    nothing can be."""
    named, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    kept = f"{home}/.cache" if os.path.isabs(home) else os.devnull
    return Path(named if os.path.isabs(named) else kept) / "tidar"


def compiled_library(part: Part) -> ctypes.CDLL:
    """A part of the compiled kernels, from the cache where it was compiled before. Raises CompileError."""
    (library,) = compiled_libraries([part])
    return library


def compiled_libraries(parts: Sequence[Part]) -> list[ctypes.CDLL]:
    """Several parts, which are compiled beside each other, each for all that wait for it as soon as it is done. Raises
    CompileError."""
    coming: dict[Part, tuple[ExitStack, Compiling[ctypes.CDLL]]] = {}
    made: dict[Part, ctypes.CDLL] = {}
    with ExitStack() as all_parts:
        for part in sorted(set(parts)):  # in one order for all: no two processes may wait for each other's locks
            own = all_parts.enter_context(ExitStack())
            coming[part] = own, own.enter_context(_coming(part))
        while coming:
            for part, (own, library) in list(coming.items()):
                found = library(LOOK_SECONDS)
                if found is not None:
                    made[part] = found
                    own.close()
                    del coming[part]
    return [made[part] for part in parts]


@contextmanager
def _coming(part: Part) -> Iterator[Compiling[ctypes.CDLL]]:
    """What waits for a part's library; while this is open a compiler works on it, where none is kept."""
    room = resources.files("tidar_core.kernels")
    source = "\n".join(room.joinpath(name).read_text() for name in SOURCES)
    key = "\n".join((source, part, " ".join(FLAGS), _processor(), platform.machine(), *_torchs_openmp()))
    target = cache_directory() / f"cpu-kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    kept = _kept(target)
    if kept is not None:
        yield lambda _: kept
        return
    room_to_keep = _writable(target.parent)
    with _alone(target.with_suffix(".lock")) if room_to_keep else nullcontext(False) as alone:
        if alone:
            _clear(left for left in target.parent.glob(f"{_scratch_of(target)}*") if _is_abandoned(left))
        meanwhile = _kept(target)
        if meanwhile is not None:
            yield lambda _: meanwhile
            return
        with _made(source, part, target, room_to_keep) as library:
            yield library


def _kept(target: Path) -> ctypes.CDLL | None:
    """The library that is there, None where there is none, or one that is damaged, was made for another system, or by
    another compiler's runtime that is gone."""
    try:
        return _loaded(target) if _is_whole(target) else None
    except OSError:
        return None


@contextmanager
def _made(source: str, part: Part, target: Path, room_to_keep: bool) -> Iterator[Compiling[ctypes.CDLL]]:
    """Compiles a library; what waits for it also keeps it, where no other is kept by now: that may be in use. Raises
    CompileError."""
    try:
        # One that nobody else can write: what is loaded is run.
        place = target.parent if room_to_keep else None
        prefix = f"{_scratch_of(target)}{os.getpid()}-"
        with (
            tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as scratch,
            _compiled(source, part, Path(scratch)) as linked,
        ):
            yield lambda seconds: None if (built := linked(seconds)) is None else _ready(built, target, room_to_keep)
    except OSError as error:
        raise CompileError(f"compiling the CPU kernels failed: {error}") from error


def _ready(built: Path, target: Path, keep: bool) -> ctypes.CDLL:
    """What was compiled, loaded before others find it. Raises OSError."""
    loaded = _loaded(built)
    if keep and _kept(target) is None:
        _seal(built)
        os.replace(built, target)
    return loaded


def _loaded(library: Path) -> ctypes.CDLL:
    """Raises OSError. Where nothing that lies there may be run, as in some homes, a copy of it may elsewhere."""
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as elsewhere:
            return ctypes.CDLL(shutil.copy(library, elsewhere))


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """While this is open no other process compiles the same, if it gives True: not where the file system has no locks,
    nor where another hangs, which is not waited for for ever."""
    with ExitStack() as stack:
        last, alone = time.monotonic() + SECONDS, False
        try:
            file = stack.enter_context(lock.open("ab"))
            while not (alone := _locked(file.fileno())) and time.monotonic() < last:
                time.sleep(LOOK_SECONDS)
        except OSError:
            pass
        yield alone


def _locked(file: int) -> bool:
    """Raises OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _writable(directory: Path) -> bool:
    """Whether files can be made there and find room; makes the directory, and clears it of what was abandoned."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        _clear(left for left in directory.glob(f"{SCRATCH}*") if _is_old(left))
        return shutil.disk_usage(directory).free >= ROOM
    except OSError:
        return False


def _scratch_of(target: Path) -> str:
    """How the directories begin in which this library is made on this machine; the number of a process follows."""
    return f"{SCRATCH}{target.stem}-{platform.node()}-"


def _is_abandoned(scratch: Path) -> bool:
    """Whether the process of this machine that made it is gone: locks may hold for one machine, or for none."""
    process = scratch.name.split("-")[-2]
    return process.isdecimal() and not psutil.pid_exists(int(process))


def _is_old(scratch: Path) -> bool:
    with suppress(OSError):  # another start clears too
        return time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS
    return False


def _clear(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _processor() -> str:
    """What `-march=native` depends on, so that a cache directory shared by machines holds a library for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


def _torchs_openmp() -> list[str]:
    """Torch's own OpenMP library where its wheel bundles one: a second thread pool would fight with torch's."""
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]]


def compiler() -> list[str]:
    """The words that call the compiler: $CXX, which may have arguments, or the first that is there. Raises
    CompileError."""
    for words in (shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)):
        if words and shutil.which(words[0]):
            return words
    raise CompileError("no C++ compiler (g++ or clang++) on PATH")


@contextmanager
def _compiled(source: str, part: Part, scratch: Path) -> Iterator[Compiling[Path]]:
    """Begins to compile a part of the source, and gives what waits for the library. Raises CompileError, OSError."""
    called, unit, built = compiler(), scratch / "kernels.o", scratch / "kernels.so"
    (scratch / "kernels.cpp").write_text(source)
    # clang calls a runtime of its own, by names that torch's does not have.
    gnu = "clang" not in _run([*called, "--version"])
    runtime = _torchs_openmp() if gnu else []
    with _begun([*called, *FLAGS, f"-DPART_{part}", "-c", "-o", str(unit), str(scratch / "kernels.cpp")]) as unit_made:

        def linked(seconds: float) -> Path | None:
            if unit_made(seconds) is None:
                return None
            _run([*called, "-shared", "-Wl,--no-undefined", "-o", str(built), str(unit), *(runtime or ["-fopenmp"])])
            return built

        yield linked


def _run(command: list[str]) -> str:
    """What it prints. Raises CompileError, OSError."""
    with _begun(command) as printed:
        return printed(SECONDS) or ""


@contextmanager
def _begun(command: list[str]) -> Iterator[Compiling[str]]:
    """Runs a command, and gives what waits for what it prints; however this ends, and the process with it, nothing of
    it runs on. Raises CompileError, OSError."""
    with (
        _held_open() as watched,
        # A session of its own: what is called calls others, and they end with it.
        subprocess.Popen(
            ["/bin/sh", "-c", WATCHED, "sh", *command],
            stdin=watched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        end = time.monotonic() + SECONDS
        try:
            yield lambda seconds: _printed(process, seconds, end)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def _printed(process: subprocess.Popen[str], seconds: float, end: float) -> str | None:
    try:
        printed, complaints = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if time.monotonic() < end:
            return None
        raise CompileError(
            f"the C++ compiler took longer than {SECONDS:.0f} seconds: the machine may be busy, start again later"
        ) from None
    if process.returncode < 0:
        killed = signal.Signals(-process.returncode).name
        raise CompileError(f"the C++ compiler was ended by {killed}: it may have run out of memory")
    if process.returncode != 0:
        last = (complaints.strip().splitlines() or ["no message"])[-1]
        raise CompileError(f"the C++ compiler failed: {last}")
    return printed


@contextmanager
def _held_open() -> Iterator[int]:
    """The end of a pipe to read from, which brings nothing and has an end once this is over or its process gone."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def _seal(built: Path) -> None:
    """Puts a digest behind the library, where no loader looks, and both on the disk."""
    with built.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    """Whether it ends with its digest: the parts of one that was cut would end the process when they are touched."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest
