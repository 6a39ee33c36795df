"""Whatever listens on the loopback interface: a port, a task for each connection, and what every request meets first.

Knows no routes: who is built on this answers a request whose Host and Origin are in order. A request that is refused,
and a bug, cost the peer an answer and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod

from retinue.control import http
from retinue.control.http import Head, Refused
from retinue.core.errors import RetinueError
from retinue.protocol.control import Problem, encode

HOST = "127.0.0.1"


class Listener(ABC):
    """`what` is how it is called, `most` how many connections may be open. A connection is kept `idle` seconds for a
    further request; without that, it is for one."""

    def __init__(self, what: str, *, most: int, idle: float | None = None) -> None:
        self._what, self._most, self._idle = what, most, idle
        self._connections: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[asyncio.Server] | None = None
        self._hosts: frozenset[str] = frozenset()

    @abstractmethod
    async def respond(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Writes the answer to a request of which only the head was read; whether the connection goes on."""

    def problem(self, text: str) -> bytes:
        """The body of an answer that says what is wrong."""
        return encode(Problem(text))

    def listen(self, port: int = 0) -> int:
        """Takes this port, or a free one, which it gives back. Whoever connects from now on is answered."""
        try:
            taken = socket.create_server((HOST, port), backlog=self._most)
        except OSError as error:
            where = f"{HOST}:{port}" if port else HOST
            raise RetinueError(f"cannot listen on {where}: {error.strerror or error}") from None
        number: int = taken.getsockname()[1]
        self._hosts = frozenset({f"{HOST}:{number}", f"localhost:{number}"})
        starting = asyncio.start_server(self._accept, sock=taken, limit=http.MAX_HEAD, backlog=self._most)
        self._listening = asyncio.get_running_loop().create_task(starting)
        return number

    async def stop_listening(self) -> None:
        if self._listening is not None:
            (await self._listening).close()

    async def end_connections(self, last_words: float = 0.0) -> None:
        """After so many seconds, if they have not ended by themselves."""
        if self._connections and last_words:
            await asyncio.wait(self._connections, timeout=last_words)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        idle = None
        try:
            while await self._one(reader, writer, idle):
                idle = self._idle
        except OSError:
            pass  # the peer is gone, or takes nothing; nobody is left to tell
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: float | None) -> bool:
        """One request; whether there may be another."""
        try:
            if len(self._connections) > self._most:
                raise Refused(503, f"more than {self._most} connections are open")
            head = await http.read_head(reader, idle=idle)
            if head is None:
                return False
            http.check_local(head, self._hosts, self._what)
            if await self.respond(head, reader, writer):
                return True
        except Refused as refused:
            writer.write(http.response(refused.status, self.problem(str(refused)), **refused.headers))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug here must cost the peer an answer, not the process its runs
            writer.write(http.response(500, self.problem(f"internal error: {type(error).__name__}: {error}")))
        await http.hang_up(reader, writer)
        return False
