"""Programs that call real MCP servers: the host starts those, and subagents in them report as from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import retinue
from retinue.core.events import Event, RunEnded, RunSpawned, Thinking, ToolCall, ToolResult
from tests.sandbox.places import needs_bubblewrap
from tests.sandbox.scenes import project, removing
from tests.supervisor.tree.kit import bodies, main
from tests.tools.code_mode.kit import NAME, program, said

SERVER = {"helper": {"command": sys.executable, "args": [str(Path(__file__).with_name("agent_server.py"))]}}
CODE = """
import asyncio, inspect, os
from tools import helper
print(inspect.signature(helper.ask), [name for name in os.environ if "LOGGING_ADDRESS" in name])
print(await asyncio.gather(helper.ask("first"), helper.ask(prompt="second")))
"""


def ended_program(event: Event) -> bool:
    return isinstance(event.body, ToolResult) and event.body.name == NAME


@pytest.mark.requirement("CPE-7", "CPE-57", "CPE-60")
@pytest.mark.parametrize("runtime", ["inherited", pytest.param("isolated", marks=needs_bubblewrap)])
async def test_a_subagent_called_from_a_program_is_seen_live(runtime: str) -> None:
    folder = project()
    profile = main({"main": [program(CODE, executionTimeout=30), {"text": "over"}]})
    options = {"mode": "yes", "path": folder / ".retinue", "runtime": runtime, "mcp_servers": SERVER}
    async with removing(folder), retinue.open(**options) as r:  # type: ignore[arg-type]
        started = await r.spawn(profile, "go")
        events: list[Event] = [event async for event in started.events()]
    assert (
        said([event for event in events if event.run == 0])
        == "(prompt: 'str') -> 'str' []\n['first: 1 address', 'second: 1 address']\n"
    )
    [outer] = [at for at, event in enumerate(events) if event.run == 0 and ended_program(event)]
    kinds = [RunSpawned, Thinking, ToolCall, ToolResult, RunEnded]
    for run in (1, 2):
        places = [at for at, event in enumerate(events) if event.run == run and type(event.body) in kinds]
        assert [type(events[at].body) for at in places] == kinds
        assert places[-1] < outer
        [thought] = bodies(events, Thinking, run=run)
        assert thought.text in ("thinking about first", "thinking about second")
        [call] = bodies(events, ToolCall, run=run)
        assert (call.name, call.timeout_seconds) == (NAME, 10)
    assert "runId" not in str([body.args for body in bodies(events, ToolCall, run=0)])
