"""Questions that only a person can answer: every call of theirs has a result, whatever happens meanwhile."""

import asyncio

import pytest

import retinue
from retinue import Allow, Approval, Context, Event, tool
from retinue.core.events import ToolCall, ToolResult
from tests.supervisor.tree.kit import bodies, call, main


@tool(tier="observe")
async def inquire(ctx: Context) -> str:
    """Asks a person, as an elicitation of an MCP server does, whose error does not end the run."""
    try:
        return str(await ctx.ask_person("which", {"a": 1}, "which one?"))
    except Exception as error:
        return f"failed: {error}"


async def fail(question: Approval) -> Allow:
    raise ValueError("boom")


def find_results(events: list[Event]) -> dict[str, ToolResult]:
    """The results by call, each of which was written once."""
    calls = [body.call_id for body in bodies(events, ToolCall)]
    results = bodies(events, ToolResult)
    assert sorted(calls) == sorted(body.call_id for body in results)
    return {body.name: body for body in results}


async def test_a_question_whose_approver_fails_has_a_result() -> None:
    async with retinue.open(approver=fail, mode="ask") as r:
        run = await r.spawn(main({"main": [call("inquire"), "end"]}, tools=[inquire]), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    results = find_results(events)
    assert result.status == "done" and not results["which"].success
    assert "boom" in results["which"].text and "boom" in results["inquire"].text


async def test_a_question_of_a_run_that_is_stopping_writes_nothing() -> None:
    begun = asyncio.Event()
    asked: list[type[BaseException]] = []

    @tool(tier="observe")
    async def hang(ctx: Context) -> str:
        """Asks when it is cancelled, in a task of its own, as a late elicitation does."""
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            late = asyncio.get_running_loop().create_task(ctx.ask_person("which", {"a": 1}, "which one?"))
            [error] = await asyncio.gather(late, return_exceptions=True)
            asked.append(type(error))
            raise
        return ""

    async with retinue.open(mode="ask") as r:
        run = await r.spawn(main({"main": [call("hang"), "end"]}, tools=[hang]), "go")
        await begun.wait()
        await run.cancel()
        await run.result()
        events = [event async for event in run.events()]
    assert asked == [asyncio.CancelledError]
    assert [body.name for body in (*bodies(events, ToolCall), *bodies(events, ToolResult))] == ["hang"]


@pytest.mark.parametrize("wait", [None, 0.01])
async def test_a_question_that_nobody_answers_has_a_result(wait: float | None) -> None:
    options = {} if wait is None else {"wait_approvals": wait}
    async with retinue.open(mode="ask", **options) as r:  # type: ignore[arg-type]
        run = await r.spawn(main({"main": [call("inquire"), "end"]}, tools=[inquire]), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, find_results(events)["inquire"].text) == ("done", "None")


async def test_the_answer_of_a_person_is_in_no_result() -> None:
    async def answer(question: Approval) -> Allow:
        return Allow(args={"a": "hunter2"})

    async with retinue.open(approver=answer, mode="ask") as r:
        run = await r.spawn(main({"main": [call("inquire"), "end"]}, tools=[inquire]), "go")
        await run.result()
        events = [event async for event in run.events()]
    results = find_results(events)
    assert (results["which"].text, results["which"].file) == ("answered", "")
    assert results["inquire"].text == "{'a': 'hunter2'}"  # only the function that asked gets it
