"""Connections to public hosts, the only way from a tool to the network.

`dial_host` resolves a name once and checks all its addresses. The connection goes to a checked address and not to the
name, so a DNS answer that changes a moment later cannot redirect it. A Dialer does the network I/O in two steps,
`resolve` and `connect`. The check runs between them, so a Dialer made for a test is checked too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from retinue.core.errors import ToolError

LINE_BYTES = 64 * 1024
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PrivateAddress(ToolError):
    """The host has an address that is not on the public internet. `reason` is the text without the tool's name."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"{tool}: {reason}")
        self.reason = reason


class Dialer(Protocol):
    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the IP addresses of a host name. Raises OSError."""
        ...

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        """Connect to an address. `tls` is the host name to use TLS with; None means no TLS. Raises OSError."""
        ...


class SystemDialer:
    """A Dialer that uses the resolver and the sockets of this machine."""

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def connect(self, address: str, port: int, *, tls: str | None) -> Streams:
        context = None if tls is None else self._tls
        return await asyncio.open_connection(address, port, limit=LINE_BYTES, ssl=context, server_hostname=tls)


async def dial_host(dialer: Dialer, host: str, port: int, *, tls: bool, tool: str) -> Streams:
    """Connect to a public host. Raises ToolError, also if any of the host's addresses is private."""
    try:
        addresses = await dialer.resolve(host, port)
    except OSError as error:
        raise ToolError(f"{tool}: {host} has no address: {error.strerror or error}") from None
    private = [address for address in addresses if not is_public_address(address)]
    if private:
        raise PrivateAddress(tool, f"{host} leads to {private[0]}, which is not a public address")
    if not addresses:
        raise ToolError(f"{tool}: {host} has no address")
    last_error: OSError | None = None
    for address in addresses:
        try:
            return await dialer.connect(address, port, tls=host if tls else None)
        except ssl.SSLCertVerificationError as error:
            raise ToolError(f"{tool}: the certificate of {host} is not trusted: {error.verify_message}") from None
        except OSError as error:
            last_error = error
    raise ToolError(f"{tool}: cannot reach {host}: {last_error and (last_error.strerror or last_error)}")


def is_public_address(text: str) -> bool:
    """Return True if an address is on the public internet.

    Private, loopback, link-local, reserved and multicast addresses are not, nor is an IPv6 address that embeds such an
    IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # not an IP address
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public_address(str(inner))
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)
