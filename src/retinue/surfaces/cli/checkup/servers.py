"""MCP servers: each that the project names is started, or reached, asked for its tools, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from retinue.build.sources import servers_of
from retinue.core.servers import McpServer, ServerReport
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(look: Look) -> Iterator[Check]:
    if look.project is None or not look.project.settings.mcp_servers:
        return
    for report in asyncio.run(_reports(look.project.settings.mcp_servers, look.folder)):
        if report.error:
            do = f"correct mcp_servers.{report.name}, or try it by hand: {report.words}"
            yield Check("mcp", "fail", f"{report.name}: {report.error}", do)
            continue
        tools = f"{report.tools} tool{'' if report.tools == 1 else 's'}"
        yield Check("mcp", "ok", f"{report.name}: {tools}, MCP {report.revision} ({report.words})")
        for note in report.notes:
            yield Check("mcp", "warn", f"{report.name}: {note}")


async def _reports(servers: Sequence[McpServer], project: Path) -> Sequence[ServerReport]:
    made = servers_of(servers, project, None)
    assert made is not None
    try:
        await made.ready(None)
        return made.reports()
    finally:
        await made.close()
