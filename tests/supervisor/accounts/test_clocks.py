"""Tests of stall budgets and deadlines: signs of activity, waits that do not count, and clocks that jump or stop."""

import asyncio
import threading
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Limits, Profile
from retinue.concurrency import StallTimer
from retinue.core.events import RunStarted, ToolCall, ToolResult, Warned
from retinue.log.runs import Runs
from retinue.testing import ManualClock, scripted
from tests.supervisor.tree.kit import bodies, call, spawn, until

STALLED = "timed out: stalled, nothing happened in it for 120 s"


def hanging(clock: ManualClock, agents: dict[str, Any]) -> Profile:
    return Profile("main", model=scripted(agents, clock=clock))


async def test_a_stalled_run_is_told_of_and_then_given_up() -> None:
    clock = ManualClock()
    async with retinue.open(mode="yes", clock=clock) as r:
        profile = hanging(clock, {"main": [{"text": "half", **call("list_agents")}, {"hang": True}]})
        run = await r.spawn(profile, "go", limits=Limits(stall=60))
        await clock.advance(59.9)
        assert await run.state() == "running"
        await clock.advance(0.2)
        assert await run.state() == "stalled"
        await clock.advance(59.8)
        assert await run.state() == "stalled"
        await clock.advance(0.2)
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert (result.status, result.final_response) == ("timed_out", "Run timed out")
    assert result.error_details == f"Run 'main' {STALLED}"
    assert (result.partial, result.duration_ms) == ("half", 120_000)
    [warning] = bodies(events, Warned)
    assert (warning.code, warning.text[:8]) == ("stalled", "stalled:")
    stored = Runs.of(run.tree, events[:-1])
    assert stored.runs[0].state == "stalled"


async def test_whatever_happens_after_a_stall_is_life() -> None:
    clock, gate = ManualClock(), asyncio.Event()

    @retinue.tool(tier="observe")
    async def hold() -> str:
        """Wait for the gate."""
        await gate.wait()
        return "held"

    profile = Profile("main", tools=[hold], model=scripted({"main": [call("hold"), {"hang": True}]}, clock=clock))
    async with retinue.open(mode="yes", clock=clock) as r:
        run = await r.spawn(profile, "go", limits=Limits(stall=60))
        await clock.advance(70)
        assert await run.state() == "stalled"
        gate.set()
        await clock.advance(59)
        assert await run.state() == "running"
        await clock.advance(2)
        assert await run.state() == "stalled"
        await clock.advance(60)
        assert (await run.result()).status == "timed_out"


@pytest.mark.requirement("P24")
async def test_a_parent_that_waits_for_a_child_at_work_is_not_stalled() -> None:
    clock = ManualClock()
    agents = {
        "main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "end"}],
        "kid": [{**call("list_agents"), "delay": 50} for _ in range(10)] + [{"text": "kid done", "delay": 50}],
    }
    async with retinue.open(mode="yes", clock=clock, profiles=[Profile("kid")]) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(stall=60))
        await clock.advance(560)
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert result.status == "done"
    assert bodies(events, Warned) == []


@pytest.mark.requirement("P24")
async def test_the_ending_of_a_child_is_life_for_a_parent_that_waits_for_others() -> None:
    clock = ManualClock()
    children = [Profile(f"child{n}", limits=Limits(stall=None, seconds=50 * n)) for n in (1, 2, 3)]
    tasks = [{"task": "x", "subagent_type": child.name} for child in children]
    agents = {"main": [spawn(*tasks), {"text": "end"}], **{child.name: [{"hang": True}] for child in children}}
    async with retinue.open(mode="yes", clock=clock, profiles=children) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(stall=60))
        await clock.advance(400)
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert (result.status, result.final_response) == ("done", "end")
    assert [child.status for child in result.children] == ["timed_out"] * 3
    assert bodies(events, Warned) == []


@pytest.mark.requirement("P24")
async def test_a_stalled_child_ends_alone_and_its_parent_goes_on() -> None:
    clock = ManualClock()
    agents = {"main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "end"}], "kid": [{"hang": True}]}
    async with retinue.open(mode="yes", clock=clock, profiles=[Profile("kid")]) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(stall=60))
        await clock.advance(121)
        result = await run.result()
    assert (result.status, result.children[0].status) == ("done", "timed_out")
    assert result.children[0].error_details == f"Subagent 'kid' {STALLED}"


@pytest.mark.requirement("P24")
async def test_text_that_still_comes_is_life() -> None:
    clock = ManualClock()

    class Slow:
        name = "slow"

        async def complete(self, request: Any, on_delta: Any) -> Any:
            for _ in range(10):
                await clock.sleep(50)
                on_delta("text", "more ")
            return retinue.core.messages.Reply("all")

    async with retinue.open(clock=clock) as r:
        run = await r.spawn(Profile("main", model=Slow()), "go", limits=Limits(stall=60))
        await clock.advance(501)
        assert (await run.result()).status == "done"


