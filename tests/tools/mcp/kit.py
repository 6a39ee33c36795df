"""Short ways to run a scripted tree that has tools of MCP servers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

import retinue
from retinue import Event, Profile, Result
from retinue.core.events import RunSpawned, ToolResult
from retinue.testing import scripted
from tests.gates import until
from tests.surfaces.cli.fork_server import start_fork_server

SERVERS = Path(__file__).parent / "servers"


def program(name: str, *args: str, **more: Any) -> dict[str, Any]:
    """One of the servers beside this file, as `mcp_servers` names it."""
    return {"command": sys.executable, "args": [str(SERVERS / f"{name}.py"), *args], **more}


def quick_program(name: str, *args: str, **more: Any) -> dict[str, Any]:
    """Return a server program written with the SDK, without the time to import the SDK."""
    command, *words = start_fork_server().find_python("mcp.server.mcpserver")
    return {"command": command, "args": [*words, str(SERVERS / f"{name}.py"), *args], **more}


def call(name: str, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


def turns(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """One call a turn, then an answer."""
    return [*({"tools": [each]} for each in calls), {"text": "done"}]


def main(agents: dict[str, Any], **fields: Any) -> Profile:
    return Profile("main", "You are main.", model=scripted(agents), **fields)


async def run(
    servers: dict[str, Any], agents: dict[str, Any] | Sequence[dict[str, Any]], **options: Any
) -> tuple[Result[Any], list[Event]]:
    """A tree from start to end with every tool allowed; its result and all events. `opened` gets the Retinue."""
    fields, opened = options.pop("fields", {}), options.pop("opened", [])
    scripts = agents if isinstance(agents, dict) else {"main": agents}
    async with retinue.open(**{"mode": "yes", "mcp_servers": servers, **options}) as r:
        opened.append(r)
        going = await r.spawn(main(scripts, **fields), "go")
        events = [event async for event in going.events()]
        return await going.result(), events


def results(events: Sequence[Event], run: int | None = None) -> list[ToolResult]:
    return [e.body for e in events if isinstance(e.body, ToolResult) and (run is None or e.run == run)]


def offered(events: Sequence[Event], run: int = 0) -> dict[str, dict[str, Any]]:
    """The tools of MCP servers that a run was given, as the log has them."""
    spawned = next(event.body for event in events if event.run == run and isinstance(event.body, RunSpawned))
    tools: Any = spawned.tools
    if isinstance(tools, msgspec.Raw):
        tools = msgspec.json.decode(tools)
    return {tool["name"]: tool for tool in tools if tool.get("server")}


def alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else gets. A server that allows its address to be reused can listen there meanwhile."""
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", 0))
        port: int = holding.getsockname()[1]
        yield port


@asynccontextmanager
async def http_server(*command: str, port: int | None = None) -> AsyncIterator[str]:
    """A server at an address of its own on loopback, the calm one unless named; its port is in its environment too."""
    with nullcontext(port) if port is not None else held_port() as at:
        process = await asyncio.create_subprocess_exec(
            *(command or (sys.executable, str(SERVERS / "calm.py"), str(at))),
            env={"PATH": os.environ["PATH"], "PORT": str(at)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: _listens(at))
            yield f"http://127.0.0.1:{at}/mcp"
        finally:
            process.kill()
            await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
