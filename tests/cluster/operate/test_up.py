"""`tidar up` and `tidar status` as commands: what they refuse in one line, and how they end."""

import fcntl
import io
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray._private import parameter
from typer.testing import CliRunner, Result

from cluster.operate import deploy
from cluster.operate.deploy import unhealthy
from cluster.operate.haproxy import ASKED
from cluster.operate.interrupts import Interrupts
from cluster.operate.ray_cluster import running_cluster, spare_ray
from cluster.options import ServeOptions, UpOptions
from cluster.preflight import absolute
from tests import plain_http
from tests.servers import (
    MARK,
    REPOSITORY,
    START_SECONDS,
    Server,
    command,
    end_all,
    free_port,
    kill_all,
    start,
    tiny_model,
    wait_for_text,
)
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.cli import app
from tidar_core.config import ConfigError
from tidar_core.model.sources import find_model


@pytest.fixture(autouse=True)
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")


def tidar(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line with which a command refuses, before it started anything."""
    result = tidar(*arguments)
    assert result.exit_code == 1, result.output
    assert not ray.is_initialized()
    (line,) = result.stderr.strip().splitlines()
    assert "Traceback" not in result.output
    return line.removeprefix("tidar: ")


def refused_beside_ray(directory: Path, *arguments: str) -> str:
    """The one line with which a command refuses what takes as long to know as Ray to start; nothing is left running."""
    mark = uuid.uuid4().hex
    try:
        done = subprocess.run(
            command("up", "--port", str(free_port()), *arguments),
            cwd=directory,
            env={**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
    finally:
        left_behind = end_all(mark)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == "starting Ray\n"
    assert not left_behind
    (line,) = done.stderr.strip().splitlines()
    return line.removeprefix("tidar: ")


def test_words_on_the_command_line_are_options_and_their_defaults_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[UpOptions] = []
    monkeypatch.setattr(deploy, "up", asked.append)
    assert tidar("up").exit_code == 0
    assert tidar("up", "--port", "8123", "--max-ongoing", "7", "--priorities").exit_code == 0
    assert asked == [UpOptions(), UpOptions(serve=ServeOptions(max_ongoing=7, priorities=True), port=8123)]


def test_a_model_that_is_not_there() -> None:
    port = str(free_port())
    assert "/no/such/model" in refused("up", "--port", port, "--model", "/no/such/model")
    assert "~nobody-at-all/model" in refused("up", "--port", port, "--model", "~nobody-at-all/model")


def test_an_adapter_that_does_not_fit(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    other = tiny_checkpoint(tmp_path / "other", hidden=48)
    adapter = tiny_adapter(tmp_path / "adapter", other)
    line = refused_beside_ray(tmp_path, "--model", str(model), "--adapter", str(adapter))
    assert "hidden_size 48" in line
    assert "96" in line
    none = str(tmp_path / "none")
    assert "no adapter" in refused("up", "--port", str(free_port()), "--model", str(model), "--adapter", none)


def test_a_port_in_use(server: Server) -> None:
    port = str(httpx.URL(server.url).port)
    assert f"port {port}" in refused("up", "--port", port)
    assert plain_http.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(("user", "threads", "fits"), [(1000, 120, False), (0, 120, True), (1000, -1, True)])
def test_too_few_threads(user: int, threads: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (threads, threads))
    line = refused("up", "--port", str(free_port()), "--model", "/no/such/model")
    assert line.startswith("no model" if fits else "only 120 threads may run at once: raise `ulimit -u`"), line


def test_a_host_that_is_not_ours() -> None:
    assert "203.0.113.1" in refused("up", "--port", str(free_port()), "--host", "203.0.113.1")


def test_paths_hold_for_processes_that_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = absolute(ServeOptions(model="checkpoint", adapter="drafter"))
    assert (chosen.model, chosen.adapter) == (str(tmp_path / "checkpoint"), str(tmp_path / "drafter"))
    assert chosen.served_name == "checkpoint"
    hub = absolute(ServeOptions(model="org/model"))
    assert (hub.model, hub.adapter, hub.served_name) == ("org/model", "default", "org/model")


def test_a_file_in_a_hubs_cache_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is a link to one that is named by its contents."""
    (tmp_path / "0a1b2c").write_bytes(b"GGUF")
    (tmp_path / "tiny.gguf").symlink_to("0a1b2c")
    monkeypatch.chdir(tmp_path)
    source = find_model(str(absolute(ServeOptions(model="tiny.gguf")).model))
    assert (source.name, source.gguf_path) == ("tiny", tmp_path / "tiny.gguf")


@pytest.mark.parametrize("part", ["qwen", "qwen.1", "qwen/", "qwen.gguf", "here/../qwen"])
def test_a_name_does_not_depend_on_what_lies_where_it_is_asked_for(tmp_path: Path, part: str) -> None:
    name = "qwen.1" if part == "qwen.1" else "qwen"
    assert ServeOptions(model=f"~/no/such/{part}").served_name == name
    assert ServeOptions(model=f"{tmp_path}/{part}").served_name == name
    (tmp_path / "here").mkdir()
    (tmp_path / part).mkdir()
    assert ServeOptions(model=f"{tmp_path}/{part}").served_name == name


def test_a_folder_in_a_hubs_cache_is_called_by_its_id() -> None:
    path = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca"
    assert ServeOptions(model=path).served_name == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("fields", [{"replica": 2}, {"replicas": 0}, {"drafts": "some"}, {"dtype": "int3"}])
def test_options_of_a_config_file_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServeOptions(**fields)


@pytest.mark.parametrize("name", ["wake_seconds", "downscale_to_zero_delay_s"])
def test_what_only_a_model_that_sleeps_needs_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs min_replicas 0"):
        ServeOptions(max_replicas=2, **{name: 5.0})
    assert ServeOptions(max_replicas=2, min_replicas=0, **{name: 5.0}).sleeps


def test_which_cluster_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running_cluster() is None
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"localhost:{there.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert running_cluster() == address
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS")
    assert running_cluster() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    assert running_cluster() is None, "the note of a cluster that is gone"
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_cluster() == address
        monkeypatch.delenv("RAY_TMPDIR")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert running_cluster() == address, "Ray keeps its files there too"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="no Ray cluster runs here"):
        running_cluster()


