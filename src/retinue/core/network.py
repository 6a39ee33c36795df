"""Network targets: hosts (`docs.python.org`, `*.example.com`, `example.com:8443`, `*`), `none`, or `full`.

A host without a port stands for ports 80 and 443. The intersection of two lists is a list again, so a child's list is
never wider than its parent's. Pure: the code that connects resolves names and checks the addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec

from retinue.core.errors import ConfigError

WEB_PORTS = (80, 443)
ANY_PORT = 0
WORDS = ("none", "full")
PROXY_VARIABLE = "RETINUE_PROXY"  # in a tool server: the address of the proxy for its commands
HOST_PATTERN = (  # the part of `parse_host` that a JSON schema can express
    r"^(?!\s*([Nn][Oo][Nn][Ee]|[Ff][Uu][Ll][Ll])\s*$)"
    r"\s*(\*|(\*\.)?((?!-)[\w-]{1,63}(?<!-)\.)*(?![0-9]+(:|\s|$))(?!-)[\w-]{1,63}(?<!-)\.?"
    r"|[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?\s*$"
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class AllowedHost(msgspec.Struct, frozen=True, gc=False):
    """One entry of a list of hosts. `name` is a host, `*.` and a domain, or `*`. A `port` of None means 80 and 443; 0,
    which no entry can be written with, means every port."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port is None else f"{name}:{self.port}"


Hosts = tuple[AllowedHost, ...]
FULL: Hosts = (AllowedHost("*", ANY_PORT),)  # the host's own network, with private addresses and all ports


def parse_hosts(texts: Sequence[str]) -> Hosts:
    """Parse a list of hosts, or the word `none` or `full`. Raises ConfigError."""
    if not isinstance(texts, str):
        return tuple(dict.fromkeys(parse_host(text) for text in texts))
    if texts not in WORDS:
        raise ConfigError(f"network must be none, full or a list of hosts, got {texts!r}")
    return FULL if texts == "full" else ()


def parse_host(text: str) -> AllowedHost:
    """Parse one entry of a list of hosts. Raises ConfigError with the reason if it is invalid."""
    word = text.strip().lower()
    if word in WORDS:  # probably meant as the word itself, not as a host
        raise ConfigError(f"'{text}' is not a host: to set it, write `network: {word}` without a list")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(?::([0-9]{1,5}))?", text.strip())
    if found is None:
        raise ConfigError(f"'{text}' is not a host: write docs.python.org, *.example.com, example.com:8443 or *")
    name, port = found[1].strip("[]"), None if found[2] is None else int(found[2])
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"'{text}' has a port that is not valid")
    if name != "*":
        domain = name.removeprefix("*.")
        if "*" in domain:
            raise ConfigError(f"'{text}' is not a host: write * alone, or *. before a domain")
        plain = canonicalize_name(domain)
        if plain is None:
            raise ConfigError(f"'{text}' is not a host name or an IP address")
        name = f"*.{plain}" if name.startswith("*.") else plain
    return AllowedHost(name, port)


def canonicalize_name(name: str) -> str | None:
    """Return the canonical spelling of a host: lower case, ASCII, an IPv4 address as its four numbers. Return None if
    `name` is not a host.

    Disguised numbers (`2130706433`, `0x7f.1`, `0177.0.0.1`) are not hosts."""
    if ":" in name:
        try:
            return ipaddress.IPv6Address(name).compressed if "%" not in name else None
        except ValueError:
            return None
    try:
        plain = name.rstrip(".").encode("idna").decode("ascii").lower()
    except UnicodeError:
        return None
    labels = plain.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(plain))
        except ValueError:
            return None
    return plain if len(plain) <= 253 and all(map(_LABEL.fullmatch, labels)) else None


def allows_host(hosts: Hosts, name: str, port: int) -> bool:
    """Return True if `hosts` allow the canonical host `name` at this port."""
    return any(
        _covers_name(host.name, name) and (host.port in (port, ANY_PORT) or (host.port is None and port in WEB_PORTS))
        for host in hosts
    )


def intersect_hosts(one: Hosts, other: Hosts) -> Hosts:
    """Return the hosts that both lists allow."""
    both = (_intersect_host(a, b) for a in one for b in other)
    return tuple(dict.fromkeys(host for host in both if host is not None))


def _intersect_host(a: AllowedHost, b: AllowedHost) -> AllowedHost | None:
    if ANY_PORT in (a.port, b.port):
        return a if b.port == ANY_PORT else b
    name = b.name if _covers_name(a.name, b.name) else a.name if _covers_name(b.name, a.name) else None
    port = a.port if b.port is None else b.port
    fits = a.port == b.port or (None in (a.port, b.port) and port in WEB_PORTS)
    return AllowedHost(name, port) if name is not None and fits else None


def _covers_name(pattern: str, name: str) -> bool:
    """Return True if `pattern` covers everything that `name` (a host or a pattern) covers."""
    if pattern in ("*", name):
        return True
    return pattern.startswith("*.") and name.endswith(pattern[1:]) and name != pattern[2:]
