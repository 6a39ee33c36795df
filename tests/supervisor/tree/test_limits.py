"""Depth, slots, turns and clocks: what is full queues or is refused, zero means zero, a person's time is free."""

import asyncio

import pytest

import retinue
from retinue import Allow, Approval, ConfigError, Limits, Profile, SpawnRefused
from retinue.core.events import RunSpawned, RunStarted, ToolResult
from retinue.log.listing import load_listing
from retinue.log.runs import Runs
from retinue.testing import ManualClock, allow_all, scripted
from tests.gates import HeldClock
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree, until

DEPTH = (
    "Subagent depth limit exceeded ({0}/{0}). Cannot spawn nested subagent '{1}' \u2014 maximum nesting depth reached."
)


def most_at_once(events: list[retinue.Event]) -> int:
    live, most = 0, 0
    for event in events:
        if event.run and event.kind == "run.started":
            live += 1
        elif event.run and event.kind == "run.ended":
            live -= 1
        most = max(most, live)
    return most


@pytest.mark.requirement("P22")
async def test_what_does_not_fit_queues_in_order_with_positions_in_lists() -> None:
    gate = asyncio.Event()

    @retinue.tool(tier="observe")
    async def hold() -> str:
        """Wait for the gate."""
        await gate.wait()
        return "held"

    kid = Profile("kid", tools=[hold])
    tasks = [{"task": f"t{n}", "subagent_id": f"t{n}", "subagent_type": "kid"} for n in range(5)]
    primary = main({"main": [spawn(*tasks), {"text": "end"}], "kid": [call("hold")]}, tools=["spawn_subagents", kid])
    async with retinue.open(mode="yes", limits=Limits(concurrent=2)) as r:
        run = await r.spawn(primary, "go")
        await until(run, RunStarted, number=2)
        runs = Runs.of(run.tree, await r.control.log.read(run.tree))
        assert [runs.runs[n].state for n in range(1, 6)] == ["running", "running", "queued", "queued", "queued"]
        listing = await load_listing(r.control.log, run.tree)
        assert [listing.find_queue_position(runs.runs[n]) for n in range(6)] == [None, None, None, 1, 2, 3]
        assert [listing.describe_state(runs.runs[n]) for n in (2, 3)] == ["running", "queued #1"]
        assert await run.state() == "waiting_children"
        gate.set()
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert result.status == "done" and len(result.children) == 5
    assert most_at_once(events) == 2
    assert [event.run for event in events if event.run and event.kind == "run.started"] == [1, 2, 3, 4, 5]


@pytest.mark.requirement("P22")
async def test_a_run_that_only_waits_for_its_children_holds_no_slot() -> None:
    script = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}), {"text": "end"}],
        "a": [spawn({"task": "a1"}, {"task": "a2"}), {"text": "a done"}],
        "b": [spawn({"task": "b1"}, {"task": "b2"}), {"text": "b done"}],
        "*": [{"text": "leaf"}],
    }
    result, events = await tree(script, limits=Limits(concurrent=1))
    assert result.status == "done"
    assert len(bodies(events, RunSpawned)) == 7
    assert [child.final_response for child in result.children] == ["a done", "b done"]


async def test_two_waits_of_one_run_share_its_way_back_into_a_slot() -> None:
    both = {"tools": [spawn({"task": "x"})["tools"][0], spawn({"task": "y"})["tools"][0]]}
    script = {"main": [spawn({"task": "a", "subagent_id": "a"}), {"text": "end"}], "a": [both, {"text": "a done"}]}
    result, _ = await tree({**script, "*": [{"text": "leaf"}]}, limits=Limits(concurrent=1))
    assert result.children[0].final_response == "a done"


async def test_null_is_unlimited() -> None:
    tasks = [{"task": f"t{n}"} for n in range(20)]
    script = {"main": [spawn(*tasks), {"text": "end"}], "*": [{"text": "x", "delay": 1}]}
    clock, events = HeldClock(), []
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go", limits=Limits(concurrent=None))
        async for event in run.events():
            events.append(event)
            if most_at_once(events) == 20:
                clock.release()
    assert most_at_once(events) == 20


