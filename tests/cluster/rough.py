"""Clients that are slow, silent, too many or too large, and what they leave behind in the server's memory.

python -m tests.cluster.rough --requests 10000
"""

import argparse
import asyncio
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil

from tests import plain_http
from tests.cluster.guarded import Guarded, guarded_server

LARGE = 100 * 2**20
PART = b" " * 65536
RECEIVE_SECONDS = 120


def memory(server: Guarded) -> float:
    """MiB that the server's processes hold for themselves, all together."""
    total = 0
    for process in server.server.processes():
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total / 2**20


def connected(server: Guarded) -> socket.socket:
    url = httpx.URL(server.url)
    made = socket.create_connection((url.host, url.port or 80))
    made.settimeout(RECEIVE_SECONDS)
    return made


def head(server: Guarded, path: str, *lines: str) -> bytes:
    start = (f"POST {path} HTTP/1.1", "Host: tidar", f"Authorization: Bearer {server.key}")
    return "\r\n".join([*start, "Content-Type: application/json", *lines, "", ""]).encode()


def large_body(server: Guarded, stated: bool) -> str:
    """Send 100 MiB, its length stated or not, as far as the server takes it; the status line of the answer."""
    length = f"Content-Length: {LARGE}" if stated else "Transfer-Encoding: chunked"
    with connected(server) as link:
        link.sendall(head(server, "/v1/completions", length))
        part = PART if stated else f"{len(PART):x}\r\n".encode() + PART + b"\r\n"
        try:
            for _ in range(LARGE // len(PART)):
                link.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was sent
        return link.recv(4096).split(b"\r\n")[0].decode()


@contextmanager
def half_open(server: Guarded, count: int) -> Iterator[list[socket.socket]]:
    """Connections that begin a request in different places, and say no more."""
    beginnings = (
        b"",
        b"POST /v1/comp",
        head(server, "/v1/completions", "Content-Length: 1000"),
        head(server, "/v1/completions", "Content-Length: 1000") + b'{"prompt": "a',
        head(server, "/v1/completions", "Transfer-Encoding: chunked") + b"5\r\nab",
    )
    links = [connected(server) for _ in range(count)]
    try:
        for number, link in enumerate(links):
            link.sendall(beginnings[number % len(beginnings)])
        yield links
    finally:
        for link in links:
            link.close()


def slow_reader(server: Guarded, body: bytes, go_on: threading.Event) -> bytes:
    """Read the beginning of a stream, by a socket that takes in little at a time, the rest once `go_on` is set, in
    small pieces with a pause after each; the whole body of the answer. A body that ends early raises."""
    url = httpx.URL(server.url)
    with closing(HTTPConnection(url.host, url.port, timeout=RECEIVE_SECONDS)) as link:
        link.sock = socket.socket()
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        link.sock.settimeout(RECEIVE_SECONDS)
        link.sock.connect((url.host, url.port or 80))
        link.request("POST", "/v1/completions", body, {**server.headers, "Content-Type": "application/json"})
        answer = link.getresponse()
        parts = []
        # Chunks are taken off on the way: a proxy cuts them where its buffer ends, in the middle of a line as well.
        while part := answer.read1(8192):
            parts.append(part)
            go_on.wait(RECEIVE_SECONDS)
            time.sleep(0.001)
    return b"".join(parts)


async def tiny_requests(server: Guarded, count: int, at_once: int = 32) -> Counter[int]:
    """Answers by status of so many completions of one token each."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(count))

    async def ask(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = {"prompt": f"{number}", "max_tokens": 1}
            statuses[(await client.post("/v1/completions", json=body)).status_code] += 1

    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=120) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_once)))
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, guarded_server(Path(directory)) as server:
        asyncio.run(tiny_requests(server, 500))
        before, began = memory(server), time.monotonic()
        for step in range(1, 5):
            statuses = asyncio.run(tiny_requests(server, chosen.requests // 4))
            done, seconds = step * chosen.requests // 4, time.monotonic() - began
            print(f"{done} requests after {seconds:.0f} s: {dict(statuses)}; {memory(server):.0f} MiB")
        for stated in (True, False):
            for _ in range(5):
                print(f"100 MiB, length {'stated' if stated else 'not stated'}: {large_body(server, stated)}")
        with half_open(server, 500):
            print(f"500 half-open connections: health {plain_http.get(f'{server.url}/health').status_code}")
        time.sleep(5)
        print(f"memory: {before:.0f} MiB after the first 500 requests, {memory(server):.0f} MiB at the end")


if __name__ == "__main__":
    main()
