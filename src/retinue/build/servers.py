"""Factories of MCP server connections, of both ends of reporting (collector and publisher) and of control clients."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.core.caller import Caller
from retinue.core.control import Control
from retinue.core.limits import Limits
from retinue.core.ports import Collector
from retinue.core.servers import McpServer, ServerReport
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS

if TYPE_CHECKING:
    from retinue.control.reporting import Reporting
    from retinue.protocol.control import Address
    from retinue.tools.mcp.servers import McpServers


def parse_mcp_servers(values: Mapping[str, Mapping[str, Any]]) -> tuple[McpServer, ...]:
    """Return the MCP servers that a program configures with the keys of retinue.yaml. Raises ConfigError."""
    from retinue.config import servers as settings

    return settings.parse_servers(values)


def make_tool_servers(
    servers: Sequence[McpServer], project: Path, state: Path | None, collector: Collector | None = None
) -> McpServers | None:
    """Return the connections to the servers, not started yet, or None if there are no servers.

    The MCP library is imported only if there are servers."""
    if not servers:
        return None
    from retinue.tools.mcp.servers import McpServers

    return McpServers(
        servers,
        project=str(project),
        folder=None if state is None else state / "mcp",
        collector=collector,
    )


async def inspect_servers(servers: Sequence[McpServer], project: Path) -> Sequence[ServerReport]:
    """Connect to each server, list its tools and disconnect. Return a report on each."""
    connections = make_tool_servers(servers, project, None)
    if connections is None:
        return []
    try:
        await connections.ready(None)
        return connections.reports()
    finally:
        await connections.close()


def make_reporting(*, collects: bool, serves: bool, strict: bool, limits: Limits, caller: Caller) -> Reporting | None:
    """Return the reporting of this process, or None if the process neither starts reporting servers nor reports
    itself.

    An MCP server of ours (`serves`) reports to the address in its environment and passes the address on; without an
    address it does neither. Any other process that starts servers (`collects`) opens its own collector, unless its
    environment has an address."""
    address = os.environ.get(ADDRESS) or os.environ.get(CPE_ADDRESS)
    if not address and not collects:
        return None
    from retinue.control.reporting import Reporting

    return Reporting(address, serves=serves, strict=strict, limits=limits, caller=caller)


def connect_to_server(address: Address) -> Control:
    """Return the Control of the process whose control server has this address."""
    from retinue.control.client import ControlClient

    return ControlClient(address)


def watch_server_lines(address: Address, tree: str, *, after: int, deltas: bool) -> AsyncGenerator[bytes, None]:
    """Watch a tree of the process whose control server has this address, as raw lines: events exactly as stored,
    deltas as `{"delta": ...}`."""
    from retinue.control.client import ControlClient

    return ControlClient(address).watch_lines(tree, after=after, deltas=deltas)