@pytest.mark.requirement("P28")
async def test_zero_means_zero() -> None:
    script = {"main": [spawn({"task": "a"}), {"text": "{{last_result}}"}]}
    result, events = await tree(script, limits=Limits(concurrent=0))
    assert "maximum concurrent subagent limit reached" in result.final_response
    assert len(bodies(events, RunSpawned)) == 1
    result, events = await tree(script, limits=Limits(depth=0))
    assert DEPTH.format(0, "subagent") in result.final_response
    assert len(bodies(events, RunSpawned)) == 1
    result, _ = await tree(script, limits=Limits(turns=0))
    assert (result.status, result.total_turns) == ("limited", 0)
    result, _ = await tree(script, limits=Limits(seconds=0))
    assert (result.status, result.error_details) == ("timed_out", "Run 'main' timed out after 0ms")


@pytest.mark.requirement("P28")
@pytest.mark.parametrize(
    "wrong",
    [
        {"turns": -1},
        {"depth": -1},
        {"concurrent": -2},
        {"seconds": -0.1},
        {"seconds": float("nan")},
        {"turns": True},
        {"depth": None},
    ],
)
def test_a_wrong_limit_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"limit {next(iter(wrong))!r}"):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.requirement("P27")
@pytest.mark.parametrize("way", ["spawn_subagents", "subagent_kid", "context"])
async def test_depth_is_the_same_for_every_way_of_spawning(way: str) -> None:
    refused: list[str] = []
    kid = Profile("kid")

    @retinue.tool(tier="observe")
    async def by_hand(ctx: retinue.Context) -> str:
        """Spawn from a host-side function."""
        ctx.metadata["subagent_depth"] = 0  # what a run claims changes nothing
        try:
            child = await ctx.spawn("kid", "deeper")
        except SpawnRefused as error:
            refused.append(str(error))
            return str(error)
        return (await child.result()).final_response

    reply = {
        "spawn_subagents": spawn({"task": "deeper", "subagent_type": "kid"}),
        "subagent_kid": call("subagent_kid", task="deeper"),
        "context": call("by_hand"),
    }[way]
    script = {"*": [reply, {"text": "{{last_result}}"}]}
    async with retinue.open(mode="yes", profiles=[kid]) as r:
        primary = main(script, tools=["spawn_subagents", "subagent_kid", by_hand])
        run = await r.spawn(primary, "go", limits=Limits(depth=2))
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert [body.depth for body in bodies(events, RunSpawned)] == [0, 1, 2]
    deepest = bodies(events, ToolResult, run=2)[0]
    assert DEPTH.format(2, "kid") in deepest.text
    assert result.status == "done"


async def test_a_profile_s_depth_only_narrows() -> None:
    kid = Profile("kid", limits=Limits(depth=9))
    flat = Profile("flat", limits=Limits(depth=0))
    script = {
        "main": [call("subagent_kid", task="a"), call("subagent_flat", task="b"), {"text": "end"}],
        "*": [call("subagent_kid", task="deeper"), {"text": "{{last_result}}"}],
    }
    async with retinue.open(mode="yes", profiles=[kid, flat]) as r:
        run = await r.spawn(main(script), "go", limits=Limits(depth=2))
        await run.result()
        events = await r.control.log.read(run.tree)
    assert max(body.depth for body in bodies(events, RunSpawned)) == 2
    flat_run = next(e.run for e in events if e.agent == "flat" and e.kind == "run.spawned")
    assert DEPTH.format(1, "kid") in bodies(events, ToolResult, run=flat_run)[0].text


