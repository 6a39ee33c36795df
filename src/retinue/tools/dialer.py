"""Reaching a host: its addresses, the judgement on them, one connection. The only way from a tool to the network.

A name is resolved once, every address it has is judged, and what is connected to is such an address and not the name:
a name that leads elsewhere a moment later leads nowhere. Sockets are a Dialer's; who is reachable is decided here,
between its two calls, so another Dialer (a test's) goes through the same judgement.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from retinue.core.errors import ToolError

LINE_BYTES = 64 * 1024
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hidden(ToolError):
    """The host has an address that is not of the internet."""


class Dialer(Protocol):
    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a name; raises OSError."""
        ...

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        """A connection to an address, by TLS for the host named `tls` if there is one; raises OSError."""
        ...


class SystemDialer:
    """This machine's resolver and sockets."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext | None = None

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        if tls is None:
            return await asyncio.open_connection(address, port, limit=LINE_BYTES)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return await asyncio.open_connection(address, port, limit=LINE_BYTES, ssl=self._tls, server_hostname=tls)


async def dial(dialer: Dialer, host: str, port: int, *, tls: bool, tool: str) -> Streams:
    """A connection to a public host. One private address among its own is enough to refuse it."""
    try:
        addresses = await dialer.resolve(host, port)
    except OSError as error:
        raise ToolError(f"{tool}: {host} has no address: {error.strerror or error}") from None
    hidden = [address for address in addresses if not is_public(address)]
    if hidden:
        raise Hidden(f"{tool}: {host} leads to {hidden[0]}, which is not a public address")
    if not addresses:
        raise ToolError(f"{tool}: {host} has no address")
    trouble: OSError | None = None
    for address in addresses:
        try:
            return await dialer.connect(address, port, tls=host if tls else None)
        except ssl.SSLCertVerificationError as error:
            raise ToolError(f"{tool}: the certificate of {host} is not trusted: {error.verify_message}") from None
        except OSError as error:
            trouble = error
    raise ToolError(f"{tool}: cannot reach {host}: {trouble and (trouble.strerror or trouble)}")


def is_public(text: str) -> bool:
    """Whether an address is of the internet: not private, loopback, link-local, reserved or a group, nor one that only
    wraps such an address (IPv4 in IPv6)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # also one with a zone
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)
