"""The proxy of a sandboxed run: which requests go where, and that no form of a request goes anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from retinue import ConfigError, Profile
from retinue.core.network import FULL, allows_host, canonicalize_name, intersect_hosts, parse_hosts
from retinue.http.server import MAX_HEAD_BYTES, HttpError, parse_head
from retinue.sandbox import network_proxy
from retinue.sandbox.network_proxy import MAX_CONNECTIONS, RunProxy, plan_route
from retinue.tools.dialer import Streams
from tests.gates import hurry, pass_time
from tests.tools.web.kit import Web, answer, moved

HOSTS = ("a.com", "*.b.com", "c.com:8443", "private.com")
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Asking:
    """A client of the proxy. `refused` is what it would not reach."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused: list[str] = []

    async def connect(self) -> Streams:
        return await asyncio.open_unix_connection(self.path.name)  # its folder is the current one

    async def ask(self, *lines: str, body: bytes = b"") -> bytes:
        """Sends one request; HTTP/1.1 wants a Host in each, though the proxy does not believe it."""
        host = [] if any(line.startswith("Host:") for line in lines) else ["Host: a.com"]
        return await self.send("\r\n".join([*lines, *host, "", ""]).encode() + body)

    async def send(self, data: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(data)
        try:
            return await reader.read()
        finally:
            await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def proxied(folder: Path, web: Web, hosts: Sequence[str] = HOSTS) -> AsyncIterator[Asking]:
    asking = Asking(folder / "proxy")

    def emit(body: Any) -> None:
        asking.refused.append(body.text)

    proxy = RunProxy(folder, parse_hosts(hosts), emit, dialer=web)
    try:
        await proxy.open()
        yield asking
    finally:
        await proxy.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Longer than the name of a socket may be, and where the test is."""
    made = tmp_path / ("x" * 60) / ("y" * 60)
    made.mkdir(parents=True)
    monkeypatch.chdir(made)
    return made


async def test_a_tunnel_to_a_host_that_is_allowed(folder: Path) -> None:
    async with Web({"/x": answer(b"hello")}) as web, proxied(folder, web) as client:
        reader, writer = await client.connect()
        writer.write(b"CONNECT A.com:443 HTTP/1.1\r\nHost: a.com:443\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == ESTABLISHED
        writer.write(b"GET /x HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"hello")
        await closed(writer)
        assert (web.resolved, [port for _, port in web.dialled]) == (["a.com"], [443])
        assert client.refused == []


async def test_a_plain_request_is_sent_on_as_ours_and_nothing_behind_it(folder: Path) -> None:
    """Nobody is fooled into serving another host: not by a header, not by a second request."""
    async with Web({"/x?q=1": answer(b"hello")}) as web, proxied(folder, web) as client:
        said = await client.ask(
            "GET http://a.com/x?q=1 HTTP/1.1",
            "Host: evil.org",
            "Proxy-Authorization: Basic abc",
            "Connection: keep-alive, X-Gone",
            "X-Gone: 1",
            "X-Kept: 2",
            body=b"GET http://evil.org/ HTTP/1.1\r\nHost: evil.org\r\n\r\n",
        )
        assert said.endswith(b"hello")
        assert web.asked == ["GET /x?q=1 HTTP/1.1\r\nHost: a.com\r\nX-Kept: 2\r\nConnection: close\r\n\r\n"]


async def test_a_body_is_as_long_as_it_says(folder: Path) -> None:
    got = asyncio.get_running_loop().create_future()

    class Far(Web):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            got.set_result((head, await reader.readexactly(5)))
            writer.write(answer(b"ok"))
            writer.close()

    async with Far({}) as web, proxied(folder, web) as client:
        said = await client.ask("POST http://c.com:8443/ HTTP/1.1", "Content-Length: 5", body=b"12345DELETE / HTTP/1.1")
        assert said.endswith(b"ok")
    head, body = await got
    assert (body, b"Host: c.com:8443\r\nContent-Length: 5\r\n" in head) == (b"12345", True)


@pytest.mark.parametrize(
    "target",
    [
        "CONNECT evil.org:443", "CONNECT a.com:22", "CONNECT b.com:443", "CONNECT c.com:443", "CONNECT xa.com:443",
        "CONNECT a.com.evil.org:443", "CONNECT 93.184.216.34:443", "CONNECT 127.0.0.1:80", "CONNECT localhost:443",
        "CONNECT [::1]:443", "CONNECT [::ffff:7f00:1]:443", "GET http://evil.org/", "GET http://a.com:8080/",
        "GET http://169.254.169.254/latest/meta-data/", "GET HTTP://evil.org/?http://a.com/", "POST http://10.0.0.1/",
    ],
)  # fmt: skip
async def test_what_is_not_on_the_list_is_not_even_looked_up(folder: Path, target: str) -> None:
    async with Web({}) as web, proxied(folder, web) as client:
        said = await client.ask(f"{target} HTTP/1.1", "Host: a.com")
        assert said.startswith(b"HTTP/1.1 403 ") and b"not among the hosts" in said
        assert (web.resolved, web.dialled, len(client.refused)) == ([], [], 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00:ec2::254", "0.0.0.0"])
async def test_a_name_that_leads_to_a_private_address_is_not_reached(folder: Path, address: str) -> None:
    """Also where only one of its addresses is, and where every public host is allowed."""
    for hosts in (HOSTS, ("*",)):
        async with Web({}, private_com=["93.184.216.34", address]) as web, proxied(folder, web, hosts) as client:
            for target in ("CONNECT private.com:443", "GET http://private.com/"):
                said = await client.ask(f"{target} HTTP/1.1")
                assert said.startswith(b"HTTP/1.1 403 ") and b"not a public address" in said
            assert web.dialled == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("GET https://a.com/ HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("GET http://user@a.com/ HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("GET http://a.com\\@evil.org/ HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("GET http:///x HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("CONNECT a.com HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("CONNECT a.com:99999 HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("CONNECT 2130706433:443 HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: a.com\r\n\r\n", 400),
        ("CONNECT a.com:443 HTTP/2\r\n\r\n", 400),
        ("GET http://a.com/ HTTP/1.1\r\nHost: a.com\r\nX: 1\r\n folded\r\n\r\n", 400),
        ("GET http://a.com/ HTTP/1.1\r\nHost : a.com\r\n\r\n", 400),
        ("GET http://a.com/ HTTP/1.1\nHost: a.com\r\n\r\n", 400),
        ("POST http://a.com/ HTTP/1.1\r\nHost: a.com\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        ("POST http://a.com/ HTTP/1.1\r\nHost: a.com\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        ("POST http://a.com/ HTTP/1.1\r\nHost: a.com\r\nContent-Length: +1\r\n\r\n", 400),
        (f"GET http://a.com/ HTTP/1.1\r\nHost: a.com\r\nX: {'x' * 2 * MAX_HEAD_BYTES}\r\n\r\n", 431),
    ],
)
async def test_what_could_be_read_in_two_ways_is_not_sent_at_all(folder: Path, data: str, status: int) -> None:
    async with Web({}) as web, proxied(folder, web) as client:
        assert (await client.send(data.encode())).startswith(f"HTTP/1.1 {status} ".encode())
        assert (web.resolved, web.dialled) == ([], [])


PIECES = [
    b"GET ", b"CONNECT ", b"POST ", b"http://", b"HTTP/1.1", b"a.com", b":443", b":80", b"@", b"/", b"?x", b"#", b" ",
    b"\r\n", b"\n", b"\r", b"\t", b"\0", b"[::1]", b"127.0.0.1", b"Host: evil.org", b"Content-Length: 3", b"\xff",
    b"Transfer-Encoding: chunked", b"Connection: host, content-length", b": ", b"evil.org", b"\\", b"%00",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join) | st.binary(max_size=80))
@example(b"GET http://a.com/ HTTP/1.1\r\nConnection: host, content-length\r\nContent-Length: 3\r\nHost: evil.org")
@example(b"GET http://a.com/ HTTP/1.1\r\nHost: a.com\r\nConnection: \xff")
@hypothesis_settings(max_examples=1500, deadline=None)
def test_whatever_is_sent_is_one_request_to_one_host_or_none(data: bytes) -> None:
    try:
        route = plan_route(parse_head(data.split(b"\r\n\r\n")[0] + b"\r\n\r\n"))
    except HttpError as error:
        assert error.status in (400, 411)
        return
    assert canonicalize_name(route.host) == route.host and 0 < route.port < 65536
    if route.head is None:
        return
    first, *fields, end, nothing = route.head.split(b"\r\n")
    assert (end, nothing) == (b"", b"") and first.count(b" ") == 2 and first.split()[1].startswith(b"/")
    names = [field.split(b":")[0].lower() for field in fields]
    assert names.count(b"host") == names.count(b"connection") == 1 and b"transfer-encoding" not in names
    assert names.count(b"content-length") == (route.body_bytes > 0) or route.body_bytes == 0
    assert not any(byte in route.head.replace(b"\r\n", b"") for byte in b"\r\n\0")


async def test_a_redirect_is_the_client_s_to_follow_and_judged_anew(folder: Path) -> None:
    async with Web({"/": moved("http://127.0.0.1:1/")}) as web, proxied(folder, web) as client:
        assert b"Location: http://127.0.0.1:1/" in await client.ask("GET http://a.com/ HTTP/1.1")
        assert (await client.ask("GET http://127.0.0.1:1/ HTTP/1.1")).startswith(b"HTTP/1.1 403 ")
        assert len(web.dialled) == 1


async def test_a_host_that_is_not_there_is_told(folder: Path) -> None:
    class Gone(Web):
        async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
            raise ConnectionRefusedError(111, "Connection refused")

    async with Gone({}) as web, proxied(folder, web) as client:
        said = await client.ask("CONNECT a.com:443 HTTP/1.1")
        assert said.startswith(b"HTTP/1.1 502 network: cannot reach a.com: Connection refused\r\n")
        assert client.refused == []


async def test_so_many_connections_and_no_more_and_all_are_gone_with_the_run(folder: Path) -> None:
    async with Web({"/": [None]}) as web:
        async with proxied(folder, web) as client:
            held = [await client.connect() for _ in range(MAX_CONNECTIONS)]
            assert (await client.ask("CONNECT a.com:443 HTTP/1.1")).startswith(b"HTTP/1.1 503 ")
            held[0][1].write(b"CONNECT a.com:443 HTTP/1.1\r\nHost: a.com\r\n\r\n")
            assert await held[0][0].readuntil(b"\r\n\r\n") == ESTABLISHED
            held[0][1].write(b"GET / HTTP/1.1\r\n\r\n")
            await web.waiting.wait()
            mounted = Asking(folder / "mounted")  # as the sandbox keeps it, when its name is gone
            mounted.path.hardlink_to(client.path)
        for reader, writer in held:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            await closed(writer)
        assert not client.path.exists()
        with pytest.raises(ConnectionRefusedError):
            await mounted.connect()
        await web.closed.wait()


async def test_a_connection_on_which_nothing_happens_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_proxy, "IDLE_SECONDS", 20.0)
    async with Web({"/": [None]}) as web, proxied(folder, web) as client:
        assert (await hurry(client.send(b"GET ht"), 20)).startswith(b"HTTP/1.1 408 ")
        asking = asyncio.create_task(client.ask("GET http://a.com/ HTTP/1.1"))
        await web.waiting.wait()
        await pass_time(20)
        assert await asking == b""
        await web.closed.wait()


@pytest.mark.parametrize("steps", range(4))
async def test_a_proxy_whose_opening_is_cancelled_leaves_no_socket(folder: Path, steps: int) -> None:
    watched: Any = asyncio.get_running_loop()
    before = set(watched._selector.get_map())
    proxy = RunProxy(folder, parse_hosts(HOSTS), print, dialer=Web({}))
    opening = asyncio.ensure_future(proxy.open())
    for _ in range(steps):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    await proxy.close()
    assert set(watched._selector.get_map()) == before
    assert list(folder.iterdir()) == []


def test_full_is_more_than_every_host_and_two_together_are_the_narrower() -> None:
    some = parse_hosts(["a.com", "b.com:22"])
    assert parse_hosts("full") == FULL and parse_hosts("none") == ()
    assert intersect_hosts(FULL, some) == intersect_hosts(some, FULL) == some
    assert intersect_hosts(FULL, FULL) == FULL and intersect_hosts(FULL, ()) == ()
    assert intersect_hosts(parse_hosts(["*"]), FULL) == parse_hosts(["*"]) != FULL
    assert allows_host(FULL, "a.com", 22) and not allows_host(parse_hosts(["*"]), "a.com", 22)
    for wrong in ("fulll", "a.com"):
        with pytest.raises(ConfigError, match="none, full or a list of hosts"):
            Profile("x", network=wrong)
    with pytest.raises(ConfigError, match="port"):
        parse_hosts(["*:0"])
