"""A server on the loopback interface: it binds a port, starts a task for each connection, and checks Host and Origin.

Knows no routes: a subclass answers the requests that pass the checks. A refused request, or a bug in a subclass, costs
the peer an error response and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.http.server import MAX_HEAD_BYTES, HttpError, HttpRequest, ServerConnection, check_local_request

HOST = "127.0.0.1"


class Listener(ABC):
    """A loopback HTTP server.

    `name` is the server's name in error messages. A connection waits `idle_seconds` for a further request; if
    `idle_seconds` is None, a connection takes one request only."""

    def __init__(self, name: str, *, max_connections: int, idle_seconds: float | None = None) -> None:
        self._name, self._max_connections, self._idle_seconds = name, max_connections, idle_seconds
        self._tasks = TaskOwner()
        self._connections = TaskOwner()
        self._listening: asyncio.Task[asyncio.Server] | None = None
        self._hosts: frozenset[str] = frozenset()

    @abstractmethod
    async def respond(self, request: HttpRequest, connection: ServerConnection) -> None:
        """Send the response to `request`, or raise HttpError. Only the head of the request was read so far."""

    def encode_error(self, text: str) -> bytes:
        """Return the body of an error response."""
        return msgspec.json.encode({"error": text.encode("utf-8", "replace").decode()})

    def listen(self, port: int = 0) -> int:
        """Bind `port`, or a free port if it is 0, and return the port number. Starts to answer connections."""
        try:
            bound = socket.create_server((HOST, port), backlog=self._max_connections)
        except OSError as error:
            where = f"{HOST}:{port}" if port else HOST
            raise RetinueError(f"cannot listen on {where}: {error.strerror or error}") from None
        # Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets that name their protocol, and
        # `create_server` names none. Without it, a response in several pieces waits 40 ms for the peer's delayed
        # acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number: int = bound.getsockname()[1]
        self._hosts = frozenset({f"{HOST}:{number}", f"localhost:{number}"})
        starting = asyncio.start_server(self._accept, sock=bound, limit=MAX_HEAD_BYTES, backlog=self._max_connections)
        self._listening = self._tasks.start(starting)
        return number

    async def stop_listening(self) -> None:
        if self._listening is not None:
            (await self._listening).close()

    async def end_connections(self, grace_seconds: float = 0.0) -> None:
        """End all connections, after giving them `grace_seconds` to end by themselves."""
        if grace_seconds:
            await self._connections.wait(grace_seconds)
        await self._connections.close(None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ServerConnection(reader, writer, keep_alive=self._idle_seconds is not None)
        idle_seconds = None
        try:
            while await self._serve_request(connection, idle_seconds):
                idle_seconds = self._idle_seconds
        except OSError:
            pass  # the peer is gone or does not read, so no error response can reach it
        finally:
            connection.close()

    async def _serve_request(self, connection: ServerConnection, idle_seconds: float | None) -> bool:
        """Answer one request. Returns False if it was the last request of the connection."""
        try:
            if len(self._connections) > self._max_connections:
                raise HttpError(503, f"more than {self._max_connections} connections are open")
            request = await connection.read_request(idle_seconds=idle_seconds)
            if request is None:
                return False
            check_local_request(request, self._hosts, self._name)
            await self.respond(request, connection)
            if connection.start_next_request():
                return True
        except HttpError as error:
            self._send_error(connection, error.status, str(error), error.headers)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug here must cost the peer an error, not the process its runs
            self._send_error(connection, 500, f"internal error: {type(error).__name__}: {error}", {})
        await connection.hang_up()
        return False

    def _send_error(self, connection: ServerConnection, status: int, text: str, headers: dict[str, str]) -> None:
        if not connection.has_responded:
            connection.send_response(status, self.encode_error(text), {"Connection": "close", **headers})
