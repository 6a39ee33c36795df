"""A well-behaved MCP server with one tool for everything the client has to handle; stdio, or HTTP on the port given.

Run as a program: `python calm.py`, `python calm.py PORT`."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import (
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel, Field

server = MCPServer("calm")
PIXEL = base64.b64encode(b"\x89PNG not really").decode()


class Person(BaseModel):
    name: str = Field(description="who you are")
    age: int = 30


class Sum(BaseModel):
    total: int


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> Sum:
    """Adds two numbers."""
    return Sum(total=a + b)


@server.tool(structured_output=False)
def say(text: str, loud: bool = False) -> str:
    """Says it back."""
    return text.upper() if loud else text


@server.tool(structured_output=False)
def fail() -> str:
    """Never works."""
    raise ToolError("the disk is made of cheese")


@server.tool()
def picture() -> CallToolResult:
    """A picture and a note."""
    note = TextResourceContents(uri="note://1", mime_type="text/plain", text="a note")
    return CallToolResult(
        content=[
            TextContent(type="text", text="here"),
            ImageContent(type="image", data=PIXEL, mime_type="image/png"),
            EmbeddedResource(type="resource", resource=note),
        ]
    )


@server.tool(structured_output=False)
def large(size: int) -> str:
    """A long text on one line."""
    return "x" * size


@server.tool(structured_output=False)
def environment() -> str:
    """The variables it has."""
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()))


@server.tool(structured_output=False)
def who() -> str:
    """Its process, the folder it is in, and a process it leaves behind."""
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
    return f"{os.getpid()} {left.pid} {Path.cwd()}"


@server.tool(structured_output=False)
def complain(kilobytes: int) -> str:
    """Writes much to stderr, and what a terminal should never get."""
    sys.stderr.write("\x1b[31mred\x1b[0m " + ("e" * 1023 + "\n") * kilobytes)
    sys.stderr.flush()
    return "complained"


@server.tool(structured_output=False)
async def wait(marker: str, ctx: Context) -> str:
    """Work until cancelled, and write the cancellation down."""
    Path(marker).write_text("begun")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        Path(marker).write_text("cancelled")
        raise
    return "never"


@server.tool(structured_output=False)
async def work(steps: int, marker: str, ctx: Context) -> str:
    """Works in steps, each when a file with its number is there, and tells of each."""
    for step in range(steps):
        while not Path(f"{marker}{step}").exists():
            await asyncio.sleep(0.01)
        await ctx.report_progress(step + 1, steps, f"step {step + 1}")
    return f"{steps} steps"


def person() -> Elicit[Person]:
    return Elicit("Who is there?", Person)


@server.tool(structured_output=False)
async def ask(answer: Annotated[ElicitationResult[Person], Resolve(person)]) -> str:
    """Asks who is there."""
    said: Any = getattr(answer, "data", None)
    return f"{answer.action}: {said}"


@server.tool(structured_output=False)
async def delegate(prompt: str, runId: str, ctx: Context) -> str:
    """Hands a task to a subagent, which waits when it is told to."""
    word, _, marker = prompt.partition(" ")
    if word == "wait":
        return await wait(marker, ctx)
    meta = {key: value for key, value in (ctx.request_context.meta or {}).items() if key.startswith("retinue/")}
    return f"prompt={prompt} runId={runId} meta={meta}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
