"""Hosts with addresses of their own on this machine: network namespaces on a bridge, whose cables can be pulled.

Needs root and `ip`.
"""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.219.7"


@dataclass(frozen=True)
class Host:
    """A namespace by its name, its address, and the bridge's end of its cable."""

    name: str
    address: str
    cable: str
    bridge: str

    @property
    def words(self) -> tuple[str, ...]:
        """What a command that shall run there begins with."""
        return "ip", "netns", "exec", self.name

    def cut(self) -> None:
        """From now on nothing that is sent to it or by it arrives, and nobody is told."""
        ip("link", "set", self.cable, "nomaster")

    def mend(self) -> None:
        ip("link", "set", self.cable, "master", self.bridge)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, which reach each other and are reached from here."""
    own = secrets.token_hex(3)
    bridge = f"tdr{own}"
    made = [
        Host(f"tidar-{own}-{number}", f"{NETWORK}.{number}", f"tdr{own}-{number}", bridge)
        for number in range(1, count + 1)
    ]
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in made:
            ip("netns", "add", host.name)
            ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host.cable, "master", bridge, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        ip("link", "del", bridge)
