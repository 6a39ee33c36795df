"""Tests of failures around a run: busy disks, lost logs, stopped runs, abandoned waits."""

import asyncio
import json
from pathlib import Path

import apsw
import pytest

import retinue
from retinue import Context, Limits, Profile, RunHandle, Task
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.errors import LogLost
from retinue.core.events import Message, RunEnded, RunSpawned, RunStarted, ToolResult
from retinue.log.sqlite import SqliteLog
from retinue.testing import ManualClock, scripted
from tests.gates import HeldClock, pass_time
from tests.gates import until as wait_until
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree, until


async def test_a_value_that_is_no_json_leaves_a_gap_that_says_so(tmp_path: Path) -> None:
    async def agent(task: str, ctx: Context) -> str:
        await ctx.approve("deploy", target={1: {2, 3}, (4, 5): object})
        ctx.emit(42)  # type: ignore[arg-type]
        return "ok"

    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        run = await r.spawn(Profile("agent", call=agent), "go")
        assert (await run.result()).status == "done"
        stored = await r.control.log.read(run.tree)
    assert [event.seq for event in stored] == list(range(1, len(stored) + 1))
    assert [body.text for body in bodies(stored, Message)] == ["42"]


async def test_a_disk_that_was_busy_once_loses_nothing_and_stops_nobody(tmp_path: Path) -> None:
    script = {"main": [{**spawn({"task": "a"}), "delay": 1}, {"text": "end"}], "*": [{"text": "k"}]}
    clock = HeldClock()
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        log = r.control.log
        log._own._db.set_busy_timeout(1)  # type: ignore[attr-defined]
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go")
        await until(run, RunStarted)
        blocker = apsw.Connection(str(log.path))  # type: ignore[attr-defined]
        blocker.set_busy_timeout(100_000)
        blocker.execute("BEGIN IMMEDIATE")
        clock.release()
        await wait_until(lambda: log._own.error)  # type: ignore[attr-defined] # it was busy
        blocker.execute("ROLLBACK")
        seen = [event.seq async for event in run.events()]
        await run.result()
        blocker.close()
    assert seen == list(range(1, len(seen) + 1))


async def test_a_second_cancel_tells_no_ending_before_it_is_written(tmp_path: Path) -> None:
    owner = make_supervisor(Parts(tmp_path, tmp_path / ".retinue", mode="yes"))
    run = owner.spawner.spawn_primary(main({"main": [{"hang": True}]}), Task("go"))
    await until(RunHandle(owner, run.ref), RunStarted)
    assert isinstance(owner.log, SqliteLog)
    blocker = apsw.Connection(str(owner.log.path))
    blocker.set_busy_timeout(100_000)
    blocker.execute("BEGIN IMMEDIATE")
    assert await owner.cancel(run.ref.tree)
    while run.view.ended is None:
        await asyncio.sleep(0)
    assert run.driver_task is not None
    for _ in range(3):
        run.driver_task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    was_finished = run.finished
    blocker.execute("ROLLBACK")
    blocker.close()
    await run.join()
    assert not was_finished
    assert [type(event.body) for event in await owner.log.read(run.ref.tree)][-1] is RunEnded
    await owner.close()


async def test_a_run_whose_process_lost_the_log_fails_and_nothing_is_written_again(tmp_path: Path) -> None:
    calls: list[str] = []

    @retinue.tool(tier="observe")
    async def take() -> str:
        """Has another process take the log."""
        calls.append("take")
        lock = tmp_path / ".retinue/logs/0001.lock"
        lock.unlink()
        taken.append(SqliteLog(lock.parent))
        return "taken"

    @retinue.tool(tier="confirm")
    async def act() -> str:
        """Must be on disk before it runs."""
        calls.append("act")
        return "done"

    taken: list[SqliteLog] = []
    script = {"main": [call("take"), call("act"), {"text": "end"}]}
    with pytest.raises(LogLost, match="events are lost"):
        async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
            run = await r.spawn(main(script, tools=[take, act]), "go")
            result = await run.result()
            assert (result.status, calls) == ("failed", ["take"])
            assert "may no longer write the log" in str(result.error_details)
    events = await taken[0].read(run.tree)
    assert not any(isinstance(event.body, RunEnded) for event in events)
    await taken[0].close()


async def test_killed_before_its_first_step_a_run_still_ends() -> None:
    async with retinue.open() as r:
        run = await r.spawn(main({"main": [{"text": "x"}]}), "go")
        r.control.trees[run.tree].kill()
        assert (await run.result()).status == "cancelled"


