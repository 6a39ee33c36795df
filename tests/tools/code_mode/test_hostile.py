"""A worker that was taken over, and what it can make of the calls of programs: nothing its run could not do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue.build import Parts, make_supervisor
from retinue.core.events import Delta, Event, RunEnded, ToolCall, ToolResult
from retinue.core.profiles import Profile, Task
from retinue.sandbox.isolated import Isolated
from retinue.testing import scripted
from tests.sandbox.test_hostile import TURN, NoWallAtAll
from tests.supervisor.tree.kit import bodies, call
from tests.tools.code_mode.kit import NAME, TOOLS, program, served

ALLOWED = TURN + "say(Begin(2, 'call_1_1', True)); hear()\n"
REPORT = "'mcp__weather__report', {'city': 'Rome'}"


async def played(script: str, *tools: Any, reply: dict[str, Any] | None = None) -> list[Event]:
    """A run whose model wants a program to be run, and whose worker is the script."""
    owner = make_supervisor(Parts(Path.cwd(), mode="yes"))
    owner._planner._runtimes._made["isolated"] = Isolated(NoWallAtAll(script))  # type: ignore[attr-defined]
    model = scripted({"main": [reply or program("1"), {"text": "x"}]})
    listed = [NAME, "shell", "list_agents", *TOOLS, *tools]
    node = owner.spawn(Profile("main", model=model, runtime="isolated", tools=listed), Task("go"))
    events = [event async for event in owner.watch(node.ref.tree) if not isinstance(event, Delta)]
    await owner.close()
    return events


@pytest.mark.parametrize(
    ("script", "reply", "words"),
    [
        (TURN + f"say(Make(2, 'call_1_1', {REPORT})); rest()", None, "a call out of order: 'call_1_1'"),
        (TURN + f"say(Make(2, 'mine', {REPORT})); rest()", None, "a call out of order: 'mine'"),
        (ALLOWED + f"say(Make(3, 'call_1_1', {REPORT})); rest()", call("list_agents"),
         "a call within 'list_agents'"),
        (ALLOWED + f"say(Finish('call_1_1', 'x', True, 1), Make(3, 'call_1_1', {REPORT})); rest()", None,
         "a call out of order: 'call_1_1'"),
    ],
)  # fmt: skip
async def test_a_call_of_no_program_ends_the_run(script: str, reply: dict[str, Any] | None, words: str) -> None:
    events = await played(script, reply=reply)
    [ended] = bodies(events, RunEnded)
    assert ended.status == "failed"
    assert words in ended.error_details
    assert not [body for body in bodies(events, ToolCall) if body.within]


async def test_it_can_name_only_tools_of_servers() -> None:
    script = ALLOWED + (
        "said = []\n"
        "for number, name in enumerate(('shell', 'list_agents', 'nothing', 'execute_python_code'), 3):\n"
        "    say(Make(number, 'call_1_1', name, {})); said += [frame.error[:16] for frame in hear()]\n"
        f"say(Make(9, 'call_1_1', {REPORT})); said += [bytes(hear()[0].value).decode()]\n"
        "say(Finish('call_1_1', str(said), True, 1), Fact(TurnEnded(1)), Fact(TurnStarted(2)), Ask(10)); hear()\n"
        "say(Fact(TurnEnded(2)), End('done')); rest()"
    )
    events = await played(script)
    assert bodies(events, RunEnded)[0].status == "done"
    assert [body.name for body in bodies(events, ToolCall)] == [NAME, "mcp__weather__report"]
    assert bodies(events, ToolResult)[-1].text == str(["There is no tool"] * 4 + ['"fine in Rome"'])


async def test_a_flood_of_calls_is_held_back_and_given_up_with_the_program() -> None:
    async def never() -> None:
        """Waits for ever."""
        await asyncio.get_running_loop().create_future()

    script = ALLOWED + (
        "say(*(Make(number, 'call_1_1', 'mcp__weather__never', {}) for number in range(3, 103)))\n"
        "refused = 0\n"
        "while refused < 36: refused += sum('at once' in frame.error for frame in hear())\n"
        "say(Finish('call_1_1', 'x', True, 1), Fact(TurnEnded(1)), Fact(TurnStarted(2)), Ask(103)); hear()\n"
        "say(Fact(TurnEnded(2)), End('done')); rest()"
    )
    events = await played(script, served(never))
    assert bodies(events, RunEnded)[0].status == "done"
    results = bodies(events, ToolResult)
    assert [body.name for body in results] == ["mcp__weather__never"] * 64 + [NAME]
    assert {body.success for body in results[:-1]} == {False}
