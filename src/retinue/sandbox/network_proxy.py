"""The HTTP proxy of a sandboxed run that may reach some hosts: one proxy per run, on a unix socket.

Runs in the supervisor's process with a list of allowed hosts. Accepts CONNECT and plain `http://` requests. Names are
resolved and addresses checked here, as for `web_fetch`, so the sandbox needs no DNS and reaches no private address.
The content of a tunnel is not inspected. The owner of the proxy closes it, and all its connections with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h11

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError, ToolError
from retinue.core.events import Warned
from retinue.core.network import Hosts, allows_host, canonicalize_name
from retinue.core.ports import Emit
from retinue.http.server import MAX_HEAD_BYTES, HttpError, ServerConnection
from retinue.sandbox.byte_streams import copy_bytes
from retinue.tools.dialer import Dialer, PrivateAddress, Streams, dial_host

TOOL = "network"
SOCKET = "proxy"
MAX_REASONS = 20
NOTE = "[refused: {reasons}. This run may reach: {hosts}]"
HEAD_SECONDS = 20.0
DIAL_SECONDS = 30.0
IDLE_SECONDS = 300.0
MAX_CONNECTIONS = 64
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@/?#\\]+)(?::([0-9]{1,5}))?")
_URL = re.compile(r"http://([^/?#]+)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
# Hop-by-hop headers, and headers that the proxy sets itself.
_DROPPED = {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "trailer", "upgrade", "host"}
TOO_MANY = HttpError(503, f"more than {MAX_CONNECTIONS} connections at once")


@dataclass(frozen=True)
class Route:
    """A checked request: its host and port, and the data to forward.

    A plain request has a `head` for the host, followed by `body_bytes` of body. A tunnel has no head."""

    host: str
    port: int
    head: bytes | None = None
    body_bytes: int = 0


class RunProxy:
    """The proxy of one run. Its socket is in the run's folder and is mounted into the sandbox.

    The user learns of a refused request at once, the model by a note after the output of the failed command."""

    def __init__(self, folder: Path, hosts: Hosts, emit: Emit, *, dialer: Dialer) -> None:
        self.path = folder / SOCKET
        self._hosts, self._emit, self._dialer = hosts, emit, dialer
        self._tasks = TaskOwner()
        self._server: asyncio.Server | None = None
        self._known_reasons: set[str] = set()
        self._pending: list[str] = []

    async def open(self) -> None:
        """Listen on the socket, which only this user can open. Raises RetinueError. Close the proxy afterwards, even if
        this fails or is cancelled."""
        try:
            await self._listen()
        except OSError as error:
            raise RetinueError(f"the proxy to the hosts of this run cannot be opened: {error}") from None

    async def _listen(self) -> None:
        if not hasattr(os, "O_PATH"):
            raise OSError("hosts can be reached from a sandbox on Linux only")
        self.path.unlink(missing_ok=True)
        # Bind through a descriptor, because the path may be too long for a socket.
        folder = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"/proc/self/fd/{folder}/{self.path.name}")
            self.path.chmod(0o600)
            self._server = await asyncio.start_unix_server(
                self._accept, sock=listening, limit=MAX_HEAD_BYTES, start_serving=False
            )
        except BaseException:
            listening.close()
            raise
        finally:
            os.close(folder)
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.close(None)
        self.unlink_socket()

    def unlink_socket(self) -> None:
        """Remove the socket's name. A sandbox that has started keeps the mounted socket, and a killed host leaves no
        file."""
        with suppress(OSError):
            self.path.unlink()

    def take_refusals(self) -> str:
        """Return the refusals since the last call as a note for the model, or ""."""
        reasons, self._pending = self._pending, []
        hosts = ", ".join(map(str, self._hosts[:MAX_REASONS]))
        return NOTE.format(reasons="; ".join(reasons), hosts=hosts) if reasons else ""

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._tasks) >= MAX_CONNECTIONS
        if len(self._tasks) >= 2 * MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connection = ServerConnection(reader, writer)
        self._tasks.start(_send_refusal(connection, TOO_MANY) if full else self._serve(connection, (reader, writer)))

    async def _serve(self, connection: ServerConnection, here: Streams) -> None:
        """Serve one connection of the run until it ends."""
        there: Streams | None = None
        try:
            head = await connection.read_head(seconds=HEAD_SECONDS)
            if head is None:
                return
            route = plan_route(head)
            there = await self._dial(route)
            if route.head is None:
                connection.start_tunnel()
            else:
                there[1].write(route.head)
            await _copy_both_ways(here, there, body_bytes=None if route.head is None else route.body_bytes)
            here[1].close()
        except HttpError as error:
            await _send_refusal(connection, error)
        except (OSError, TimeoutError):
            pass  # one side has closed the connection, or both were idle for too long
        finally:
            if not here[1].is_closing():
                here[1].transport.abort()
            if there is not None:
                there[1].transport.abort()

    def _deny(self, reason: str) -> HttpError:
        if reason not in self._pending and len(self._pending) < MAX_REASONS:
            self._pending.append(reason)
        if reason not in self._known_reasons and len(self._known_reasons) < MAX_REASONS:
            self._known_reasons.add(reason)
            self._emit(Warned(reason, code="network_refused"))
        return HttpError(403, reason)

    async def _dial(self, route: Route) -> Streams:
        host, port = route.host, route.port
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not allows_host(self._hosts, host, port):
            raise self._deny(f"{target} is not among the hosts that this run may reach")
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return await dial_host(self._dialer, host, port, tls=False, tool=TOOL)
        except PrivateAddress as error:
            raise self._deny(error.reason) from None
        except (ToolError, TimeoutError) as error:
            raise HttpError(502, str(error) or f"{target} did not answer in time") from None


def plan_route(request: h11.Request) -> Route:
    """Parse and check a proxy request. Raises HttpError if it is not a valid request to a proxy."""
    target = request.target.decode("ascii")
    if request.method == b"CONNECT":
        return Route(*_parse_authority(target, None))
    url = _URL.fullmatch(target)
    if url is None:
        raise HttpError(400, "this is a proxy: it takes CONNECT and whole http:// addresses")
    host, port = _parse_authority(url[1], 80)
    named = [(name.decode("ascii"), value) for name, value in request.headers.raw_items()]
    headers = {name.lower(): value for name, value in named}
    if "transfer-encoding" in headers:
        raise HttpError(411, "a body must say its length")
    body_bytes = int(headers.get("content-length", b"0"))  # h11 lets only digits through, and one length
    dropped = _DROPPED | {
        word.strip().lower().decode("latin-1")
        for name, value in named
        if name.lower() == "connection"
        for word in value.split(b",")
    }
    path = url[2] or "/"
    shown = f"[{host}]" if ":" in host else host
    forwarded = h11.Request(
        method=request.method,
        target=path if path.startswith("/") else f"/{path}",
        headers=[
            (b"Host", (shown if port == 80 else f"{shown}:{port}").encode("ascii")),
            *(
                (name.encode("ascii"), value)
                for name, value in named
                if name.lower() not in dropped or name.lower() == "content-length"
            ),
            (b"Connection", b"close"),
        ],
    )
    return Route(host, port, h11.Connection(h11.CLIENT).send(forwarded), body_bytes)


def _parse_authority(text: str, port: int | None) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(text)
    number = port if found is None or found[2] is None else int(found[2])
    host = None if found is None else canonicalize_name(found[1].strip("[]"))
    if host is None or number is None or not 0 < number < 65536:
        raise HttpError(400, "that is not HOST:PORT")
    return host, number


async def _copy_both_ways(here: Streams, there: Streams, *, body_bytes: int | None) -> None:
    """Copy bytes in both directions until the remote side closes, or until both sides are idle for too long.

    Of the body of a plain request, copies exactly `body_bytes`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_SECONDS) as idle:

        def mark_activity() -> None:
            idle.reschedule(loop.time() + IDLE_SECONDS)

        async with TaskOwner() as owner:
            owner.start(copy_bytes(here[0], there[1], limit=body_bytes, on_data=mark_activity))
            await copy_bytes(there[0], here[1], on_data=mark_activity)


async def _send_refusal(connection: ServerConnection, error: HttpError) -> None:
    """Send the reason in the body and in the status line, because most programs show only the status line of a
    CONNECT."""
    text = "".join(letter for letter in str(error) if letter.isascii() and letter.isprintable())[:300]
    body = f"retinue: {text}\n".encode("ascii")
    connection.send_response(error.status, body, {"Content-Type": "text/plain"}, reason=text)
    await connection.hang_up()
