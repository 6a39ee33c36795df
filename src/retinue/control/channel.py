"""Requests to the control server of another process: one connection for each, nothing kept open.

Knows no command; `client` has them. A command whose reply was lost is sent once more with the same key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from retinue.core.errors import RetinueError
from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, Response, ResponseError
from retinue.http.listener import HOST
from retinue.protocol import control as protocol
from retinue.protocol.control import Address, Arguments, Command, StreamCommand
from retinue.protocol.strict_json import encode_body

REPLY_SECONDS = 15.0
SILENT_SECONDS = 20.0
REPLY_BYTES = 256 * 1024 * 1024
ATTEMPTS = 2
R = TypeVar("R")
T = TypeVar("T")


class ControlUnreachable(RetinueError):
    """The process of the control server is gone, or does not answer any more."""


class ReplyLost(ControlUnreachable):
    """The request was sent, but no reply came: it may have taken effect."""


class ControlChannel:
    """The way to the control server at `address`."""

    def __init__(self, address: Address) -> None:
        self.address = address

    async def call(self, command: Command[R], request: Arguments) -> R:
        """Send a command and return its reply. Raises the RetinueError that the server replies with."""
        key = secrets.token_hex(16)
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._call_once(command, request, key)
            except ReplyLost:
                continue
        return await self._call_once(command, request, key)

    async def stream(self, command: StreamCommand, request: Arguments) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a stream. Raises ControlUnreachable if it breaks off."""
        connection = await self._connect()
        try:
            if command.reads:
                response = await self._send(connection, "GET", _make_target(command.path, request))
            else:
                response = await self._send(connection, "POST", command.path, encode_body(request))
            if response.status != 200:
                raise _read_error(response.status, await self._read(connection.read_body(REPLY_BYTES)))
            rest = b""
            while chunk := await self._read(connection.read_chunk(), SILENT_SECONDS):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line
        finally:
            connection.close()

    async def _call_once(self, command: Command[R], request: Arguments, key: str) -> R:
        connection = await self._connect()
        try:
            if command.reads:
                response = await self._send(connection, "GET", _make_target(command.path, request))
            else:
                response = await self._send(connection, "POST", command.path, encode_body(request), key)
            body = await self._read(connection.read_body(REPLY_BYTES))
        finally:
            connection.close()
        if response.status != 200:
            raise _read_error(response.status, body)
        try:
            return msgspec.json.decode(body, type=command.reply)
        except msgspec.MsgspecError:
            raise ReplyLost(f"process {self.address.pid} broke off its reply") from None

    async def _send(
        self, connection: ClientConnection, method: str, target: str, body: bytes = b"", key: str = ""
    ) -> Response:
        headers = {
            "Host": f"{HOST}:{self.address.port}",
            "Authorization": f"Bearer {self.address.token}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        if key:
            headers[protocol.KEY_HEADER] = key
        connection.send_request(method, target, headers, body)
        return await self._read(connection.read_response())

    async def _connect(self) -> ClientConnection:
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                return ClientConnection(*await asyncio.open_connection(HOST, self.address.port))
        except (OSError, TimeoutError):
            raise ControlUnreachable(f"process {self.address.pid} accepts no control connection") from None

    async def _read(self, reading: Awaitable[T], seconds: float = REPLY_SECONDS) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await reading
        except TimeoutError:
            raise ReplyLost(f"process {self.address.pid} does not answer") from None
        except (OSError, NoResponse, IncompleteResponse):
            raise ReplyLost(f"process {self.address.pid} is gone") from None
        except ResponseError:
            raise ControlUnreachable(f"what answers for process {self.address.pid} is no control server") from None


def _make_target(path: str, request: Arguments) -> str:
    query = protocol.encode_query(request)
    return f"{path}?{urlencode(query)}" if query else path


def _read_error(status: int, body: bytes) -> RetinueError:
    try:
        return protocol.from_error_reply(msgspec.json.decode(body, type=protocol.ErrorReply))
    except msgspec.MsgspecError:
        return RetinueError(f"the control server answered with status {status}")
