"""Web servers on loopback that send what a test says, and a Dialer for which they are the internet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from retinue.tools.dialer import LINE_BYTES, Streams
from tests.http.loopback import LoopbackServer

PUBLIC = "93.184.216.34"


def answer(body: bytes, kind: str = "text/html", *, status: str = "200 OK", **headers: str) -> bytes:
    """A whole response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *([f"Content-Type: {kind}"] if kind else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def moved(to: str, status: str = "302 Found") -> bytes:
    return answer(b"", "", status=status, Location=to)


class Web(LoopbackServer):
    """The internet: `names` are the addresses of each host (public unless said), all served by one server.

    `pages` are raw answers by path; one that ends with None says nothing more and keeps the connection open."""

    def __init__(self, pages: dict[str, bytes | Sequence[bytes | None]], **names: Sequence[str]) -> None:
        super().__init__()
        self._pages = pages
        self._names = {name.replace("_", "."): addresses for name, addresses in names.items()}
        self.asked: list[str] = []
        self.resolved: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        return self._names.get(host, [PUBLIC])

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        self.dialled.append((address, port))
        return await asyncio.open_connection("127.0.0.1", self.port, limit=LINE_BYTES)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            said = self._pages.get(head.split()[1], answer(b"no", status="404 Not Found"))
            for piece in [said] if isinstance(said, bytes) else said:
                if piece is None:
                    self.waiting.set()
                    await reader.read()
                    self.closed.set()
                    return
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            self.closed.set()
