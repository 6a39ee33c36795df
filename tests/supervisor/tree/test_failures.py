"""What goes wrong around a run: hosts that misbehave, half characters, a disk that is busy, people who answer late."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import apsw
import pydantic
import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Limits, Profile, RunHandle, Task, tool
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor as built
from retinue.core.errors import LogLost
from retinue.core.events import Message, RunEnded, RunSpawned, RunStarted, ToolCall, ToolResult
from retinue.core.messages import Call, Reply
from retinue.core.rules import Verdict
from retinue.log.sqlite import SqliteLog
from retinue.log.threads import fold_thread
from retinue.testing import ManualClock, allow_all, scripted
from tests.gates import HeldClock
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree, until

HALF = "\ud83d"


class Halves:
    """A model that says half an emoji wherever it can."""

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        if request.ref.run:
            return Reply(HALF)
        calls = [Call("a", "broken", {"word": HALF}), Call("b", "spawn_subagents", {"tasks": [{"task": f"{HALF} x"}]})]
        return Reply(HALF, (calls[request.turn - 1],)) if request.turn <= len(calls) else Reply("end")


async def test_half_a_character_hurts_nobody(tmp_path: Path) -> None:
    @tool(tier="observe")
    def broken(word: str) -> str:
        """Half an emoji."""
        return word

    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        run = await r.spawn(Profile("main", model=Halves(), tools=[broken, "spawn_subagents"]), HALF)
        kinds = [event.kind async for event in run.events()]
        assert (await run.result()).status == "done"
        assert (await r.run(main({"main": [{"text": "after"}]}), "go")).final_response == "after"
        stored = await r.control.log.read(run.tree)
    assert [event.kind for event in stored] == kinds
    assert [body.task for body in bodies(stored, RunSpawned)] == ["?"]  # a call with half a character runs nothing


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
        asyncio.get_running_loop().call_later(0.3, blocker.execute, "ROLLBACK")
        seen = [event.seq async for event in run.events()]
        await run.result()
        blocker.close()
    assert seen == list(range(1, len(seen) + 1))


async def test_a_second_cancel_tells_no_ending_before_it_is_written(tmp_path: Path) -> None:
    owner = built(Parts(tmp_path, tmp_path / ".retinue", mode="yes"))
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


@pytest.mark.parametrize("trouble", [SystemExit(2), asyncio.CancelledError(), ValueError("x")])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_a_function_raises_is_words_for_the_model(trouble: BaseException, kind: str) -> None:
    @tool(tier="observe", name="troubled")
    def sync() -> None:
        """Raise."""
        raise trouble

    @tool(tier="observe", name="troubled")
    async def other() -> None:
        """Raise."""
        raise trouble

    script = {"main": [call("troubled"), {"text": "{{last_result}}"}]}
    async with retinue.open() as r:
        result = await r.run(main(script, tools=[sync if kind == "sync" else other]), "go")
    assert result.status == "done"
    assert type(trouble).__name__ in result.final_response


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


async def test_what_a_sync_function_says_from_its_thread_keeps_the_order() -> None:
    @tool(tier="observe")
    def chatter(ctx: Context) -> str:
        """Say a lot."""
        for n in range(500):
            ctx.emit(str(n))
        return "said"

    calls = {"tools": [{"name": "chatter", "args": {}}] * 4}
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        async with retinue.open() as r:
            run = await r.spawn(main({"main": [calls, {"text": "end"}]}, tools=[chatter]), "go")
            seen = [event.seq async for event in run.events()]
            await run.result()
            assert seen == [event.seq for event in await r.control.log.read(run.tree)] == list(range(1, len(seen) + 1))
    finally:
        sys.setswitchinterval(before)


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


async def test_a_policy_that_denies_is_not_asked_about() -> None:
    class Never:
        def judge(self, spec: Any, args: Any, *, primary: bool, workspace: str) -> Verdict:
            return Verdict("deny", "nothing")

    supervisor = built(Parts(project=Path.cwd(), approver=allow_all, policy=Never()))  # type: ignore[arg-type]
    node = supervisor.spawner.spawn_primary(
        main({"main": [call("list_agents"), {"text": "{{last_result}}"}]}), Task("go")
    )
    await node.join()
    assert node.result().final_response == "The user denied this call: the rule nothing forbids it"
    await supervisor.close()


async def test_a_name_alone_does_not_make_a_tool_the_parent_s() -> None:
    @tool(tier="observe", name="shell")
    def harmless(command: str) -> str:
        """Not a shell."""
        return "harmless"

    @tool(tier="observe", name="deploy")
    def staging() -> str:
        """To staging."""
        return "staging"

    @tool(tier="observe", name="deploy")
    def production() -> str:
        """To production."""
        return "PRODUCTION"

    script = {
        "main": [
            spawn({"task": "x", "subagent_type": "kid"}, {"task": "y", "subagent_type": "kid2"}),
            {"text": "{{last_result}}"},
        ],
        "kid": [call("shell", command="echo real"), {"text": "{{last_result}}"}],
        "kid2": [call("deploy"), {"text": "{{last_result}}"}],
    }
    kids = [Profile("kid", tools=["shell"]), Profile("kid2", tools=[production])]
    async with retinue.open(mode="yes", profiles=kids) as r:
        result = await r.run(main(script, tools=[harmless, staging, "spawn_subagents"]), "go")
    assert "Unknown tool 'shell'" in result.children[0].final_response
    assert result.children[1].final_response == "staging"


async def test_a_yes_that_comes_after_the_cancel_does_nothing() -> None:
    acts: list[int] = []
    asked = asyncio.Event()

    @tool
    async def act() -> str:
        """Act."""
        acts.append(1)
        return "acted"

    async def stubborn(question: Approval) -> Allow:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Allow()
        raise AssertionError

    async with retinue.open(approver=stubborn) as r:
        run = await r.spawn(main({"main": [call("act"), {"text": "x"}]}, tools=[act]), "go")
        await asked.wait()
        await run.cancel()
        result = await run.result()
    assert (result.status, acts, result.total_turns) == ("cancelled", [], 1)


async def test_the_approver_cannot_change_what_was_asked() -> None:
    async def sly(question: Approval) -> Allow:
        question.args["command"] = "echo something else"
        return Allow()

    async with retinue.open(approver=sly) as r:
        run = await r.spawn(main({"main": [call("shell", command="echo this"), {"text": "{{last_result}}"}]}), "go")
        assert (await run.result()).final_response == "this\n"
        assert bodies(await r.control.log.read(run.tree), ToolCall)[0].args == {"command": "echo this"}


async def test_a_function_that_asks_when_nobody_is_there_ends_its_run() -> None:
    @tool(tier="observe")
    async def wipe(ctx: Context) -> str:
        """Wipe."""
        return str(await ctx.approve("wipe"))

    async with retinue.open() as r:
        result = await r.run(main({"main": [call("wipe"), {"text": "never"}]}, tools=[wipe]), "go")
    assert (result.status, result.final_response) == ("failed", "Run requires confirmation")


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


async def test_the_thread_leaves_out_what_the_model_never_saw() -> None:
    @tool(tier="observe")
    async def busy(ctx: Context) -> str:
        """Talk and ask."""
        ctx.emit("progress 50%")
        return str(await ctx.approve("really"))

    script = {"main": [{"text": "I will call it", **call("busy")}, {"text": "end"}]}
    async with retinue.open(approver=allow_all) as r:
        run = await r.spawn(main(script, tools=[busy]), "go")
        result = await run.result()
        _, first, second, _ = fold_thread(await r.control.log.read(run.tree), 0)
    assert (first.text, [c.name for c in first.calls], second.text) == ("I will call it", ["busy"], "True")  # type: ignore[union-attr]
    assert (result.tool_count, len(result.tool_logs)) == (1, 1)


async def test_a_provider_that_repeats_its_call_ids_confuses_nobody() -> None:
    @tool(tier="observe")
    async def echo(word: str) -> str:
        """Say it."""
        return word

    class Repeating:
        async def complete(self, request: Any, on_delta: Any) -> Reply:
            if request.turn > 2:
                return Reply("end")
            return Reply("", (Call("same", "echo", {"word": "a"}), Call("same", "echo", {"word": "b"})))

    async with retinue.open() as r:
        run = await r.spawn(Profile("main", model=Repeating(), tools=[echo]), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert [c.call_id for c in bodies(events, ToolCall)] == ["same", "same-2", "same-3", "same-4"]
    assert [t.text for t in fold_thread(events, 0) if type(t).__name__ == "ToolTurn"] == ["a", "b", "a", "b"]  # type: ignore[union-attr]


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


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    given: int = pydantic.Field(alias="theGiven")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.given


async def test_pydantic_models_with_aliases_and_computed_fields_come_back() -> None:
    profile = Profile("p", model=scripted({"p": [call("final_answer", theGiven=4)]}), output=Aliased)
    async with retinue.open() as r:
        assert (await r.run(profile, "go")).output().double == 8

        async def agent(task: str, ctx: Context) -> Aliased:
            return Aliased(theGiven=5)

        assert (await r.run(Profile("a", call=agent, output=Aliased), "go")).output().double == 10


async def test_a_wait_that_is_given_up_takes_its_slot_back() -> None:
    working, most = 0, 0
    gate = asyncio.Event()

    async def mid(task: str, ctx: Context) -> str:
        nonlocal working, most
        child = await ctx.spawn("leaf", "x")
        try:
            await asyncio.wait_for(child.result(), 0.05)
        except TimeoutError:
            working += 1
            most = max(most, working)
            working -= 1
        gate.set()
        return (await child.result()).final_response

    async def leaf(task: str, ctx: Context) -> str:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await gate.wait()
        working -= 1
        return "leaf"

    script = {"main": [call("subagent_mid", task="go"), {"text": "{{last_result}}"}]}
    async with retinue.open(mode="yes", profiles=[Profile("leaf", call=leaf)]) as r:
        primary = main(script, tools=[Profile("mid", call=mid)])
        run = await r.spawn(primary, "go", limits=Limits(concurrent=1))
        asyncio.get_running_loop().call_later(0.3, gate.set)
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


async def test_denying_without_words_is_fine(tmp_path: Path) -> None:
    async def silent(question: Approval) -> Deny:
        return Deny(None)  # type: ignore[arg-type]

    async with retinue.open(tmp_path / ".retinue", approver=silent) as r:
        run = await r.spawn(main({"main": [call("shell", command="x"), {"text": "{{last_result}}"}]}), "go")
        assert (await run.result()).final_response == "The user denied this call."
        assert (await r.control.log.read(run.tree))[-1].kind == "run.ended"
