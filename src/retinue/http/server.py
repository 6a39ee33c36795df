"""The server's end of one HTTP/1.1 connection.

Reads the head of a request first. Reads the body only when the caller asks for it, so that a request with a wrong
Host, token or size is refused before its body arrives. Opens no socket and knows no routes.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

import h11

MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 1024 * 1024
READ_SECONDS = 10.0
LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 1024
_MAX_PARAMETERS = 10
_VERSIONS = (b"1.0", b"1.1")
# h11 accepts bare line feeds and folded headers. Other parsers read them differently, so we refuse them.
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class HttpError(Exception):
    """A request to be answered with the error `status`, and with `headers` if any."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class HttpRequest:
    """The head of a request. Header names are in lower case, and each name occurs once."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


def parse_head(head: bytes, connection: h11.Connection | None = None) -> h11.Request:
    """Parse the head of a request, up to and including the empty line. Raises HttpError if the head is malformed."""
    if _AMBIGUOUS.search(head):
        raise HttpError(400, "a line of the request is folded, or ends without a carriage return")
    connection = connection or h11.Connection(h11.SERVER)
    try:
        connection.receive_data(head)
        request = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise HttpError(400, f"the request is malformed: {error}") from None
    if not isinstance(request, h11.Request) or request.http_version not in _VERSIONS:
        raise HttpError(400, "this is not a request of HTTP/1.1")
    return request


def check_local_request(request: HttpRequest, hosts: frozenset[str], name: str) -> None:
    """Raise HttpError if Host is not in `hosts` or the request comes from a foreign web page (Origin)."""
    if request.headers.get("host") not in hosts:
        raise HttpError(403, f"{name} is not open under that Host")
    origin = request.headers.get("origin")
    if origin is not None and origin.removeprefix("http://") not in hosts:
        raise HttpError(403, f"{name} is not open to that Origin")


def check_bearer_token(request: HttpRequest, token: str) -> None:
    """Raise HttpError if the request does not have the token in its Authorization header."""
    if not has_bearer_token(request.headers.get("authorization", ""), token):
        raise HttpError(401, "the token is missing or wrong", **{"WWW-Authenticate": "Bearer"})


def has_bearer_token(authorization: str, token: str) -> bool:
    """Return True if an Authorization header has the token. The time that this takes tells nothing about the token."""
    scheme, _, given = authorization.partition(" ")
    return hmac.compare_digest(given.strip().encode(), token.encode()) and scheme.lower() == "bearer"


class ServerConnection:
    """One accepted connection. With `keep_alive`, it takes a further request after each complete response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep_alive: bool = False) -> None:
        self._reader, self._writer = reader, writer
        self._keep_alive = keep_alive
        self._h11 = h11.Connection(h11.SERVER)
        self._method = b""

    # Reading

    async def read_head(self, *, seconds: float | None = None, idle_seconds: float | None = None) -> h11.Request | None:
        """Read the head of the next request.

        Returns None if the peer closed the connection, or sent nothing for `idle_seconds` after an earlier request.
        """
        try:
            async with asyncio.timeout(idle_seconds or seconds or READ_SECONDS):
                head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes") from None
        except TimeoutError:
            if idle_seconds is not None:
                return None
            raise HttpError(408, "the head of the request did not come in time") from None
        request = parse_head(head, self._h11)
        self._method = request.method
        return request

    async def read_request(self, *, idle_seconds: float | None = None) -> HttpRequest | None:
        """Read the head of the next request with `read_head`. Raises HttpError for a duplicate header or bad target."""
        head = await self.read_head(idle_seconds=idle_seconds)
        if head is None:
            return None
        headers: dict[str, str] = {}
        for raw_name, value in head.headers:
            name = raw_name.decode("ascii")
            if name in headers:
                raise HttpError(400, f"the header {name} is given twice")
            headers[name] = value.decode("latin-1")
        path, _, query = head.target.decode("ascii").partition("?")
        if not path.startswith("/"):
            raise HttpError(400, "the target of the request must be a path")
        return HttpRequest(head.method.decode("ascii"), path, _parse_query(query), headers)

    async def read_json_body(self, request: HttpRequest, limit: int = MAX_BODY_BYTES) -> bytes:
        """Read the body, after checking its length and type. Raises HttpError if a check fails."""
        length = _check_json_body(request, limit)
        if self._h11.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise HttpError(400, "the body is shorter than Content-Length says") from None
        except TimeoutError:
            raise HttpError(408, "the body did not come in time") from None
        self._h11.receive_data(body)
        return body

    async def wait_for_peer(self) -> None:
        """Wait until the peer closes the connection, or sends anything before it has the response."""
        await self._reader.read(1)

    # Writing

    @property
    def has_responded(self) -> bool:
        """Return True once the status was sent: then no other response can be sent."""
        return self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def send_response(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, reason: str = ""
    ) -> None:
        """Send a complete response. Its type is JSON unless `headers` set another."""
        head = self._make_head(status, {"Content-Length": str(len(body)), **(headers or {})}, reason)
        has_body = body and self._method != b"HEAD"
        self._write(head, *([h11.Data(data=body)] if has_body else []), h11.EndOfMessage())

    def start_response(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a response. Without a Content-Length, the caller sends the body with `send_chunk`."""
        self._write(self._make_head(status, headers))

    def send_chunk(self, data: bytes) -> None:
        self._write(h11.Data(data=data))

    def end_response(self) -> None:
        self._write(h11.EndOfMessage())

    def start_tunnel(self) -> None:
        """Accept a CONNECT request. From then on both sides use the raw streams."""
        self._write(h11.Response(status_code=200, headers=[], reason=b"Connection established"))

    def _make_head(self, status: int, headers: Mapping[str, str], reason: str = "") -> h11.Response:
        said = {**_HEADERS, **({} if self._keep_alive else {"Connection": "close"}), **headers}
        phrase = reason or HTTPStatus(status).phrase
        return h11.Response(status_code=status, headers=list(said.items()), reason=phrase.encode("ascii"))

    def _write(self, *events: h11.Event) -> None:
        """Send the events in one write, because each write wakes the peer up."""
        data = b"".join(self._h11.send(event) or b"" for event in events)
        if data:
            self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def flush(self, seconds: float) -> None:
        """Wait until all data was handed to the kernel. Raises TimeoutError if the peer does not read within
        `seconds`."""
        self._writer.transport.set_write_buffer_limits(0)
        async with asyncio.timeout(seconds):
            await self._writer.drain()

    # The end of a request, and of the connection

    def start_next_request(self) -> bool:
        """Prepare the connection for another request. Returns False if the connection has to be closed instead."""
        if not self._keep_alive:
            return False
        with suppress(h11.RemoteProtocolError):
            while self._h11.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                pass
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def hang_up(self) -> None:
        """Close the connection, but let the peer read the response first, even if the peer is still sending."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await self._writer.drain()
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._reader.read(_LINGER_BYTES):
                    pass
        except (TimeoutError, OSError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close at once. Data that the peer has not taken yet is dropped."""
        if self.unsent_bytes:
            self._writer.transport.abort()
        else:
            self._writer.close()


def _parse_query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_PARAMETERS, errors="strict"
        )
    except ValueError:
        raise HttpError(400, "the query of the address is malformed") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise HttpError(400, "a parameter of the address is given twice")
    return query


def _check_json_body(request: HttpRequest, limit: int) -> int:
    """Return the length of the body from the headers. Raises HttpError if the length or the type is not acceptable."""
    headers = request.headers
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise HttpError(411, "give the length of the body in Content-Length")
    if headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "the body must not be compressed")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "the body must be application/json")
    length = int(headers["content-length"])  # h11 lets only digits through
    if length > limit:
        raise HttpError(413, f"the body is larger than {limit} bytes")
    return length
