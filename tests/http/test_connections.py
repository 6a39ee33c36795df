"""The server's and the client's end of a connection, against each other and against peers that break the rules."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, ResponseError
from retinue.http.listener import HOST, Listener
from retinue.http.server import HttpError, HttpRequest, ServerConnection


class Echo(Listener):
    """Answers with the body it got; `/stream` in three pieces, `/bug` with a bug in the middle of those."""

    def __init__(self, *, idle_seconds: float | None = None) -> None:
        super().__init__("the echo", max_connections=8, idle_seconds=idle_seconds)
        self.served = 0
        self.sends_at_once = False

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        self.sends_at_once = bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        super()._accept(reader, writer)

    async def respond(self, request: HttpRequest, connection: ServerConnection) -> None:
        self.served += 1
        if request.path == "/teapot":
            raise HttpError(418, "short and stout", Retry="never")
        if request.method == "POST":
            connection.send_response(200, await connection.read_json_body(request, limit=100))
            return
        connection.start_response(200, {"Content-Type": "text/plain"})
        for piece in (b"one ", b"two ", b"three"):
            connection.send_chunk(piece)
            if request.path == "/bug":
                raise ZeroDivisionError
        connection.end_response()


@asynccontextmanager
async def listening(**options: float | None) -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo(**options)
    port = echo.listen()
    try:
        yield echo, port
    finally:
        await echo.stop_listening()
        await echo.end_connections()


async def connect(port: int) -> ClientConnection:
    return ClientConnection(*await asyncio.open_connection(HOST, port))


def headers(port: int, **more: str) -> dict[str, str]:
    return {"Host": f"{HOST}:{port}", "Content-Type": "application/json", **more}


async def send_raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


async def test_one_connection_serves_request_after_request() -> None:
    async with listening(idle_seconds=60) as (echo, port):
        client = await connect(port)
        for number in range(3):
            body = b'{"number": %d}' % number
            client.send_request("POST", "/", headers(port), body)
            response = await client.read_response()
            assert (response.status, response.headers["content-type"]) == (200, "application/json")
            assert await client.read_body(1000) == body
            assert client.start_next_request()
        assert echo.served == 3
        client.close()


async def test_a_response_leaves_in_one_piece_and_never_waits_for_an_acknowledgement() -> None:
    async with listening(idle_seconds=60) as (echo, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers(port, **{"Content-Length": "2"}).items())
        writer.write(f"POST / HTTP/1.1\r\n{head}\r\n{{}}".encode())
        assert (await reader.read(10_000)).endswith(b"\r\n\r\n{}")
        assert echo.sends_at_once
        writer.close()


async def test_a_server_without_keep_alive_says_so_and_closes() -> None:
    async with listening() as (_, port):
        client = await connect(port)
        client.send_request("POST", "/", headers(port), b"{}")
        assert (await client.read_response()).headers["connection"] == "close"
        assert await client.read_body(1000) == b"{}"
        assert not client.start_next_request()
        client.close()


async def test_a_body_of_unknown_length_comes_in_chunks_or_up_to_the_end() -> None:
    async with listening() as (_, port):
        client = await connect(port)
        client.send_request("GET", "/stream", headers(port))
        assert (await client.read_response()).headers["transfer-encoding"] == "chunked"
        assert await client.read_body(1000) == b"one two three"
        client.close()
        old = await send_raw(port, b"GET /stream HTTP/1.0\r\nHost: %b:%d\r\n\r\n" % (HOST.encode(), port))
        assert old.endswith(b"\r\n\r\none two three") and b"chunked" not in old


async def test_a_limit_is_kept_and_what_is_left_of_the_connection_is_not_used_again() -> None:
    async with listening(idle_seconds=60) as (_, port):
        client = await connect(port)
        client.send_request("POST", "/", headers(port), b'"0123456789"')
        await client.read_response()
        assert await client.read_body(5) == b'"0123'
        client.close()
        client = await connect(port)
        client.send_request("POST", "/", headers(port), b"1" * 101)
        assert (await client.read_response()).status == 413
        assert b"larger than 100 bytes" in await client.read_body(1000)
        assert not client.start_next_request()
        client.close()


async def test_errors_have_their_headers_and_head_has_no_body() -> None:
    async with listening() as (_, port):
        client = await connect(port)
        client.send_request("GET", "/teapot", headers(port))
        response = await client.read_response()
        assert (response.status, response.headers["retry"]) == (418, "never")
        assert await client.read_body(1000) == b'{"error":"short and stout"}'
        client.close()
        head = await send_raw(port, b"HEAD /teapot HTTP/1.1\r\nHost: %b:%d\r\n\r\n" % (HOST.encode(), port))
        assert head.startswith(b"HTTP/1.1 418 ") and head.endswith(b"\r\n\r\n")


async def test_a_bug_in_the_middle_of_a_response_breaks_it_off() -> None:
    """No second response is put into the first one's body."""
    async with listening() as (_, port):
        client = await connect(port)
        client.send_request("GET", "/bug", headers(port))
        assert (await client.read_response()).status == 200
        with pytest.raises(IncompleteResponse):
            await client.read_body(1000)
        client.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", NoResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Le", IncompleteResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", IncompleteResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", IncompleteResponse),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ResponseError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, ResponseError),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 11, ResponseError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", ResponseError),
    ],
)
async def test_what_is_no_response_is_told_apart(said: bytes, error: type[ResponseError]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        client = await connect(server.sockets[0].getsockname()[1])
        client.send_request("GET", "/", {"Host": "x"})
        with pytest.raises(ResponseError) as raised:
            await client.read_response()
            await client.read_body(1000)
        assert type(raised.value) is error
        client.close()
