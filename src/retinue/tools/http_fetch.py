"""One GET over HTTP/1.1, with everything a stranger may send bounded: head, body, what it unpacks to, redirects, time.

Sends no cookie, no credential and nothing of the environment; keeps no connection. Where it may go is decided at every
hop anew: the list of hosts here, the addresses in `dialing`.
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from retinue.core.errors import ToolError
from retinue.core.network import Hosts, allows, canonical
from retinue.tools.dialer import Dialer, Streams, dial

TOOL = "web_fetch"
SECONDS = 30.0
BODY_BYTES = 2 * 1024 * 1024
REDIRECTS = 5
URL_CHARACTERS = 8192
_CHUNK = 64 * 1024
_MOVED = frozenset({301, 302, 303, 307, 308})
_SAFE = "/%:@!$&'()*+,;=~-._?[]"
_DEFAULTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """A URL that was checked."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _DEFAULTS[self.scheme] else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


@dataclass(frozen=True)
class Page:
    """What came. `cut` says that there was more than we take."""

    url: str
    status: int
    reason: str
    content_type: str
    body: bytes
    cut: bool


async def fetch(url: str, *, hosts: Hosts, dialer: Dialer, seconds: float = SECONDS) -> Page:
    """The page at a URL, after its redirects; raises ToolError with words for the model."""
    target = check_url(url, hosts)
    try:
        async with asyncio.timeout(seconds):
            for _ in range(REDIRECTS + 1):
                page, location = await _get(target, dialer)
                if location is None:
                    return page
                target = _redirected(target, location, hosts)
    except TimeoutError:
        raise ToolError(f"{TOOL}: {target.authority} was not done within {seconds:g} s") from None
    raise ToolError(f"{TOOL}: more than {REDIRECTS} redirects, the last to {target.url}")


def check_url(url: str, hosts: Hosts) -> Target:
    """The URL, if it is one of a web page on a host that may be reached."""
    if len(url) > URL_CHARACTERS or any(char.isspace() or not char.isprintable() or char == "\\" for char in url):
        raise ToolError(f"{TOOL}: the URL is too long, or has spaces, backslashes or control characters in it")
    try:
        parts = urlsplit(url)
        port, name = parts.port, parts.hostname or ""
    except ValueError as error:
        raise ToolError(f"{TOOL}: this is no URL: {error}") from None
    if parts.scheme not in _DEFAULTS:
        raise ToolError(f"{TOOL}: only http:// and https:// URLs can be fetched")
    if "@" in parts.netloc:
        raise ToolError(f"{TOOL}: a URL with a user or password in it is not fetched")
    host = canonical(name)
    if host is None:
        raise ToolError(f"{TOOL}: '{name[:100]}' is no host")
    target = Target(parts.scheme, host, _DEFAULTS[parts.scheme] if port is None else port, _path(parts))
    if not allows(hosts, host, target.port):
        shown = ", ".join(map(str, hosts[:20])) or "none"
        raise ToolError(f"{TOOL}: {target.authority} is not among the hosts that may be fetched: {shown}")
    return target


def _path(parts: SplitResult) -> str:
    query = f"?{quote(parts.query, safe=_SAFE)}" if parts.query else ""
    return (quote(parts.path, safe=_SAFE) or "/") + query


def _redirected(target: Target, location: str, hosts: Hosts) -> Target:
    try:
        return check_url(urljoin(target.url, location.strip()), hosts)
    except (ToolError, ValueError) as error:
        raise ToolError(f"{TOOL}: {target.authority} redirects. {str(error).removeprefix(f'{TOOL}: ')}") from None


async def _get(target: Target, dialer: Dialer) -> tuple[Page, str | None]:
    reader, writer = await dial(dialer, target.host, target.port, tls=target.scheme == "https", tool=TOOL)
    try:
        return await _exchange(target, (reader, writer))
    except (OSError, ssl.SSLError, EOFError, ValueError, asyncio.LimitOverrunError, zlib.error) as error:
        why = str(error) or type(error).__name__
        raise ToolError(f"{TOOL}: {target.authority} did not answer as a web server does: {why[:200]}") from None
    finally:
        writer.transport.abort()  # also when cancelled: nothing is left open, and nobody is waited for


async def _exchange(target: Target, streams: Streams) -> tuple[Page, str | None]:
    reader, writer = streams
    head = (
        f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: retinue\r\n"
        "Accept: text/html, text/*;q=0.9, application/json, application/xml, */*;q=0.1\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode("ascii"))
    status, reason, headers = await _head(reader)
    if status in _MOVED and "location" in headers:
        return Page(target.url, status, reason, "", b"", False), headers["location"]
    body, cut = await _body(reader, headers)
    return Page(target.url, status, reason, headers.get("content-type", ""), body, cut), None


async def _head(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, str]]:
    """The status and headers; answers that only say to wait are passed over."""
    for _ in range(10):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code, _, reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise ValueError("it speaks another protocol")
        fields = (line.partition(":") for line in lines[1:] if line)
        if int(code) >= 200:
            headers = {name.strip().lower(): value.strip() for name, _, value in fields}
            return int(code), "".join(filter(str.isprintable, reason))[:100], headers
    raise ValueError("it only says to wait")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> tuple[bytes, bool]:
    """The body, unpacked, as far as we take it."""
    unpack = _Unpacker(headers.get("content-encoding", "").strip().lower())
    async for piece in _pieces(reader, headers):
        unpack.feed(piece)
        if unpack.full:
            break
    return bytes(unpack.body[:BODY_BYTES]), unpack.full


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").strip().lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0].strip().decode("ascii"), 16):
            if size < 0:
                raise ValueError("a chunk has a negative size")
            async for piece in _exactly(reader, size):
                yield piece
            await reader.readexactly(2)
    elif "content-length" in headers:
        length = headers["content-length"]
        if not (length.isascii() and length.isdigit()):
            raise ValueError("the length of its answer is no number")
        async for piece in _exactly(reader, int(length[:20])):
            yield piece
    else:
        while piece := await reader.read(_CHUNK):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, _CHUNK))
        if not piece:
            raise EOFError("the answer ends in the middle")
        size -= len(piece)
        yield piece


class _Unpacker:
    """Holds no more than we take, however much a few bytes unpack to."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ValueError(f"its answer is packed as {encoding[:20]!r}, which was not asked for")
        self.body = bytearray()
        self._zlib = zlib.decompressobj(wbits=47) if encoding not in ("", "identity") else None
        self._raw = encoding == "deflate"  # some send it without its header

    @property
    def full(self) -> bool:
        return len(self.body) > BODY_BYTES

    def feed(self, piece: bytes) -> None:
        room = BODY_BYTES + 1 - len(self.body)
        if self._zlib is None:
            self.body += piece[:room]
            return
        try:
            self.body += self._zlib.decompress(piece, room)
        except zlib.error:
            if not self._raw or self.body:
                raise
            self._zlib = zlib.decompressobj(wbits=-15)
            self.body += self._zlib.decompress(piece, room)
        self._raw = False