async def test_watchers_leave_nothing_behind(tmp_path: Path) -> None:
    async with retinue.open(tmp_path / ".retinue") as r:
        for _ in range(5):
            run = await r.spawn(main({"main": [{"text": "x"}]}), "go")
            assert [event.kind async for event in run.events()][-1] == "run.ended"
        await asyncio.sleep(0)
        assert r.control.log._own._feeds == {}  # type: ignore[attr-defined]


async def test_fanning_out_in_a_callable_needs_no_second_slot() -> None:
    async def fan(task: str, ctx: Context) -> str:
        children = [await ctx.spawn("leaf", f"{n}") for n in range(3)]
        results = await asyncio.gather(*(child.result() for child in children))
        return " ".join(result.final_response for result in results)

    script = {"main": [call("subagent_fan", task="go"), {"text": "{{last_result}}"}], "leaf": [{"text": "leaf"}]}
    async with retinue.open(mode="yes", profiles=[Profile("leaf", model=scripted(script))]) as r:
        primary = main(script, tools=[Profile("fan", call=fan)])
        result = await (await r.spawn(primary, "go", limits=Limits(concurrent=1))).result()
    assert result.final_response == "leaf leaf leaf"


async def test_many_long_answers_are_still_one_json(tmp_path: Path) -> None:
    script = {"main": [spawn({"task": "a"}, {"task": "b"}), {"text": "end"}], "*": [{"text": "ä\n" * 20_000}]}
    _, events = await tree(script, path=tmp_path / ".retinue")
    given = bodies(events, ToolResult, run=0)[0]
    assert len(given.text.encode()) <= 50 * 1024
    assert all("whole text in" in entry["answer"] for entry in json.loads(given.text)["results"])


async def test_of_several_tasks_all_are_spawned_or_none(tmp_path: Path) -> None:
    script = {
        "main": [spawn({"task": "fine"}, {"task": "x", "model": "nope:x"}), {"text": "end"}],
        "*": [{"text": "k"}],
    }
    _, events = await tree(script)
    assert "unknown model 'nope:x'" in bodies(events, ToolResult, run=0)[0].text
    assert len(bodies(events, RunSpawned)) == 1


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_run_that_was_stopped_ends_so_whatever_its_work_says(how: str) -> None:
    clock = ManualClock()

    async def agent(task: str, ctx: Context) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("client aborted") from None
        return ""

    async with retinue.open(clock=clock) as r:
        run = await r.spawn(Profile("agent", call=agent), "go", limits=Limits(seconds=5))
        await clock.settle()
        if how == "cancel":
            await run.cancel()
        else:
            await clock.advance(6)
        assert (await run.result()).status == ("cancelled" if how == "cancel" else "timed_out")


async def test_a_wait_that_is_given_up_takes_its_slot_back() -> None:
    working, most = 0, 0
    begun, gate = asyncio.Event(), asyncio.Event()

    async def mid(task: str, ctx: Context) -> str:
        nonlocal working, most
        child = await ctx.spawn("leaf", "x")
        try:
            await asyncio.wait_for(child.result(), 100)
        except TimeoutError:
            working += 1
            most = max(most, working)
            working -= 1
        return (await child.result()).final_response

    async def leaf(task: str, ctx: Context) -> str:
        nonlocal working, most
        working += 1
        most = max(most, working)
        begun.set()
        await gate.wait()
        working -= 1
        return "leaf"

    script = {"main": [call("subagent_mid", task="go"), {"text": "{{last_result}}"}]}
    async with retinue.open(mode="yes", profiles=[Profile("leaf", call=leaf)]) as r:
        primary = main(script, tools=[Profile("mid", call=mid)])
        run = await r.spawn(primary, "go", limits=Limits(concurrent=1))
        await begun.wait()
        await pass_time(100)
        await pass_time(0)  # the wait is given up
        gate.set()
        assert (await run.result()).final_response == "leaf"
    assert most == 1


async def test_a_shared_child_of_a_scratch_parent_has_a_folder(tmp_path: Path) -> None:
    kid = Profile("kid", workspace="shared")
    script = {
        "main": [spawn({"task": "x", "subagent_id": "x"}), {"text": "end"}],
        "x": [call("subagent_kid", task="y"), {"text": "{{last_result}}"}],
        "kid": [call("shell", command="pwd"), {"text": "{{last_result}}"}],
    }
    result, _ = await tree(script, profiles=[kid], path=tmp_path / ".retinue")
    assert result.children[0].final_response.strip() == result.children[0].workspace
