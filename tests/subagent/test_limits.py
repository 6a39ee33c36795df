"""Depth, slots, turns and time: what a subagent may not do, in the words its parent reads."""

import asyncio
import itertools
from typing import Any

import pytest

import retinue
from retinue import Context, Limits, Profile, Result, ToolError
from retinue.subagent import SubagentConfig, SubagentFactory, SubagentTool
from retinue.testing import ManualClock, scripted
from tests.subagent.agents import Play, as_child, as_primary, as_tool, calls, echo, spy

FULL = (
    "Cannot spawn subagent '{}': maximum concurrent subagent limit reached. Try again when another subagent completes."
)
TOO_DEEP = (
    "Subagent depth limit exceeded ({}/{}). Cannot spawn nested subagent '{}' \u2014 maximum nesting depth reached."
)


def chain(*names: str, model: Any) -> Profile:
    """Each agent has the next one as its only tool."""
    profile = Profile(names[-1], model=model, tools=[])
    for name in reversed(names[:-1]):
        profile = Profile(name, model=model, tools=[profile])
    return profile


def down(*names: str) -> dict[str, Any]:
    """Each agent calls the next and says what came back."""
    script: dict[str, Any] = {
        name: [calls(f"subagent_{below}", task="on"), {"text": "{{last_result}}"}]
        for name, below in itertools.pairwise(names)
    }
    return script | {names[-1]: [{"text": "bottom"}]}


async def run_chain(*names: str, **limits: Any) -> Result[Any]:
    async with retinue.open(mode="yes", limits=Limits(**limits)) as r:
        return await r.run(chain(*names, model=scripted(down(*names))), "go")


@pytest.mark.requirement("SDK-6", "SDK-18", "SDK-19")
async def test_three_levels_below_the_primary_and_no_more() -> None:
    allowed = await run_chain("main", "a", "b", "c")
    refused = await run_chain("main", "a", "b", "c", "d")
    assert allowed.final_response == "bottom"
    assert refused.final_response == TOO_DEEP.format(3, 3, "d")
    deepest = refused.children[0].children[0].children[0]
    assert (deepest.path, deepest.status, deepest.children) == ("/main/a-1/b-2/c-3", "done", ())
    assert [log.success for log in deepest.tool_logs] == [False]


@pytest.mark.requirement("SDK-6", "SDK-19")
@pytest.mark.parametrize(("depth", "text"), [(0, TOO_DEEP.format(0, 0, "a")), (1, TOO_DEEP.format(1, 1, "b"))])
async def test_the_maximum_depth_is_inherited(depth: int, text: str) -> None:
    assert (await run_chain("main", "a", "b", depth=depth)).final_response == text


@pytest.mark.requirement("SDK-19")
async def test_depth_is_an_error_of_the_tool() -> None:
    async with SubagentFactory(model=scripted({}), max_depth=0) as factory:
        with pytest.raises(ToolError) as raised:
            await factory.create(SubagentConfig("a")).execute(None, {"task": "go"})
    assert str(raised.value) == TOO_DEEP.format(0, 0, "a")


@pytest.mark.requirement("SDK-6", "SDK-18", "SDK-19")
async def test_inside_a_run_depth_is_the_registrys_and_not_what_the_run_claims() -> None:
    worker = SubagentTool(SubagentConfig("a"), model=scripted({}))

    async def liar(task: str, ctx: Context) -> str:
        seen = dict(ctx.metadata)
        ctx.metadata.update(subagent_depth=0, max_subagent_depth=99)
        if task == "bottom":
            with pytest.raises(ToolError) as raised:
                await worker.execute(ctx, {"task": "go"})
            return str(raised.value)
        child = await ctx.spawn(Profile("liar", call=liar), "bottom" if seen["subagent_depth"] == 2 else "on")
        return (await child.result()).final_response

    async with retinue.open() as r:
        result = await r.run(Profile("liar", call=liar), "on")
    assert result.final_response == TOO_DEEP.format(3, 3, "a")


@pytest.mark.requirement("SDK-20", "SDK-22")
async def test_a_full_tree_refuses_at_once_and_a_slot_comes_back_however_the_run_ends() -> None:
    model = spy({"slow": [{"hang": True}], "bad": [{"error": "boom"}], "quick": [{"text": "ok"}]})
    async with SubagentFactory(model=model, max_concurrent=1) as factory:
        slow, bad, quick = (factory.create(SubagentConfig(name)) for name in ("slow", "bad", "quick"))
        stop = asyncio.Event()
        running = asyncio.create_task(slow.execute(None, {"task": "go"}, cancel=stop))
        await model.reached["slow", 1].wait()
        refused = await quick.execute(None, {"task": "go"})
        stop.set()
        cancelled = await running
        failed = await bad.execute(None, {"task": "go"})
        done = await quick.execute(None, {"task": "go"})
    assert (refused.success, refused.output, refused.duration_ms, refused.data) == (
        False,
        FULL.format("quick"),
        0,
        None,
    )
    assert (cancelled.output, failed.output, done.output) == ("Subagent cancelled", "boom", "ok")
    assert len(model.asked("quick")) == 1


@pytest.mark.requirement("SDK-6", "SDK-20", "SDK-22")
@pytest.mark.parametrize("concurrent", [1, 2])
async def test_a_run_that_waits_for_its_subagent_keeps_its_slot(concurrent: int) -> None:
    result = await run_chain("main", "a", "b", "c", concurrent=concurrent)
    assert result.final_response == FULL.format("abc"[concurrent])
    assert (await run_chain("main", "a", "b", "c", concurrent=3)).final_response == "bottom"


