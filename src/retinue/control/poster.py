"""A client that posts events to one address over connections that it keeps. One event is one request."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from retinue.core.errors import ConfigError, RetinueError
from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, ResponseError
from retinue.protocol.reports import ADDRESS

POST_SECONDS = 5.0
MAX_CONNECTIONS = 8
UNUSED_SECONDS = 30.0
ANSWER_BYTES = 64 * 1024
WHAT = f"{ADDRESS}: the address to report to"


class PostFailed(RetinueError):
    """An event did not arrive; the text says why."""


class Unwanted(PostFailed):
    """The collector does not want the run any more: its call was given up, or a person cancelled it."""


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
        self._target = f"{parts.path.rstrip('/')}{route}"
        self._headers = {"Host": parts.netloc, "Content-Type": "application/json"}
        self._idle: list[tuple[float, ClientConnection]] = []
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def post(self, body: bytes) -> None:
        """Post once, within 5 s. Raises PostFailed.

        A kept connection that turns out to be closed is replaced. Either the receiver had taken nothing of the request
        by then, or it recognizes the event by its number.
        """
        try:
            async with asyncio.timeout(POST_SECONDS), self._slots:
                connection = self._take_idle_connection()
                answer = None if connection is None else await self._exchange(connection, body)
                if answer is None:
                    answer = await self._exchange(await self._connect(), body)
        except TimeoutError:
            raise PostFailed(f"no answer from {self.where} within {POST_SECONDS:g} s") from None
        if answer is None:
            raise PostFailed(f"{self.where} closed the connection without an answer")
        status, text = answer
        if not 200 <= status < 300:
            raise (Unwanted if status == 409 else PostFailed)(f"{self.where} answered {status}{text}")

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle = []

    def _take_idle_connection(self) -> ClientConnection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if now - since < UNUSED_SECONDS and not connection.is_closed:
                return connection
            connection.close()
        return None

    async def _connect(self) -> ClientConnection:
        try:
            return ClientConnection(*await asyncio.open_connection(self._host, self._port))
        except OSError as error:
            words = error.strerror or str(error)
            raise PostFailed(f"cannot reach {self.where}: {words.splitlines()[0] if words else 'no reason'}") from None

    async def _exchange(self, connection: ClientConnection, body: bytes) -> tuple[int, str] | None:
        """Send one post. Returns its status and text, or None if the peer closed the connection without an answer."""
        is_reusable = False
        try:
            connection.send_request("POST", self._target, self._headers, body)
            await connection.drain()
            response = await connection.read_response()
            text = await connection.read_body(ANSWER_BYTES)
            is_reusable = connection.start_next_request()
            return response.status, _shorten_text(text)
        except (NoResponse, OSError):
            return None
        except IncompleteResponse:
            raise PostFailed(f"{self.where} broke off its answer") from None
        except ResponseError:
            raise PostFailed(f"what answers at {self.where} is no collector") from None
        finally:
            if is_reusable:
                self._idle.append((asyncio.get_running_loop().time(), connection))
            else:
                connection.close()


def _shorten_text(said: bytes) -> str:
    text = " ".join(said[:400].decode("utf-8", "replace").split())
    return "" if text in ("", "{}") else f": {text}"
