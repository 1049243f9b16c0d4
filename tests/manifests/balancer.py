"""A load balancer before the nodes of a cluster, as a Service of Kubernetes is one: it chooses a node for a connection,
not for a request, and gives none to a node whose proxy says no at `/-/healthz`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

LOOK_SECONDS = 0.5
START_SECONDS = 120


@dataclass
class Balancer:
    """`ports` are those of the nodes' proxies, `url` is its own base, `open` counts connections by port."""

    ports: tuple[int, ...]
    url: str = ""
    healthy: tuple[int, ...] = ()
    open: Counter[int] = field(default_factory=Counter)

    async def look(self) -> None:
        """Ask every proxy whether it takes connections."""
        found = []
        async with httpx.AsyncClient(timeout=5, headers={"connection": "close"}) as client:
            for port in self.ports:
                with suppress(httpx.HTTPError):
                    answer = await client.get(f"http://127.0.0.1:{port}/-/healthz")
                    found += [port] if answer.status_code == 200 else []
        self.healthy = tuple(found)

    async def look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to the node that has the fewest, until either side ends it."""
        port = min(self.healthy, key=lambda port: self.open[port])
        self.open[port] += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as both:
                both.create_task(copy(reader, far_writer))
                both.create_task(copy(far_reader, writer))
        finally:
            self.open[port] -= 1
            writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balancer(*ports: int) -> AsyncIterator[Balancer]:
    """A load balancer before these ports of this machine while the block runs. It begins when all of them say yes."""
    made = Balancer(ports)
    async with asyncio.timeout(START_SECONDS):
        while made.healthy != ports:
            await made.look()
            await asyncio.sleep(LOOK_SECONDS)
    async with await asyncio.start_server(made.carry, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        looking = asyncio.create_task(made.look_on())
        try:
            yield made
        finally:
            looking.cancel()
