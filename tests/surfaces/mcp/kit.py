"""A real `retinue mcp serve` and real clients of it: the MCP SDK's, and raw bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.surfaces.cli.fork_server import can_fork
from tests.surfaces.cli.shell import COMMAND, Project, environment, find_quick_command

BOTH = ("legacy", "2026-07-28")
ECHO: dict[str, Any] = {"subagent": [{"text": "hello from the subagent"}]}


def serve(project: Project, *arguments: str, agents: dict[str, Any] | None = None, quick: bool = True) -> list[str]:
    """The command of a server whose models are scripted. One that the test kills is not `quick`."""
    model = ["--model", project.script(ECHO if agents is None else agents)]
    runtime = [] if "--runtime" in arguments else ["--runtime", "inherited"]
    return [*(find_quick_command() if quick else COMMAND), "mcp", "serve", *model, *runtime, *arguments]


@asynccontextmanager
async def connected(
    project: Project, *arguments: str, mode: str = "legacy", agents: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Client]:
    """The SDK's client, which has started the server on stdio."""
    command, *words = serve(project, *arguments, agents=agents)
    parameters = StdioServerParameters(command=command, args=words, env=environment(), cwd=str(project.folder))
    async with Client(stdio_client(parameters), mode=mode, **options) as client:
        yield client


@asynccontextmanager
async def listening(project: Project, *arguments: str, agents: dict[str, Any] | None = None) -> AsyncIterator[Server]:
    """A server over HTTP, and its address."""
    process = await asyncio.create_subprocess_exec(
        *serve(project, "--http", *arguments, agents=agents),
        cwd=project.folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield await Server.of(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Server:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.split(":")[2].split("/", maxsplit=1)[0])

    @classmethod
    async def of(cls, process: asyncio.subprocess.Process) -> Server:
        assert process.stderr is not None
        said = ""
        while (found := re.search(r"serving MCP on (\S+);", said)) is None:
            line = await process.stderr.readline()
            assert line, f"the server did not start: {said}"
            said += line.decode()
        return cls(process, found[1])

    async def raw(self, data: bytes, *, end: bool = False) -> bytes:
        """Send the bytes and return the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        if end:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    async def post(self, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Content-Length": str(len(data)),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = ["POST /mcp HTTP/1.1", *(f"{name}: {value}" for name, value in head.items() if value), "", ""]
        answer = await self.raw("\r\n".join(lines).encode() + data)
        top, _, rest = answer.partition(b"\r\n\r\n")
        first, *others = top.decode().split("\r\n")
        found = {name.lower(): value for name, value in (line.split(": ", 1) for line in others)}
        return int(first.split()[1]), found, json.loads(rest) if rest else None


class Pipe:
    """A client that speaks bytes on stdio."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._id = 0

    async def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())

    async def ask(self, method: str, **params: Any) -> Any:
        """The answer to a request; what comes before it is kept in `heard`."""
        name = await self.begin(method, **params)
        return await self.answer(name)

    async def begin(self, method: str, **params: Any) -> int:
        self._id += 1
        await self.send(
            json.dumps({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}).encode() + b"\n"
        )
        return self._id

    async def answer(self, name: int) -> Any:
        while (message := await self.read()).get("id") != name or "method" in message:
            pass
        return message

    async def notify(self, method: str, **params: Any) -> None:
        await self.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode() + b"\n")

    async def hello(self, **capabilities: Any) -> Any:
        info = {"name": "pipe", "version": "1"}
        answer = await self.ask("initialize", protocolVersion="2025-11-25", capabilities=capabilities, clientInfo=info)
        await self.notify("notifications/initialized")
        return answer

    async def call(self, tool: str, **arguments: Any) -> Any:
        return (await self.ask("tools/call", name=tool, arguments=arguments))["result"]


@asynccontextmanager
async def piped(
    project: Project, *arguments: str, agents: dict[str, Any] | None = None, quick: bool = True, **more: str
) -> AsyncIterator[Pipe]:
    env = environment(**more)
    process = await asyncio.create_subprocess_exec(
        *serve(project, *arguments, agents=agents, quick=quick and can_fork(env)),
        cwd=project.folder,
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=16 * 1024 * 1024,
    )
    try:
        yield Pipe(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(150):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise AssertionError("the server did not end with its input") from None
