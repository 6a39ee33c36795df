"""The way from a walled run to the hosts it may reach: the run's own proxy, on a socket that is mounted into its wall.

The proxy comes from outside (a runtime knows no tool); here it gets its place, and what it refuses is told to the user
at once and to the model behind the words of the command that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.core.events import Warned
from retinue.core.network import Hosts, is_full
from retinue.core.ports import Link

Reach = Literal["none", "hosts", "full"]
SOCKET = "proxy"
MOST_TOLD = 20
NOTE = "[refused: {reasons}. This run may reach: {hosts}]"
CHUNK = 64 * 1024


class Proxy(Protocol):
    async def open(self, path: Path) -> None:
        """Listens there; raises OSError."""
        ...

    async def close(self) -> None: ...


Proxies = Callable[[Hosts, Callable[[str], None]], Proxy]


def reach_of(hosts: Hosts) -> Reach:
    return "full" if is_full(hosts) else "hosts" if hosts else "none"


class Gate:
    """Entered before the run's process is started, left when it is gone. `path` is the socket."""

    def __init__(self, own: str, hosts: Hosts, link: Link, proxies: Proxies) -> None:
        self.path = Path(own, SOCKET)
        self._hosts, self._link = hosts, link
        self._proxy = proxies(hosts, self._refused)
        self._told: set[str] = set()
        self._pending: list[str] = []

    async def __aenter__(self) -> Gate:
        try:
            await self._proxy.open(self.path)
        except OSError as error:
            raise RetinueError(f"the proxy to the hosts of this run cannot be opened: {error}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._proxy.close()
        self.vanish()

    def vanish(self) -> None:
        """Takes the socket's name away. Behind a wall that stands it is there all the same, and whoever kills us leaves
        nothing behind."""
        with suppress(OSError):
            self.path.unlink()

    def note(self) -> str:
        """Return what was refused since the last time, in words for the model."""
        reasons, self._pending = self._pending, []
        hosts = ", ".join(map(str, self._hosts[:MOST_TOLD]))
        return NOTE.format(reasons="; ".join(reasons), hosts=hosts) if reasons else ""

    def _refused(self, why: str) -> None:
        if why not in self._pending and len(self._pending) < MOST_TOLD:
            self._pending.append(why)
        if why not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(why)
            self._link.emit(Warned(why, code="network_refused"))


async def forward(path: str) -> int:
    """Listen, in the tool server, on the loopback of its own namespace for programs that cannot speak to a socket by
    its path, and pass bytes on. Judges nothing: the other end does. Returns the port."""
    tasks = TaskOwner()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(_pass_on(path, reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _pass_on(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    far = None
    try:
        far_reader, far = await asyncio.open_unix_connection(path)
        async with TaskOwner() as owner:
            owner.start(_pump(reader, far))
            await _pump(far_reader, writer)
    except OSError:
        return
    finally:
        for end in (writer, far):
            if end is not None:
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