def test_a_cluster_that_is_joined_has_its_own_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def join(address: str | None, say: Any, *_: Any) -> Iterator[None]:
        raise ConfigError(f"joined {address}")
        yield

    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(deploy, "ray_cluster", join)
    serves = ServeOptions(model=str(tiny_checkpoint(tmp_path / "model")), adapter="none")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"^joined {re.escape(address)}$"):
            deploy.up(UpOptions(serve=serves, host="10.1.2.3"))


def test_what_a_start_waits_for_is_told(server: Server) -> None:
    assert unhealthy(f"{server.url}/health") is None
    assert unhealthy(f"{server.url}/nowhere") == f"{server.url}/nowhere, which answers 404"
    nobody = f"http://127.0.0.1:{free_port()}/health"
    assert "refused" in (unhealthy(nobody) or "")


@pytest.mark.skipif(shutil.which("wget") is None, reason="the image has wget, this system has none")
def test_the_images_own_check_of_health(server: Server) -> None:
    dockerfile = (REPOSITORY / "manifests/image/Dockerfile").read_text(encoding="utf-8")
    (check,) = (line for line in dockerfile.splitlines() if line.startswith("HEALTHCHECK"))
    *words, url = json.loads(check.partition(" CMD ")[2])
    environment = {**os.environ, "http_proxy": f"http://127.0.0.1:{free_port()}"}  # as Docker hands on a user's

    def status(base: str) -> int:
        asked = [*words, url.replace("http://127.0.0.1:8000", base)]
        return subprocess.run(asked, env=environment, timeout=60).returncode

    assert status(server.url) == 0
    assert status(f"{server.url}/nowhere") != 0
    assert status(f"http://127.0.0.1:{free_port()}") != 0


