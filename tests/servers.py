"""A real `tidar up` in a process of its own, for tests that talk to it as a client does."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from cluster.operate.haproxy import free_ports
from cluster.options import ServeOptions, UpOptions
from tests import plain_http
from tests.tiny import tiny_adapter, tiny_checkpoint

REPOSITORY = Path(__file__).parent.parent
MARK = "TIDAR_TEST_MARK"  # inherited by every process that a server starts, so that orphans can be told
START_SECONDS = 180
STOP_SECONDS = 150
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # of Ray's dashboard
ENDING_SECONDS = 60  # for these, which notice only after a while that it is gone, and end then


@dataclass(frozen=True)
class Serving:
    """Whatever serves: `url` is its base, `mark` tells its processes."""

    url: str
    mark: str

    def metric(self, name: str, code: str = "") -> float:
        """A metric's value now, summed over its series, or those of one code."""
        lines = plain_http.get(f"{self.url}/metrics", timeout=30).raise_for_status().text.splitlines()
        own = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.split()[-1]) for line in own if not code or f'code="{code}"' in line)

    def processes(self) -> list[psutil.Process]:
        """Every process of this server that is alive."""
        return marked_processes(self.mark)


@dataclass(frozen=True)
class Server(Serving):
    """A server that was started here; `log` is what it printed."""

    log: Path
    process: subprocess.Popen[bytes]

    def interrupt(self) -> int:
        """Ctrl-C as a terminal sends it, to the whole group of processes; the exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_SECONDS)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every process alive that has inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def free_port() -> int:
    """One that nobody listens on, and that Ray, which asks the system for many while it starts, is not given."""
    (port,) = free_ports(1)
    return port


def tiny_model(directory: Path, **shape: int) -> tuple[Path, Path]:
    """A tiny checkpoint with room for long answers, and a random drafter for it."""
    model = tiny_checkpoint(directory / "tiny", max_positions=4096, **shape)  # type: ignore[arg-type]
    return model, tiny_adapter(directory / "tiny-adapter", model)


def command(*arguments: str) -> list[str]:
    """`tidar` with arguments, as this Python runs it."""
    return [sys.executable, "-c", "from tidar_core.cli import main; main()", *arguments]


def start(directory: Path, *arguments: str, port: int | None = None) -> Server:
    """Start `tidar up` on a free port or `port`, from `directory`, which is not the repository's."""
    port = port or free_port()
    return launch(directory, port, command("up", "--port", str(port), *arguments))


def start_with(
    directory: Path,
    options: ServeOptions,
    cpus: int = 0,
    more: Mapping[str, str] = MappingProxyType({}),
    playground: bool = False,
) -> Server:
    """As `start`, with options that the command line does not have; Ray counts `cpus` CPUs where that is given. `more`
    goes into its environment."""
    options = options.model_copy(update={"playground": playground})
    chosen = UpOptions(serve=options, port=free_port())
    code = "import sys; import cluster.lean_serve; from cluster.operate.deploy import up; "
    code += "from cluster.options import UpOptions as Options; "
    code += "up(Options.model_validate_json(sys.argv[1]))"
    counted = {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": cpus})} if cpus else {}
    return launch(directory, chosen.port, [sys.executable, "-c", code, chosen.model_dump_json()], {**counted, **more})


def launch(directory: Path, port: int, words: list[str], more: Mapping[str, str] = MappingProxyType({})) -> Server:
    """Start a server as a terminal would: in a group of processes of its own, `more` in their environment."""
    # Not in a session of its own: Linux shares the processor out among sessions first (autogroup), and has let the
    # clients, in theirs, wait for seconds while the server computed.
    mark = uuid.uuid4().hex
    log = directory / f"up-{port}.log"
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, MARK: mark, "RAY_ADDRESS": "local", "PYTHONPATH": os.pathsep.join(paths), **more}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            process_group=0,
        )
    return Server(f"http://127.0.0.1:{port}", mark, log, process)


def wait_for_text(server: Server, text: str, seconds: float = START_SECONDS) -> None:
    """Until the server printed `text`."""
    deadline = time.monotonic() + seconds
    while text not in server.log.read_text():
        assert server.process.poll() is None, f"the server ended:\n{server.log.read_text()}"
        assert time.monotonic() < deadline, f"no {text!r} after {seconds} s:\n{server.log.read_text()}"
        time.sleep(0.1)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill each that has not ended by itself meanwhile, as a worker does without its raylet."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing of one that is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def end_all(mark: str) -> list[list[str]]:
    """The command lines of what a server that has ended left behind; none of its processes is left after this."""
    left = marked_processes(mark)
    said = {process: words_of(process) for process in left}
    helpers = [
        process for process in left if not said[process] or any(name in " ".join(said[process]) for name in HELPERS)
    ]
    ended, _ = psutil.wait_procs(helpers, timeout=ENDING_SECONDS)
    left = [process for process in left if process not in ended]
    kill_all(left)
    return [said[process] for process in left]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A started server, once it is ready. However the test ends, none of its processes is left."""
    try:
        wait_for_text(server, "Ctrl-C")
        yield server
    finally:
        try:
            status = server.process.poll()
            status = server.interrupt() if status is None else status
        finally:
            left = end_all(server.mark)
    assert not left, f"left behind: {left}"
    assert status == 0, f"the server ended with {status}:\n{server.log.read_text()}"


@contextmanager
def tiny_server(directory: Path, port: int | None = None) -> Iterator[Server]:
    """A server of a tiny checkpoint with its drafter, the same each time, in fp32 on the CPU."""
    model, adapter = tiny_model(directory)
    settings = ("--model", str(model), "--adapter", str(adapter), "--dtype", "float32", "--device", "cpu")
    with running(start(directory, *settings, port=port)) as server:
        yield server
