"""The way out of a walled run that may reach some hosts: an HTTP proxy on a unix socket, one for each run.

It lives with the supervisor and knows one list of hosts. CONNECT and plain `http://` requests are taken; names are
resolved and addresses judged here, as for `web_fetch`, so nothing inside needs DNS and nothing gets to a private
address. What is inside a tunnel is not looked at. Who opens it closes it, and with it every connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from retinue.core.errors import ToolError
from retinue.core.network import Hosts, allows, canonical
from retinue.tools.dialer import Dialer, Hidden, Streams, dial

TOOL = "network"
HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 20.0
DIAL_SECONDS = 30.0
IDLE_SECONDS = 300.0
CONNECTIONS = 64
CHUNK = 64 * 1024
LINGER_SECONDS = 2.0
LINGER_CHUNKS = 64
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_FIRST = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*)")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@/?#\\]+)(?::([0-9]{1,5}))?")
_URL = re.compile(r"http://([^/?#]+)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
# Those of one connection, and those that are ours to say.
_DROPPED = {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "trailer", "upgrade", "host"}


class Refused(Exception):
    """The status and words of an answer that is a no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


TOO_MANY = Refused(503, f"more than {CONNECTIONS} connections at once")


@dataclass(frozen=True)
class Request:
    """One request that was checked: where it goes, what is sent there first, and how many bytes of a body follow.
    A tunnel (`head` None) has no end but that of either side."""

    host: str
    port: int
    head: bytes | None = None
    body: int = 0


