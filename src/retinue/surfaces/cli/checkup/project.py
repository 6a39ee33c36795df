"""Checks of the project: its files, its agents and their tools, MCP servers, the authority of runs, the logs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from retinue import build
from retinue.build.servers import make_tool_servers
from retinue.config.project import SETTINGS_FILE
from retinue.config.settings import find_unsandboxed
from retinue.core.errors import LogError, RetinueError
from retinue.core.profiles import LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS
from retinue.core.servers import McpServer, ServerReport
from retinue.log.opening import open_reader
from retinue.surfaces.cli.checkup.check import Check, Look

WEB_TOOLS_OFF = "web_fetch and web_search are off: no host may be reached"
WEB_TOOLS_ON = "web_fetch, and web_search where the model's provider has one"
ALLOW_HOSTS = "name what may be reached: `network: [HOST, ...]` in retinue.yaml, then `retinue trust`"
FULL_AUTHORITY = (
    "runs without a sandbox work as you: a shell command that you allow can do whatever you can, "
    "also answer questions and change files outside the project ({settings})"
)
RESTRICT = "take that out of {file}, or read what you allow: --yes and mode `yes` allow everything"


def check_files(look: Look) -> Iterator[Check]:
    """Check the project's folder, retinue.yaml and whether it is trusted, agents and the state folder."""
    marked = (look.folder / SETTINGS_FILE).exists()
    note = "" if marked else f" (no {SETTINGS_FILE}: defaults)"
    yield Check("project", "ok", f"{look.folder}{note}", "" if marked else "retinue init")
    yield _check_state(look.state)
    if look.project is None:
        yield Check("profiles", "fail", look.error, "correct the file at this place")
        return
    if look.project.ignored:
        ignored = ", ".join(look.project.ignored)
        yield Check("trust", "warn", f"{SETTINGS_FILE} is not trusted; ignored: {ignored}", "retinue trust")
    for warning in look.project.warnings[1:] if look.project.ignored else look.project.warnings:
        yield Check("profiles", "warn", warning, f"correct it in {SETTINGS_FILE}")
    names = ", ".join(profile.name for profile in look.project.profiles) or "none"
    yield Check("profiles", "ok", f"{names} ({len(look.project.all_profiles)} in all)")


def check_tools(look: Look) -> Iterator[Check]:
    """List the tools that always work and check those that need a reachable host."""
    try:
        parts, project = build.load_project_parts(look.folder)
    except RetinueError:
        return  # another check reports what is wrong with the settings
    has_network = bool(parts.network) and parts.network != "none"
    yield Check("tools", "ok", ", ".join((*LOCAL_TOOLS, *SPAWN_TOOLS)))
    yield Check("tools", "ok", WEB_TOOLS_ON if has_network else WEB_TOOLS_OFF)
    for profile in project.all_profiles:
        wanted = [name for name in profile.tools or () if name in WEB_TOOLS]
        if wanted and not has_network:
            text = f"profile '{profile.name}' names {' and '.join(wanted)}, which cannot work: no host may be reached"
            yield Check("tools", "warn", text, ALLOW_HOSTS)


def check_servers(look: Look) -> Iterator[Check]:
    """Start or reach each MCP server of the project, ask for its tools, and end it."""
    if look.project is None or not look.project.settings.mcp_servers:
        return
    for report in asyncio.run(_try_servers(look.project.settings.mcp_servers, look.folder)):
        if report.error:
            cure = f"correct mcp_servers.{report.name}, or try it by hand: {report.words}"
            yield Check("mcp", "fail", f"{report.name}: {report.error}", cure)
            continue
        tools = f"{report.tools} tool{'' if report.tools == 1 else 's'}"
        yield Check("mcp", "ok", f"{report.name}: {tools}, MCP {report.revision} ({report.words})")
        for note in report.notes:
            yield Check("mcp", "warn", f"{report.name}: {note}")


def check_authority(look: Look) -> Iterator[Check]:
    """Warn if a setting in force lets runs work with the user's own authority."""
    settings = None if look.project is None else look.project.settings
    found = [] if settings is None else [f"`{each}`" for each in find_unsandboxed(settings)]
    if settings is not None and found:
        text = FULL_AUTHORITY.format(settings=", ".join(found))
        yield Check("authority", "warn", text, RESTRICT.format(file=settings.file))


def check_logs(look: Look) -> Iterator[Check]:
    """Check that each log can be read, is whole and has our version."""
    log = open_reader(look.state)
    problems: list[LogError] = []
    try:
        found = asyncio.run(log.check_health(problems.append))
    except RetinueError as error:
        yield Check("logs", "fail", str(error), f"see that you can read {log.location}")
        return
    cure = f"move it out of {log.location}; the other logs are read all the same"
    for problem in problems:
        yield Check("logs", "fail", str(problem), cure)
    if found:
        yield Check("logs", "ok", found)


def _check_state(state: Path) -> Check:
    """Check that the state folder can be written, without making it: the first run does."""
    there = next(folder for folder in (state, *state.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return Check("state", "fail", f"{there} is not a folder", f"move {there} away")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("state", "fail", f"{there} cannot be written", f"chmod u+rwx {there}, or work in another folder")
    return Check("state", "ok", f"{state} " + ("can be written" if there == state else "will be made by the first run"))


async def _try_servers(servers: Sequence[McpServer], project: Path) -> Sequence[ServerReport]:
    connections = make_tool_servers(servers, project, None)
    assert connections is not None
    try:
        await connections.ready(None)
        return connections.reports()
    finally:
        await connections.close()