@pytest.mark.requirement("P24")
async def test_a_person_who_thinks_stalls_nobody() -> None:
    clock, answer = ManualClock(), asyncio.Event()

    async def slow(question: Approval) -> Allow:
        if question.tool == "shell":
            await answer.wait()
        return Allow()

    agents = {
        "main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "end"}],
        "kid": [call("shell", command="true"), {"hang": True}],
    }
    kid = Profile("kid", limits=Limits(stall=30))
    async with retinue.open(approver=slow, clock=clock, profiles=[kid]) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(stall=60))
        await until(run, ToolCall, number=1)
        await clock.advance(3600)
        runs = r.control.trees[run.tree].runs
        assert [each.view.state for each in runs] == ["waiting_children", "waiting_approval"]
        answer.set()
        await until(run, ToolResult, number=1)
        await clock.advance(61)
        result = await run.result()
    assert (result.status, result.children[0].status) == ("done", "timed_out")


@pytest.mark.requirement("P24")
async def test_who_waits_for_a_slot_stalls_nobody() -> None:
    clock = ManualClock()
    agents = {
        "main": [
            spawn({"task": "a", "subagent_type": "lead"}, {"task": "b", "subagent_type": "busy"}),
            {"text": "end"},
        ],
        "busy": [{**call("list_agents"), "delay": 50} for _ in range(6)] + [{"text": "busy done"}],
        "lead": [spawn({"task": "c", "subagent_type": "kid"}), {"text": "lead done"}],  # its kid waits for busy's slot
        "kid": [{"text": "kid done"}],
    }
    profiles = [Profile("busy"), Profile("lead", limits=Limits(stall=20)), Profile("kid")]
    async with retinue.open(mode="yes", clock=clock, profiles=profiles) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(stall=60, concurrent=1))
        await clock.advance(400)
        result = await run.result()
    assert [child.status for child in result.children] == ["done", "done"]
    assert result.warning is None


@pytest.mark.requirement("P24")
async def test_time_in_which_we_did_not_run_ourselves_stalls_nobody() -> None:
    class SuspendedClock(ManualClock):
        def suspend(self, seconds: float) -> None:
            """Move the time on as in a machine that sleeps: nothing runs when it is due."""
            self._now += seconds

    told: list[str] = []
    clock = SuspendedClock()
    stall = StallTimer(
        60,
        clock,
        parent=None,
        is_queued=lambda: False,
        warn=lambda: told.append("warned"),
        on_expire=lambda: told.append("over"),
    )
    stall.start()
    clock.suspend(3600)
    await clock.advance(59)
    assert told == []
    await clock.advance(1)
    assert told == ["warned"]
    await clock.advance(60)
    assert told == ["warned", "over"]


@pytest.mark.requirement("P21")
async def test_a_blocked_loop_makes_a_deadline_no_later_than_the_block() -> None:
    blocked = False

    async def stubborn(task: str, ctx: retinue.Context) -> str:
        nonlocal blocked
        threading.Event().wait(2 * seconds)
        blocked = True
        await asyncio.Event().wait()
        return "never"

    for seconds in (0.2, 2, 20):  # a slow machine may need longer than that before it begins
        async with retinue.open() as r:
            result = await r.run(Profile("main", call=stubborn), "go", limits=Limits(seconds=seconds))
        assert result.status == "timed_out"
        if blocked:
            break
    assert blocked


@pytest.mark.requirement("P21")
async def test_a_wall_clock_that_jumps_changes_no_deadline() -> None:
    class Jumping(ManualClock):
        jump = 0.0

        def wall(self) -> float:
            return super().wall() + self.jump

    clock = Jumping()
    agents = {"main": [spawn({"task": "x", "subagent_type": "kid"})], "kid": [{"hang": True}]}
    kid = Profile("kid", limits=Limits(stall=None))
    async with retinue.open(mode="yes", clock=clock, profiles=[kid]) as r:
        run = await r.spawn(hanging(clock, agents), "go", limits=Limits(seconds=100, stall=40))
        await until(run, RunStarted, number=1)
        for jump in (86400.0, -86400.0, 3.0e8):
            clock.jump = jump
            await clock.advance(13)
            assert await run.state() == "waiting_children"
        await clock.advance(2)
        assert await run.state() == "stalled"
        await clock.advance(40)
        result = await run.result()
    assert (result.status, result.duration_ms) == ("timed_out", 80_000)