class Proxy:
    """Serves one run's hosts on a socket. `refused` is told why somebody was not reached."""

    def __init__(self, hosts: Hosts, refused: Callable[[str], None], *, dialer: Dialer) -> None:
        self._hosts, self._dialer, self._refused = hosts, dialer, refused
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, path: Path) -> None:
        """Listens at the path, for nobody but us; raises OSError. Paths may be longer than a socket's name."""
        if not hasattr(os, "O_PATH"):
            raise OSError("hosts can be reached from behind a wall on Linux only")
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            listening.bind(f"/proc/self/fd/{folder}/{path.name}")
            path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._take, sock=listening, limit=HEAD_BYTES)
        except BaseException:
            listening.close()
            raise
        finally:
            os.close(folder)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._tasks) >= CONNECTIONS
        if len(self._tasks) >= 2 * CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(_refuse((reader, writer), TOO_MANY) if full else self._serve((reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, here: Streams) -> None:
        """One connection of the run, to its end."""
        there: Streams | None = None
        try:
            request = await _request(here[0])
            there = await self._dial(request)
            await _exchange(request, here, there)
            here[1].close()
        except Refused as no:
            await _refuse(here, no)
        except (OSError, EOFError, TimeoutError):
            here[1].transport.abort()  # either side went away, or said nothing for too long
        except asyncio.CancelledError:
            here[1].transport.abort()
            raise
        finally:
            if there is not None:
                there[1].transport.abort()

    def _no(self, why: str) -> Refused:
        self._refused(why)
        return Refused(403, why)

    async def _dial(self, request: Request) -> Streams:
        host, port = request.host, request.port
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not allows(self._hosts, host, port):
            raise self._no(f"{target} is not among the hosts that this run may reach")
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return await dial(self._dialer, host, port, tls=False, tool=TOOL)
        except Hidden as error:
            raise self._no(str(error).removeprefix(f"{TOOL}: ")) from None
        except (ToolError, TimeoutError) as error:
            raise Refused(502, str(error) or f"{target} did not answer in time") from None


async def _request(reader: asyncio.StreamReader) -> Request:
    try:
        async with asyncio.timeout(HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the head of a request is larger than {HEAD_BYTES} bytes") from None
    except TimeoutError:
        raise Refused(408, "no request came") from None
    return parse(head)


def parse(head: bytes) -> Request:
    """The request of a head; Refused for what is no request to a proxy, or could be read in two ways."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = _FIRST.fullmatch(first)
    fields = [_FIELD.fullmatch(each) for each in lines]
    if line is None or None in fields:
        raise Refused(400, "this is no HTTP/1.1 request")
    method, target = line.groups()
    if method == "CONNECT":
        return Request(*_authority(target, None))
    url = _URL.fullmatch(target)
    if url is None:
        raise Refused(400, "this is a proxy: it takes CONNECT and whole http:// addresses")
    host, port = _authority(url[1], 80)
    named = [(field[1].lower(), field[1], field[2].strip()) for field in fields if field is not None]
    body = _length(named)
    dropped = _DROPPED | {
        word.strip().lower() for name, _, value in named if name == "connection" for word in value.split(",")
    }
    path = url[2] or "/"
    kept = [f"{spelled}: {value}" for name, spelled, value in named if name not in dropped or name == "content-length"]
    shown = f"[{host}]" if ":" in host else host
    said = [
        f"{method} {path if path.startswith('/') else f'/{path}'} HTTP/1.1",
        f"Host: {shown if port == 80 else f'{shown}:{port}'}",
        *kept,
        "Connection: close",
    ]
    return Request(host, port, "\r\n".join([*said, "", ""]).encode("latin-1"), body)


def _authority(text: str, port: int | None) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(text)
    number = port if found is None or found[2] is None else int(found[2])
    host = None if found is None else canonical(found[1].strip("[]"))
    if host is None or number is None or not 0 < number < 65536:
        raise Refused(400, "that is no host and port")
    return host, number


def _length(named: list[tuple[str, str, str]]) -> int:
    lengths = [value for name, _, value in named if name == "content-length"]
    if any(name == "transfer-encoding" for name, _, _ in named):
        raise Refused(411, "a body must say its length")
    if not lengths:
        return 0
    if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,15}", lengths[0]):
        raise Refused(400, "a body must say its length, once")
    return int(lengths[0])


async def _exchange(request: Request, here: Streams, there: Streams) -> None:
    """Both ways at once, until the far side is done or nothing has come from either for too long."""
    if request.head is None:
        here[1].write(ESTABLISHED)
    else:
        there[1].write(request.head)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_SECONDS) as idle:

        def alive() -> None:
            idle.reschedule(loop.time() + IDLE_SECONDS)

        up = asyncio.create_task(_pump(here[0], there[1], alive, None if request.head is None else request.body))
        try:
            await _pump(there[0], here[1], alive, None)
        finally:
            up.cancel()
            await asyncio.wait([up])


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, alive: Callable[[], None], most: int | None
) -> None:
    """What one side says, to the other; of the body of a request, exactly as much as its head says."""
    try:
        while most is None or most > 0:
            data = await reader.read(CHUNK if most is None else min(CHUNK, most))
            if not data:
                break
            alive()
            writer.write(data)
            await writer.drain()
            most = None if most is None else most - len(data)
        if most is None and writer.can_write_eof():
            writer.write_eof()
    except OSError:
        return


async def _refuse(here: Streams, no: Refused) -> None:
    """Says no, and hears a little more of what was sent meanwhile: who closes at once takes the answer back."""
    reader, writer = here
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            writer.write(_answer(no))
            await writer.drain()
            writer.write_eof()
            for _ in range(LINGER_CHUNKS):
                if not await reader.read(CHUNK):
                    break
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def _answer(no: Refused) -> bytes:
    """The words stand in the first line too: of an answer to CONNECT most programs show no more."""
    text = "".join(letter for letter in str(no) if letter.isascii() and letter.isprintable())[:300]
    head = f"HTTP/1.1 {no.status} {text}\r\nContent-Type: text/plain\r\nContent-Length: {len(text) + 10}\r\n"
    return f"{head}Connection: close\r\n\r\nretinue: {text}\n".encode("ascii")