def test_status_of_a_running_server(server: Server) -> None:
    result = tidar("status", "--address", server.url)
    assert result.exit_code == 0, result.output
    assert "tiny-adapter, block length 4" in result.output
    assert "float32 on cpu" in result.output
    assert "tokens/s" in result.output
    assert "nothing answers" in refused("status", "--address", f"http://127.0.0.1:{free_port()}")


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(server: Server) -> None:
    for key in ("schlüssel", "se\ncret", "se\x00cret"):
        assert (
            refused("status", "--address", server.url, "--key", key)
            == "the key holds a character that no header can carry: write it in ASCII"
        )
    assert tidar("status", "--address", server.url, "--key", " secret\n").exit_code == 0


def test_status_asks_this_machine_past_any_proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    assert tidar("status", "--address", server.url).exit_code == 0


def test_status_on_a_terminal_goes_on_until_ctrl_c(server: Server, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    process = subprocess.Popen(
        command("status", "--address", server.url), stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background may ignore it
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while said.count(b"tokens/s") < 3:  # drawn anew every second
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
    assert b"Traceback" not in said


@pytest.mark.parametrize("moment", ["starting Ray", "reading"])
def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, moment: str) -> None:
    model, _ = tiny_model(tmp_path)
    server = start(tmp_path, "--model", str(model), "--adapter", "none", "--device", "cpu")
    try:
        wait_for_text(server, moment)
        assert server.interrupt() == 0
        psutil.wait_procs(server.processes(), timeout=20)  # workers take a moment to notice
        assert server.processes() == []
        assert server.log.read_text().splitlines()[-1] == "stopped"
    finally:
        kill_all(server.processes())


def test_a_line_is_said_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []

    class Unbuffered(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, piece: Any) -> int:
            pieces.append(bytes(piece))
            return len(piece)

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Unbuffered(), write_through=True))  # as PYTHONUNBUFFERED has it
    deploy.say_now("starting Ray")
    assert [piece for piece in pieces if piece] == [b"starting Ray\n"]


def test_an_interrupt_that_is_put_off() -> None:
    done = []

    def interrupted(interrupts: Interrupts, times: int) -> None:
        with interrupts.put_off():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                done.append("went on")

    with Interrupts() as interrupts:
        with interrupts.put_off():
            done.append("no interrupt")
        with pytest.raises(KeyboardInterrupt):
            interrupted(interrupts, times=1)
        assert done == ["no interrupt", "went on"]
        with pytest.raises(KeyboardInterrupt):
            interrupted(interrupts, times=1)
        assert done == ["no interrupt", "went on"], "the second interrupt of all"
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupted(interrupts, times=2)
    assert done == ["no interrupt", "went on", "went on"]


def test_python_does_not_wait_for_what_runs_beside(tmp_path: Path) -> None:
    code = "from threading import Event; from cluster.operate.deploy import beside; "
    code += "beside(Event().wait, 'stuck'); print('end')"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_a_cluster_of_our_own_leaves_rays_port_to_others() -> None:
    usual = parameter.RayParams().dashboard_agent_listen_port
    assert usual
    with spare_ray():
        assert parameter.RayParams().dashboard_agent_listen_port == 0
    assert parameter.RayParams().dashboard_agent_listen_port == usual


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that is not ignored, as one of them is where the tests run under nohup."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def test_an_interrupt_is_never_lost(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Careless:
        def __del__(self) -> None:
            signal.raise_signal(number)  # Python drops what is raised here

    with Interrupts() as interrupts:
        interrupts.check()
        Careless()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        interrupts.ignore()
        signal.raise_signal(number)
        assert told == [], "the user has no use for Python's own word on it"
    assert signal.getsignal(number) is signal.default_int_handler
    assert sys.unraisablehook == told.append


def test_a_terminal_that_closes_ends_nothing_that_nohup_started() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            interrupts.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("host", "keys", "told"),
    [("127.0.0.1", None, False), ("0.0.0.0", None, True), ("::", None, True), ("0.0.0.0", "keys.txt", False)],
)
def test_who_serves_everybody_is_told_so(
    host: str, keys: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.app, "engine_names", lambda options: {})
    said: list[str] = []
    deploy.announce("http://127.0.0.1:8000", UpOptions(host=host, serve=ServeOptions(api_keys=keys)), said.append)
    assert any("whoever reaches this port may use it" in line for line in said) is told
