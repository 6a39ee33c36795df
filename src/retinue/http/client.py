"""The client's end of one HTTP/1.1 connection.

Sends a request and reads its response in bounded steps. The caller opens the streams, sets the timeouts and decides
what to do with a response. Redirects and content codings are not handled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import h11

MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_MAX_INTERIM_RESPONSES = 10


class ResponseError(Exception):
    """The peer did not send a usable response."""


class NoResponse(ResponseError):
    """The peer closed the connection without sending any byte of a response."""


class IncompleteResponse(ResponseError):
    """The peer closed the connection in the middle of its response."""


@dataclass(frozen=True)
class HttpResponse:
    """The head of a response. Header names are in lower case."""

    status: int
    reason: str
    headers: dict[str, str]


class ClientConnection:
    """One connection to a server that carries requests one after another. An OSError of the streams passes through."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._received = False

    def send_request(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request. `headers` must include Host. Content-Length is added if there is a body."""
        sent_headers = dict(headers)
        if body:
            sent_headers["Content-Length"] = str(len(body))
        self._received = False
        sent = [self._h11.send(h11.Request(method=method, target=target, headers=list(sent_headers.items())))]
        if body:
            sent.append(self._h11.send(h11.Data(data=body)))
        sent.append(self._h11.send(h11.EndOfMessage()))
        self._writer.write(b"".join(part for part in sent if part))

    async def read_response(self) -> HttpResponse:
        """Read the head of the response, skipping interim responses (1xx)."""
        for _ in range(_MAX_INTERIM_RESPONSES):
            event = await self._read_event()
            if isinstance(event, h11.Response):
                headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
                return HttpResponse(event.status_code, event.reason.decode("latin-1"), headers)
        raise ResponseError("it sends interim responses only")

    async def read_chunk(self) -> bytes:
        """Read the next piece of the body, with its transfer coding removed. Returns b"" at the end."""
        event = await self._read_event()
        if isinstance(event, h11.Data):
            return bytes(event.data) or await self.read_chunk()
        return b""

    async def read_body(self, limit: int) -> bytes:
        """Read the body, or its first `limit` bytes."""
        body = bytearray()
        while len(body) < limit and (chunk := await self.read_chunk()):
            body += chunk
        return bytes(body[:limit])

    async def _read_event(self) -> h11.Event:
        at_end = False
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(_READ_BYTES)
                at_end = not data
                if at_end and not self._received:
                    raise NoResponse("it closed the connection without a response")
                self._received = True
                self._h11.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise (IncompleteResponse if at_end else ResponseError)(str(error)) from None
        assert isinstance(event, h11.Event)
        return event

    def start_next_request(self) -> bool:
        """Prepare the connection for another request.

        Returns False if the response was not read to its end, or if either side closes the connection."""
        try:
            while isinstance(self._h11.next_event(), h11.Data | h11.EndOfMessage):
                pass
        except h11.RemoteProtocolError:
            return False
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        if self._h11.trailing_data[0] or self.is_closed:
            return False
        self._h11.start_next_cycle()
        return True

    @property
    def is_closed(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close the connection at once and drop unsent data."""
        self._writer.transport.abort()