@pytest.mark.requirement("P26")
async def test_a_run_that_times_out_keeps_its_text_tools_and_usage() -> None:
    clock = ManualClock()
    script = {
        "main": [
            {"text": "half an answer", **call("list_agents"), "usage": {"input_tokens": 5, "output_tokens": 7}},
            {"hang": True},
        ]
    }
    async with retinue.open(mode="yes", clock=clock) as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go", limits=Limits(seconds=30))
        await clock.advance(29.9)
        assert await run.state() == "running"
        await clock.advance(0.2)
        result = await run.result()
    assert (result.status, result.partial) == ("timed_out", "half an answer")
    assert (result.usage.input_tokens, result.usage.output_tokens, result.total_turns) == (5, 7, 2)
    assert [log.name for log in result.tool_logs] == ["list_agents"]
    assert result.duration_ms == 30_000


async def test_time_a_person_takes_does_not_count_for_the_run_or_its_parents() -> None:
    clock, asked, answer = ManualClock(), asyncio.Event(), asyncio.Event()

    async def slow(question: Approval) -> Allow:
        if question.tool == "shell":
            asked.set()
            await answer.wait()
        return Allow()

    script = {
        "main": [call("subagent_kid", task="x"), {"text": "end"}],
        "kid": [call("shell", command="true"), {"hang": True}],
    }
    kid = Profile("kid", limits=Limits(seconds=10))
    async with retinue.open(approver=slow, clock=clock, profiles=[kid]) as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go", limits=Limits(seconds=20))
        await asked.wait()
        await clock.advance(3600)
        assert r.control.trees[run.tree].runs[1].view.state == "waiting_approval"
        answer.set()
        await until(run, ToolResult, number=1)
        await clock.advance(10.1)
        result = await run.result()
    assert result.children[0].status == "timed_out"
    assert result.status == "done"


@pytest.mark.parametrize(("asked", "given"), [(5, 60.0), (600, 600.0), (10**6, 14400.0), (None, 1800.0)])
async def test_a_timeout_asked_by_a_model_is_clamped(asked: int | None, given: float) -> None:
    order = {"task": "x"} if asked is None else {"task": "x", "timeout_seconds": asked}
    _, events = await tree({"main": [spawn(order), {"text": "end"}]})
    assert bodies(events, RunSpawned, run=1)[0].timeout_seconds == given


async def test_cancelling_a_child_spares_its_siblings_and_cancelling_the_primary_nobody() -> None:
    script = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}), {"text": "end"}],
        "a": [{"hang": True}],
        "b": [{"text": "b lives"}],
    }
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")
        await until(run, RunStarted, number=1)
        assert await r.control.cancel(run.tree, 1)
        result = await run.result()
    assert [child.status for child in result.children] == ["cancelled", "done"]
    assert result.status == "done"

    tasks = [{"task": f"t{n}"} for n in range(12)]
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main({"main": [spawn(*tasks)], "*": [{"hang": True}]}), "go")
        await until(run, RunStarted, number=8)
        await run.cancel()
        result = await run.result()
    assert {child.status for child in result.children} == {"cancelled"}
    assert len(result.children) == 12


async def test_leaving_the_retinue_ends_everything() -> None:
    async with retinue.open(approver=allow_all) as r:
        run = await r.spawn(main({"main": [spawn({"task": "x"})], "*": [{"hang": True}]}), "go")
        await until(run, RunStarted, number=1)
    assert (await run.result()).status == "cancelled"
    with pytest.raises(retinue.RetinueError, match="closed"):
        await r.spawn(main({}), "again")


async def test_a_run_that_will_not_stop_is_abandoned_and_still_ends_once() -> None:
    clock, stubborn = ManualClock(), asyncio.Event()

    async def never(task: str, ctx: retinue.Context) -> str:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        ctx.emit("too late")
        return "late"

    async with retinue.open(clock=clock) as r:
        run = await r.spawn(Profile("never", call=never), "go")
        await until(run, RunStarted)
        await run.cancel()
        await clock.advance(9)
        assert await run.state() == "running"
        await clock.advance(2)
        result = await run.result()
        stubborn.set()
        await clock.settle()
        events = await r.control.log.read(run.tree)
    assert result.status == "cancelled"
    assert result.warning is not None and "abandoned" in result.warning
    assert [event.kind for event in events][-2:] == ["warning", "run.ended"]
