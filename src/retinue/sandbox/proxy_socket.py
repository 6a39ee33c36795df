"""The way from a sandboxed run to the hosts it may reach: its own proxy, on a socket that is mounted into the sandbox.

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
MAX_REASONS = 20
NOTE = "[refused: {reasons}. This run may reach: {hosts}]"
CHUNK = 64 * 1024


class Proxy(Protocol):
    async def open(self, path: Path) -> None:
        """Listen there; raises OSError."""
        ...

    async def close(self) -> None: ...


Proxies = Callable[[Hosts, Callable[[str], None]], Proxy]


def find_reach(hosts: Hosts) -> Reach:
    return "full" if is_full(hosts) else "hosts" if hosts else "none"


class ProxySocket:
    """Entered before the run's process is started, left when it is gone. `path` is the socket."""

    def __init__(self, own: str, hosts: Hosts, link: Link, proxies: Proxies) -> None:
        self.path = Path(own, SOCKET)
        self._hosts, self._link = hosts, link
        self._proxy = proxies(hosts, self._note_refusal)
        self._known_reasons: set[str] = set()
        self._pending: list[str] = []

    async def __aenter__(self) -> ProxySocket:
        try:
            await self._proxy.open(self.path)
        except OSError as error:
            raise RetinueError(f"the proxy to the hosts of this run cannot be opened: {error}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._proxy.close()
        self.unlink_socket()

    def unlink_socket(self) -> None:
        """Remove the name of the socket. A sandbox that has started keeps it; a host that is killed leaves nothing."""
        with suppress(OSError):
            self.path.unlink()

    def take_refusals(self) -> str:
        """Return what was refused since the last time, as a text for the model."""
        reasons, self._pending = self._pending, []
        hosts = ", ".join(map(str, self._hosts[:MAX_REASONS]))
        return NOTE.format(reasons="; ".join(reasons), hosts=hosts) if reasons else ""

    def _note_refusal(self, why: str) -> None:
        if why not in self._pending and len(self._pending) < MAX_REASONS:
            self._pending.append(why)
        if why not in self._known_reasons and len(self._known_reasons) < MAX_REASONS:
            self._known_reasons.add(why)
            self._link.emit(Warned(why, code="network_refused"))


async def forward_connections(path: str) -> int:
    """Listen, in the tool server, on the loopback of its own namespace for programs that cannot speak to a socket by
    its path, and pass bytes on. Judges nothing: the other end does. Returns the port."""
    tasks = TaskOwner()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(_forward_connection(path, reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _forward_connection(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    far = None
    try:
        far_reader, far = await asyncio.open_unix_connection(path)
        async with TaskOwner() as owner:
            owner.start(_copy_bytes(reader, far))
            await _copy_bytes(far_reader, writer)
    except OSError:
        return
    finally:
        for end in (writer, far):
            if end is not None:
                end.close()


async def _copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
