"""As much of HTTP/1.1 as a door and the collector need, everything bounded: a door answers one request a connection,
the collector as many as come.

Knows no routes and no commands. What a peer sends is read only as far as it is asked for: the head first, the body
when whoever asks for it has seen that the head is in order.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

MAX_HEAD = 16 * 1024
MAX_BODY = 1024 * 1024
READ_SECONDS = 10.0
LINGER_SECONDS = 1.0
_REQUEST = re.compile(r"([A-Z]{1,20}) (/[\x21-\x7e]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
_LENGTH = re.compile(r"[0-9]{1,12}")


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class Head:
    """A request without its body; names of headers in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    version: str = "1.1"

    @property
    def last(self) -> bool:
        """Whether the peer wants the connection closed after this one."""
        words = self.headers.get("connection", "").lower()
        return "close" in words or (self.version == "1.0" and "keep-alive" not in words)


async def read_head(reader: asyncio.StreamReader, *, idle: float | None = None) -> Head | None:
    """None when the peer went away without asking anything. `idle` seconds are given to one who has asked before; when
    they are over, it counts as gone."""
    try:
        async with asyncio.timeout(idle or READ_SECONDS):
            data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the head of the request is larger than {MAX_HEAD} bytes") from None
    except TimeoutError:
        if idle is not None:
            return None
        raise Refused(408, "the head of the request did not come in time") from None
    first, *lines = data[:-4].decode("latin-1").split("\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise Refused(400, "this is not a request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise Refused(400, "a header of the request is malformed")
        name = header[1].lower()
        if name in headers:
            raise Refused(400, f"the header {name} is given twice")
        headers[name] = header[2].strip(" \t")
    target = urlsplit(request[2])
    return Head(request[1], target.path, _query(target.query), headers, first[-3:])


def _query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=10, errors="strict")
    except ValueError:
        raise Refused(400, "the query of the address is malformed") from None
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused(400, "a parameter of the address is given twice")
    return found


def check_local(head: Head, hosts: frozenset[str], what: str) -> None:
    """Refuses who came by another name of this machine, or by a page of somebody else's, before the body is read."""
    if head.headers.get("host") not in hosts:
        raise Refused(403, f"{what} is not open under that Host")
    origin = head.headers.get("origin")
    if origin is not None and origin.removeprefix("http://") not in hosts:
        raise Refused(403, f"{what} is not open to that Origin")


def body_length(head: Head, most: int = MAX_BODY) -> int:
    """How long the JSON body is, if its head is in order: nothing of it has been read yet."""
    if "transfer-encoding" in head.headers or "content-length" not in head.headers:
        raise Refused(411, "give the length of the body in Content-Length")
    if head.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "the body must not be compressed")
    if head.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the body must be application/json")
    length = head.headers["content-length"]
    if not _LENGTH.fullmatch(length):
        raise Refused(400, "Content-Length is not a number")
    if int(length) > most:
        raise Refused(413, f"the body is larger than {most} bytes")
    return int(length)


async def read_body(reader: asyncio.StreamReader, head: Head, *, most: int = MAX_BODY) -> bytes:
    """The JSON body of a request whose head is in order."""
    return await read_rest(reader, body_length(head, most))


async def read_rest(reader: asyncio.StreamReader, length: int) -> bytes:
    """The body, of which the length is known."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise Refused(400, "the body is shorter than Content-Length says") from None
    except TimeoutError:
        raise Refused(408, "the body did not come in time") from None


def response(status: int, body: bytes, **headers: str) -> bytes:
    """A whole response, after which the connection is closed."""
    return start(status, **{"Content-Length": str(len(body))}, **headers) + body


def start(status: int, **headers: str) -> bytes:
    """The head of a response."""
    fixed = {
        "Content-Type": "application/json",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in {**fixed, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """A piece of a response whose length nobody knows yet; an empty one is its end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ends a connection so that the peer can still read the answer, also one who is in the middle of sending."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(MAX_HEAD):
                pass
    except (TimeoutError, OSError):
        pass
    writer.close()
