"""Tests of a client's own tool calls in its process: calls that rules forbid, and failed calls in the log."""

import asyncio
from pathlib import Path

import pytest

from retinue.core.control import ClientOptions
from retinue.core.errors import Limited, RetinueError, ToolError
from retinue.core.events import Event, ToolCall, ToolResult
from retinue.core.messages import Call
from retinue.core.ports import Outcome
from retinue.core.rules import Rules, parse_rule
from retinue.supervisor.supervisor import CALL_GIVEN_UP
from tests.control.loopback.kit import serve_supervisor

SPAWN = Call("call_1", "spawn_subagents", {"tasks": [{"task": "look", "subagent_type": "explorer"}]})


async def test_a_client_records_work_that_fails_and_work_that_is_given_up(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def fail() -> Outcome:
        raise RetinueError("it went wrong")

    async def hang() -> Outcome:
        begun.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop() -> Outcome:
        raise Limited("the budget is spent")

    async with serve_supervisor(tmp_path, script={}) as h:
        c = h.supervisor
        client = await c.open_client(ClientOptions(name="caller", task="somebody"))
        with pytest.raises(RetinueError, match="it went wrong"):
            await client.call_tool(Call("call_1", "own", {}), rules_of=SPAWN.name, work=fail)
        with pytest.raises(Limited):
            await client.call_tool(Call("call_3", "own", {}), rules_of=SPAWN.name, work=stop)
        call = asyncio.ensure_future(client.call_tool(Call("call_2", "own", {}), rules_of=SPAWN.name, work=hang))
        await begun.wait()
        call.cancel()
        await asyncio.wait([call])
        await client.close()
        events = [item async for item in c.watch(client.tree) if isinstance(item, Event)]
        results = [event.body for event in events if isinstance(event.body, ToolResult)]
        given_up = (CALL_GIVEN_UP, False)
        assert [(body.text, body.success) for body in results] == [("it went wrong", False), given_up, given_up]
        assert c.trees.get(client.tree) is None


async def test_the_log_has_the_call_of_a_client_like_any_other_call(tmp_path: Path) -> None:
    long = "half a pair \ud800 " + "x" * 60_000

    async def speak() -> Outcome:
        return Outcome(long)

    async def crash() -> Outcome:
        raise ValueError("a bug")

    async with serve_supervisor(tmp_path, script={}) as h:
        c = h.supervisor
        client = await c.open_client(ClientOptions(name="caller", task="somebody"))
        outcome = await client.call_tool(Call("call_1", "own", {}), rules_of=SPAWN.name, work=speak)
        crashed = await client.call_tool(Call("call_2", "own", {}), rules_of=SPAWN.name, work=crash)
        await client.close()
        bodies = [item.body async for item in c.watch(client.tree) if isinstance(item, Event)]
        spoken, broken = [body for body in bodies if isinstance(body, ToolResult)]
        assert outcome.text == long  # the client gets all of it
        assert len(spoken.text.encode()) < 60_000 and "half a pair ? x" in spoken.text
        assert Path(spoken.file).read_text() == long.replace("\ud800", "?")
        assert crashed.text == broken.text == "own failed: ValueError: a bug" and not broken.success
        calls = [body for body in bodies if isinstance(body, ToolCall)]
        assert [call.tier for call in calls] == ["user", "user"]


async def test_a_rule_forbids_the_call_of_a_client_before_anything_is_logged(tmp_path: Path) -> None:
    rules = Rules(deny=(parse_rule(SPAWN.name),))
    async with serve_supervisor(tmp_path, rules=rules) as h:
        c = h.supervisor
        client = await c.open_client(ClientOptions(name="caller", task="somebody"))
        with pytest.raises(ToolError, match=f"the rule {SPAWN.name} forbids {SPAWN.name}"):
            await client.call_tool(SPAWN)
        with pytest.raises(ToolError, match="has no tool 'nothing'"):
            await client.call_tool(Call("call_2", "nothing", {}))
        assert await client.is_at_work()
        await client.close()
        assert not await client.is_at_work()
        events = [item async for item in c.watch(client.tree) if isinstance(item, Event)]
        assert not any(isinstance(event.body, ToolCall) for event in events)
