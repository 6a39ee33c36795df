"""Posts to one address, over connections that are kept: an event is a request, a request is answered or has failed."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from retinue.core.errors import ConfigError, RetinueError
from retinue.protocol.reports import ADDRESS

POST_SECONDS = 5.0
MOST = 8
UNUSED_SECONDS = 30.0
BUFFERED = 64 * 1024
ANSWER_BYTES = 64 * 1024
WHAT = f"{ADDRESS}: the address to report to"
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PostFailed(RetinueError):
    """An event that did not arrive, and why."""


class Unwanted(PostFailed):
    """The run has ended for whoever it is reported to: its call was given up, or a person cancelled it."""


class Poster:
    """For `http://HOST:PORT[/PATH]`. What is said of it never names the path, which is a secret."""

    def __init__(self, address: str, route: str) -> None:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme != "http" or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{WHAT} must be http://HOST:PORT, with a path at most")
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(f"{WHAT} is not on this machine: {host}")
        self.where = f"{host}:{port}"
        self._host, self._port = host, port
        self._head = (
            f"POST {parts.path.rstrip('/')}{route} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._free: list[tuple[float, _Connection]] = []
        self._places = asyncio.Semaphore(MOST)

    async def post(self, body: bytes) -> None:
        """Once, within 5 s; raises PostFailed. A kept connection that turns out to be closed is replaced: then nothing
        of the request had been taken, or the receiver knows it by its number."""
        try:
            async with asyncio.timeout(POST_SECONDS), self._places:
                kept = self._kept()
                status = None if kept is None else await self._try(kept, body)
                if status is None:
                    status = await self._try(await self._connect(), body)
        except TimeoutError:
            raise PostFailed(f"no answer from {self.where} within {POST_SECONDS:g} s") from None
        if status is None:
            raise PostFailed(f"{self.where} closed the connection without an answer")
        if not 200 <= status[0] < 300:
            raise (Unwanted if status[0] == 409 else PostFailed)(f"{self.where} answered {status[0]}{status[1]}")

    def close(self) -> None:
        for _, (_, writer) in self._free:
            writer.close()
        self._free = []

    def _kept(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._free:
            since, kept = self._free.pop()
            reader, writer = kept
            if now - since < UNUSED_SECONDS and not reader.at_eof() and not writer.is_closing():
                return kept
            writer.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            return await asyncio.open_connection(self._host, self._port, limit=BUFFERED)
        except OSError as error:
            words = error.strerror or str(error)
            raise PostFailed(f"cannot reach {self.where}: {words.splitlines()[0] if words else 'no reason'}") from None

    async def _try(self, connection: _Connection, body: bytes) -> tuple[int, str] | None:
        """The status and what was said with it; None when the peer closed the connection without a word."""
        reader, writer = connection
        done = False
        try:
            writer.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            words = head.split(b" ", 2)
            if len(words) < 3 or not words[1].isdigit():
                raise PostFailed(f"what answers at {self.where} is no collector")
            length, closes = _about(head)
            said = await reader.readexactly(min(length, ANSWER_BYTES))
            done = not closes and length <= ANSWER_BYTES
            return int(words[1]), _shown(said)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise PostFailed(f"{self.where} broke off its answer") from None
            return None
        except asyncio.LimitOverrunError:
            raise PostFailed(f"what answers at {self.where} is no collector") from None
        except OSError:
            return None
        finally:
            if done:
                self._free.append((asyncio.get_running_loop().time(), connection))
            else:
                writer.close()


def _about(head: bytes) -> tuple[int, bool]:
    """The length of an answer's body, and whether the connection ends with it."""
    length, closes = 0, False
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            length = int(value)
        elif name == b"connection":
            closes = b"close" in value
        elif name == b"transfer-encoding":
            closes = True
    return length, closes


def _shown(said: bytes) -> str:
    text = " ".join(said[:400].decode("utf-8", "replace").split())
    return "" if text in ("", "{}") else f": {text}"
