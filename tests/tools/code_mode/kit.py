"""Tools as an MCP client lends them, made of plain functions, and short ways to run programs that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

import retinue
from retinue import Event, Result
from retinue.core.events import ToolResult
from retinue.tools.functions import FunctionTool
from tests.supervisor.tree.kit import bodies, call, main

NAME = "execute_python_code"


def served(
    function: Callable[..., Any],
    *,
    server: str = "weather",
    tier: Literal["observe", "confirm"] = "observe",
    **fields: Any,
) -> FunctionTool:
    """The function as the tool of that name on a server."""
    made = FunctionTool(function, tier=tier, repeatable=False, name=f"mcp__{server}__{function.__name__}")
    made.spec = msgspec.structs.replace(made.spec, server=server, **fields)
    return made


def forecast(city: str, days: int = 1) -> dict[str, Any]:
    """The weather of the next days."""
    return {"city": city, "degrees": len(city) * days}


def broken(city: str) -> str:
    """Never works."""
    raise ValueError(f"no station in {city}")


def report(city: str) -> str:
    """Words about the weather."""
    return f"fine in {city}"


TOOLS = [served(forecast), served(broken), served(report)]


def program(code: str, **more: Any) -> dict[str, Any]:
    return call(NAME, code=code, **more)


async def run(
    code: str, *, tools: list[Any] | None = None, timeout: float | None = None, **options: Any
) -> tuple[str, Result[Any], list[Event]]:
    """Run a program in a tree of its own. Return the program's result, the tree's result, and all events."""
    more = {} if timeout is None else {"executionTimeout": timeout}
    made = main({"main": [program(code, **more), {"text": "over"}]}, tools=[NAME, *(TOOLS if tools is None else tools)])
    async with retinue.open(**{"mode": "yes", **options}) as r:
        started = await r.spawn(made, "go")
        events = [event async for event in started.events()]
        return said(events), await started.result(), events


def said(events: list[Event]) -> str:
    [text] = [body.text for body in bodies(events, ToolResult) if body.name == NAME]
    return str(text)