@pytest.mark.requirement("SDK-20")
async def test_the_primary_without_any_slot() -> None:
    result = await run_chain("main", "a", concurrent=0)
    assert (result.status, result.final_response) == ("done", FULL.format("a"))
    assert result.tool_logs[0].success is False


@pytest.mark.requirement("SDK-21")
@pytest.mark.parametrize(("limit", "running"), [({}, 8), ({"max_concurrent": None}, 40)], ids=["default", "unlimited"])
async def test_how_many_go_at_once(limit: dict[str, Any], running: int) -> None:
    stop = asyncio.Event()
    model = spy({"*": [{"hang": True}]})
    async with SubagentFactory(model=model, **limit) as factory:
        tool = factory.create(SubagentConfig("worker"))
        going = [asyncio.create_task(tool.execute(None, {"task": "go"}, cancel=stop)) for _ in range(40)]
        await ManualClock.settle()
        assert len(model.requests) == running
        stop.set()
        outcomes = await asyncio.gather(*going)
    assert sum(outcome.output == FULL.format("worker") for outcome in outcomes) == 40 - running


@pytest.mark.requirement("SDK-2", "SDK-26")
@pytest.mark.parametrize("way", [as_primary, as_child, as_tool], ids=["primary", "child", "tool"])
async def test_a_hundred_turns_unless_told_otherwise(way: Any) -> None:
    play = Play([calls("echo", message="again")] * 150)
    async with retinue.open() as r:
        ended = await way(play, r)
    result = ended if isinstance(ended, dict) else ended.to_json()
    who = "Run" if way is as_primary else "Subagent"
    assert (result["total_turns"], result["tool_count"], result["success"]) == (100, 100, False)
    assert result["error_details"] == f"{who} 'worker' stopped: limit of 100 turns reached"


@pytest.mark.requirement("SDK-2")
async def test_a_run_goes_on_until_it_is_complete() -> None:
    play = Play([calls("echo", message="again")] * 7 + [{"text": "complete"}], limits=Limits(turns=8))
    async with retinue.open() as r:
        result = await as_child(play, r)
    assert (result.total_turns, result.final_response) == (8, "complete")


@pytest.mark.requirement("SDK-28")
async def test_a_timeout_aborts_the_call_of_the_model_and_all_below() -> None:
    clock = ManualClock()
    model = spy({"a": [calls("subagent_b", task="go")], "b": [{"delay": 60.0, "text": "late"}]}, clock=clock)
    b = Profile("b", tools=[])
    async with SubagentFactory(model=model, tools=[b], clock=clock, mode="yes") as factory:
        tool = factory.create(SubagentConfig("a").with_timeout_ms(10))
        running = asyncio.create_task(tool.execute(None, {"task": "go"}))
        await model.reached["b", 1].wait()
        await clock.advance(0.01)
        outcome = await running
        assert outcome.output == "Subagent timed out"
        assert model.aborted == ["b"]
        await clock.advance(3600)
    assert [request.ref.agent for request in model.requests] == ["a", "b"]


@pytest.mark.requirement("SDK-29")
async def test_what_remains_is_the_timeout_minus_what_has_passed() -> None:
    clock = ManualClock()
    slow = {"delay": 0.006, **calls("echo", message="x")}
    async with SubagentFactory(model=spy({"*": [slow] * 9}, clock=clock), tools=[echo], clock=clock) as factory:
        tool = factory.create(SubagentConfig("worker").with_timeout_ms(10))
        running = asyncio.create_task(tool.execute(None, {"task": "go"}))
        await clock.advance(0.009)
        assert not running.done()
        await clock.advance(0.002)
        outcome = await running
    assert outcome.duration_ms == 10
    assert outcome.data is not None
    assert (outcome.data["tool_count"], outcome.data["total_turns"]) == (1, 2)


@pytest.mark.requirement("SDK-29")
async def test_nothing_left_times_out_at_once() -> None:
    model = spy({})
    async with SubagentFactory(model=model) as factory:
        outcome = await factory.create(SubagentConfig("worker").with_timeout_ms(0)).execute(None, {"task": "go"})
    assert outcome.data is not None
    assert outcome.data["error_details"] == "Subagent 'worker' timed out after 0ms"
    assert model.requests == []


@pytest.mark.requirement("SDK-29")
async def test_without_a_timeout_a_run_has_all_the_time_it_wants() -> None:
    clock = ManualClock()
    year = 365 * 86400.0
    model = spy({"*": [{"delay": year, "text": "at last"}]}, clock=clock)
    async with SubagentFactory(model=model, clock=clock) as factory:
        running = asyncio.create_task(factory.create(SubagentConfig("worker")).execute(None, {"task": "go"}))
        await model.reached["worker", 1].wait()
        await clock.advance(year)
        assert (await running).output == "at last"


@pytest.mark.requirement("SDK-29", "SDK-30")
@pytest.mark.parametrize("ms", [1, 10, 1009, 90_000, 1_800_000, 12_345_678])
async def test_the_milliseconds_are_written_out(ms: int) -> None:
    clock = ManualClock()
    model = spy({"*": [{"hang": True}]}, clock=clock)
    async with SubagentFactory(model=model, clock=clock) as factory:
        tool = factory.create(SubagentConfig("worker").with_timeout_ms(ms))
        running = asyncio.create_task(tool.execute(None, {"task": "go"}))
        await model.reached["worker", 1].wait()
        await clock.advance(ms / 1000 + 0.001)
        outcome = await running
    assert outcome.data is not None
    assert outcome.data["error_details"] == f"Subagent 'worker' timed out after {ms}ms"
