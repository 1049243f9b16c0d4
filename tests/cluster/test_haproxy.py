"""What Serve is told of the HAProxy that stands before it."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import haproxy
from cluster.haproxy import free_ports, haproxy_settings
from tests.servers import Server, running, start, tiny_model
from tidar_core.config import ConfigError


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")


def test_each_has_files_and_ports_of_its_own_and_leaves_none() -> None:
    with haproxy_settings("127.0.0.1") as one, haproxy_settings("0.0.0.0") as other:
        assert one["RAY_SERVE_ENABLE_HA_PROXY"] == other["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        paths = [Path(settings[name]) for settings in (one, other) for name in one if settings[name].startswith("/")]
        assert len(set(paths)) == len(paths) == 10
        assert all(len(str(path)) < 40 for path in paths), "Serve makes sockets some seventy characters longer"
        directories = {path if path.is_dir() else path.parent for path in paths}
        assert len(directories) == 2
        assert all(directory.stat().st_mode & 0o077 == 0 for directory in directories), "nobody else gets at its socket"
    assert not any(directory.exists() for directory in directories)


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.mark.parametrize("host", ["::1", "10.1.2.3", "localhost"])
def test_none_on_an_address_where_it_would_not_find_the_ingress(host: str) -> None:
    with pytest.raises(ConfigError, match="unset it"), haproxy_settings(host):
        pass


def test_none_where_serve_has_none_for_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="unset it"), haproxy_settings("127.0.0.1"):
        pass


def test_none_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY")
    with haproxy_settings("127.0.0.1") as settings:
        assert settings == {}


def test_a_server_has_it_in_front(tmp_path: Path) -> None:
    model, adapter = tiny_model(tmp_path)
    words = ("--model", str(model), "--adapter", str(adapter), "--dtype", "float32", "--device", "cpu")
    with running(start(tmp_path, *words)) as server:
        body = {"prompt": "The quick", "max_tokens": 20, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 20
        check_front(server)


def check_front(server: Server) -> None:
    (found,) = [process for process in server.processes() if process.name() == "haproxy"]
    listening: Any = {connection.laddr.port for connection in found.net_connections() if connection.status == "LISTEN"}
    assert int(server.url.rpartition(":")[2]) in listening
