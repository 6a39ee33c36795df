"""The machine's own dialer, over real TLS on loopback: who is vouched for is read, who is not is refused."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from retinue import ToolError
from retinue.core.network import parse_hosts
from retinue.tools.dialer import Streams, SystemDialer
from retinue.tools.web import fetch_page
from tests.models.certificates import self_signed
from tests.tools.web.kit import PUBLIC, answer


class Nearby(SystemDialer):
    """Takes every name for a public address, and finds all of them on this machine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return [PUBLIC]

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        return await super().connect("127.0.0.1", self._port, tls=tls)


@pytest.mark.parametrize(
    ("trusted", "host", "says"),
    [(True, "127.0.0.1", ""), (False, "127.0.0.1", "is not trusted"), (True, "a.com", "is not trusted")],
)
async def test_a_certificate_must_be_trusted_and_for_the_host_of_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, host: str, says: str
) -> None:
    file = self_signed(tmp_path / "both.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"safe", "text/plain"))
        await writer.drain()
        writer.close()

    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        dialer = Nearby(server.sockets[0].getsockname()[1])
        getting = fetch_page(f"https://{host}/", hosts=parse_hosts([host]), dialer=dialer)
        if says:
            with pytest.raises(ToolError, match=says):
                await getting
        else:
            assert (await getting).body == b"safe"


async def test_loopback_is_found_and_refused_by_the_real_one() -> None:
    assert set(await SystemDialer().resolve("localhost", 80)) <= {"127.0.0.1", "::1"}
    with pytest.raises(ToolError, match=r"localhost leads to .*, which is not a public address"):
        await fetch_page("http://localhost/", hosts=parse_hosts(["localhost"]), dialer=SystemDialer())
