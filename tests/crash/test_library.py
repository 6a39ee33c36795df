"""Going on from Python: what the log cannot keep is given again; spent budget, turns and time are as they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue import Allow, Approval, ConfigError, Context, Limits, Profile, Retinue, Task, tool
from retinue.build.logs import open_log_reader
from retinue.core.control import ClientOptions, RunHandle
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    ProgressReported,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    UsageReported,
)
from retinue.core.messages import Call, Reply, ToolTurn, UserTurn
from retinue.log.listing import load_listing
from retinue.log.threads import BROKEN_OFF, NOT_RUN
from retinue.testing import ManualClock, scripted
from tests.supervisor.tree.kit import bodies, call, kinds, main, spawn, until


class Crash:
    """Runs a tree in memory up to an event, and begins again from the log at that place, as after kill -9."""

    def __init__(self, profile: Profile, **options: Any) -> None:
        self.profile = profile
        self.options = {"mode": "yes", **options}

    async def events(self, *, limits: Limits | None = None, task: str = "go") -> list[Event]:
        """All events of an undisturbed run."""
        async with retinue.open(**self.options) as r:
            run = await r.spawn(self.profile, task, limits=limits)
            return [event async for event in run.events()]

    @asynccontextmanager
    async def after(self, events: list[Event], **options: Any) -> AsyncIterator[Retinue]:
        """A new process whose log has just these events."""
        async with retinue.open(**{**self.options, **options}) as r:
            for event in events:
                r.control.log.append(event)
            yield r

    async def goes_on(self, events: list[Event], **options: Any) -> tuple[RunHandle, list[Event]]:
        async with self.after(events, **options) as r:
            run = await r.resume(events[0].tree, profiles=[self.profile])
            await run.result()
            return run, [event async for event in run.events()]


A, B = {"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}
AGENTS = {
    "main": [
        spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}),
        call("note", text="m"),
        "done: x",
    ],
    "a": [call("note", text="a"), "a said"],
    "b": [spawn({"task": "c", "subagent_id": "c"}), "b said"],
    "c": [call("look"), call("note", text="c"), "c said"],
}


def notes() -> tuple[list[str], list[Any]]:
    said: list[str] = []

    @tool
    def note(text: str) -> str:
        """Writes it down, for good."""
        said.append(text)
        return "noted"

    @tool(tier="observe", repeatable=True)
    def look() -> str:
        """Looks around."""
        return "seen"

    return said, [note, look, "spawn_subagents", "list_agents", "get_agent"]


async def test_a_tree_goes_on_from_every_single_event() -> None:
    """Whatever the last event on disk was: nothing twice, one ending each, the same answer."""
    said, tools = notes()
    crash = Crash(main(AGENTS, tools=tools))
    whole = await crash.events()
    assert sorted(said) == ["a", "c", "m"]
    for cut in range(1, len(whole)):
        before = whole[:cut]
        # The tool runs when its call is on disk; it is unknown whether it did when there is no result.
        done = {e.body.args["text"] for e in before if isinstance(e.body, ToolCall) and e.body.name == "note"}
        said.clear()
        run, events = await crash.goes_on(before)
        assert not done & set(said), f"after {cut} events {done & set(said)} happened again"
        assert done | set(said) == {"a", "c", "m"}, cut
        assert events[:cut] == before
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert await run.state() == "done"
        endings = [event.run for event in events if isinstance(event.body, RunEnded)]
        assert sorted(endings) == [0, 1, 2, 3], cut
        resumed = {event.run for event in events if isinstance(event.body, RunResumed)}
        ended = {event.run for event in before if isinstance(event.body, RunEnded)}
        assert resumed == {e.run for e in before if isinstance(e.body, RunSpawned)} - ended
        for number in range(4):
            calls = [body.call_id for body in bodies(events, ToolCall, run=number)]
            assert sorted(calls) == sorted(body.call_id for body in bodies(events, ToolResult, run=number))


async def test_the_model_is_told_that_nobody_knows(tmp_path: Path) -> None:
    said, tools = notes()
    crash = Crash(main({"main": [call("note", text="x"), "{{last_result}}"]}, tools=tools))
    whole = await crash.events()
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ToolCall))
    _, events = await crash.goes_on(whole[:place])
    [result] = bodies(events, ToolResult)
    assert (result.outcome, result.success) == ("unknown_after_crash", False)
    assert said == ["x"]
    assert events[-1].body.final_response.startswith("unknown_after_crash: the process died while")


@pytest.mark.requirement("P15")
async def test_a_question_is_asked_again_and_an_answer_takes_effect_once() -> None:
    said, tools = notes()
    asked: list[str] = []

    async def yes(question: Approval) -> Allow:
        asked.append(question.tool)
        return Allow()

    crash = Crash(main({"main": [call("note", text="x"), "done"]}, tools=tools), mode="ask", approver=yes)
    whole = await crash.events()
    kinds_of = [type(event.body) for event in whole]
    for last, again, happens in (
        (ApprovalAsked, ["note"], ["x"]),  # nobody had answered
        (ApprovalDecided, [], ["x"]),  # the answer had not reached the call
    ):
        said.clear()
        asked.clear()
        _, events = await crash.goes_on(whole[: kinds_of.index(last) + 1])
        assert (asked, said) == (again, happens)
        assert events[-1].body.status == "done"
    said.clear()
    started = next(n for n, event in enumerate(whole, 1) if event.kind == "tool.started")
    _, events = await crash.goes_on(whole[:started])
    assert (said, bodies(events, ToolResult)[0].outcome) == ([], "unknown_after_crash")


async def test_a_denial_that_had_not_arrived_arrives() -> None:
    said, tools = notes()

    async def no(_: Approval) -> retinue.Deny:
        return retinue.Deny("not today")

    crash = Crash(main({"main": [call("note", text="x"), "{{last_result}}"]}, tools=tools), mode="ask", approver=no)
    whole = await crash.events()
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ApprovalDecided))
    _, events = await crash.goes_on(whole[:place], approver=None)
    assert events[-1].body.final_response == "The user denied this call: not today"
    assert said == []


async def test_spent_budget_and_turns_are_spent() -> None:
    usage = {"input_tokens": 3000, "output_tokens": 0}
    agents = {
        "main": [{**call("look"), "usage": usage}, {**call("look"), "usage": usage}, {"text": "no", "usage": usage}]
    }
    _, tools = notes()
    crash = Crash(main(agents, tools=tools))
    whole = await crash.events(limits=Limits(tokens=5000))
    assert whole[-1].body.status == "limited"
    place = [n for n, event in enumerate(whole, 1) if isinstance(event.body, UsageReported)]
    _, events = await crash.goes_on(whole[: place[1]])
    assert events[-1].body.status == "limited"
    assert len(bodies(events, UsageReported)) == 2
    whole = await crash.events(limits=Limits(turns=2))
    second = [n for n, event in enumerate(whole, 1) if isinstance(event.body, TurnStarted)][1]
    _, events = await crash.goes_on(whole[:second])
    assert [body.turn for body in bodies(events, TurnStarted)] == [1, 2, 2]
    assert events[-1].body.error_details == "Run 'main' stopped: limit of 2 turns reached"


async def test_a_run_has_the_time_that_was_left() -> None:
    clock = ManualClock()
    agents = {"main": [{**call("list_agents"), "delay": 40}, {"hang": True}]}
    crash = Crash(Profile("main", model=scripted(agents, clock=clock)), clock=clock)
    async with retinue.open(**crash.options) as r:
        run = await r.spawn(crash.profile, "go", limits=Limits(seconds=100))
        await clock.advance(45)
        before = await r.control.log.read(run.tree)
    async with crash.after(before) as r:
        run = await r.resume(before[0].tree, profiles=[crash.profile])
        await clock.advance(59)  # 40 s of the 100 are in the log
        assert await run.state() == "running"
        await clock.advance(2)
        result = await run.result()
    assert (result.status, result.error_details) == ("timed_out", "Run 'main' timed out after 100000ms")
    assert result.duration_ms == 100_000


async def test_time_in_which_no_process_had_it_is_no_time_of_the_run(tmp_path: Path) -> None:
    clock = ManualClock()
    agents = {"main": [{**call("list_agents"), "delay": 40}, {"hang": True}]}
    crash = Crash(Profile("main", model=scripted(agents, clock=clock)), clock=clock, project=tmp_path)
    async with retinue.open(**crash.options) as r:
        run = await r.spawn(crash.profile, "go")
        await clock.advance(45)
        before = await r.control.log.read(run.tree)
    async with crash.after(before, path=tmp_path / ".retinue"):
        await clock.advance(3600)
    async with crash.after([], path=tmp_path / ".retinue") as r:
        run = await r.resume(before[0].tree, profiles=[crash.profile])
        await clock.advance(5)
        await until(run, RunResumed)
        found = await load_listing(open_log_reader(tmp_path / ".retinue"), run.tree)
        assert (found.live, found.seconds_of(found.runs.runs[0], clock.wall())) == (True, 45)


async def test_background_children_and_queued_ones_come_back() -> None:
    agents = {
        "main": [
            spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}, background=True),
            "wait",
            "end",
        ],
        "a": [{"text": "a said", "delay": 1}],
        "b": [{"text": "b said", "delay": 1}],
    }
    clock = ManualClock()
    profile = Profile("main", model=scripted(agents, clock=clock))
    crash = Crash(profile, clock=clock)
    async with retinue.open(**crash.options) as r:
        run = await r.spawn(profile, "go", limits=Limits(concurrent=1))
        await clock.advance(0)
        before = await r.control.log.read(run.tree)
    assert {event.run for event in before if isinstance(event.body, RunStarted)} == {0, 1}
    async with crash.after(before) as r:
        run = await r.resume(before[0].tree, profiles=[profile])
        await clock.advance(5)
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, [child.status for child in result.children]) == ("done", ["done", "done"])
    assert kinds(events, run=2).count("run.started") == 1
    assert [body.about for body in bodies(events, retinue.core.events.Inbox, run=0)] == [1, 2]


async def test_a_python_function_is_not_called_again() -> None:
    called = []

    async def agent(task: str, ctx: Context) -> str:
        called.append(task)
        await asyncio.sleep(0)
        return "fine"

    worker = Profile("worker", call=agent)
    boss = main({"main": [call("subagent_worker", task="x"), "{{last_result}}"]}, tools=[worker])
    crash = Crash(boss)
    whole = await crash.events()
    started = next(n for n, event in enumerate(whole, 1) if event.run == 1 and isinstance(event.body, RunStarted))
    _, events = await crash.goes_on(whole[:started])
    assert called == ["x"]
    assert events[-1].body.final_response == "Subagent ended unexpectedly"
    called.clear()
    _, events = await crash.goes_on(whole[: started - 1])
    assert (called, events[-1].body.final_response) == (["x"], "fine")


@pytest.mark.parametrize("name", ["client", "mcp-client", "main"])
async def test_a_client_waits_for_its_subagents_when_its_tree_is_resumed(name: str) -> None:
    async def never(task: str, ctx: Context) -> str:
        raise AssertionError

    _, functions = notes()
    given = [Profile(name, call=never, tools=["glob", *functions])]
    helper = Profile("helper", model=scripted({"helper": ["found"]}), tools=["glob"])
    crash = Crash(helper)
    for tools, profiles in ((["glob"], [helper]), (["glob", *functions], [helper, *given])):
        async with retinue.open(**crash.options) as r:
            async with await r.control.open_client(ClientOptions(name=name, task="x", tools=tools)) as client:
                await (await client.spawn(helper, Task("look", label="search"))).result()
                granted = {tool.name for tool in r.control.trees[client.tree].runs[0].plan.specs}
            whole = await r.control.log.read(client.tree)
        assert [body.client for body in bodies(whole, RunSpawned)] == [True, False]
        started = next(n for n, event in enumerate(whole, 1) if event.run == 1 and isinstance(event.body, RunStarted))
        async with crash.after(whole[:started]) as r:
            run = await r.resume(whole[0].tree, profiles=profiles)
            assert {tool.name for tool in r.control.trees[run.tree].runs[0].plan.specs} == granted
            result = await run.result()
        assert (result.status, result.final_response) == ("done", "search: found")


@pytest.mark.parametrize("name", ["client", "mcp-client"])
async def test_a_function_with_the_name_of_a_client_is_a_function(name: str) -> None:
    async def agent(task: str, ctx: Context) -> str:
        return "fine"

    crash = Crash(Profile(name, call=agent))
    whole = await crash.events()
    assert not bodies(whole, RunSpawned)[0].client
    _, events = await crash.goes_on(whole[:1])
    assert events[-1].body.final_response == "fine"


async def test_what_the_log_cannot_keep_has_to_be_given() -> None:
    _, tools = notes()
    crash = Crash(main({"main": [call("look"), "done"]}, tools=tools))
    whole = await crash.events()
    async with crash.after(whole[:3]) as r:
        with pytest.raises(ConfigError, match=r"cannot be resumed or continued: .*'note'.*give it again, from Python"):
            await r.resume(whole[0].tree)
        assert (await r.control.log.read(whole[0].tree)) == whole[:3]
        with pytest.raises(ConfigError, match="there is no tree 'nope'"):
            await r.resume("nope")
    async with crash.after(whole) as r:
        with pytest.raises(ConfigError, match="has ended: done"):
            await r.resume(whole[0].tree)


async def test_a_run_is_continued_in_its_tree_and_a_primary_in_a_new_one(tmp_path: Path) -> None:
    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}), "first"],
        "a": ["a said", "never"],
    }
    profile = main(agents)
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        result = await r.run(profile, "go")
        child = await r.continue_run(f"{result.tree}/1", "and then?", profiles=[profile])
        again = await child.result()
        assert (child.tree, child.number, again.subagent_id, again.status) == (result.tree, 2, "a", "done")
        events = [event async for event in child.events()]
        assert events[0].body.continues == 1 and kinds(events, run=2)[-1] == "run.ended"
        twice = await r.continue_run(again, "and now?", profiles=[profile])
        assert (await twice.result()).run == 3
        new = await r.continue_run(result, "and then?", profiles=[profile])
        assert new.tree != result.tree
        [first, *_] = [event.body async for event in new.events()]
        assert (first.origin, first.continues, (await new.result()).status) == (result.tree, 0, "done")
        with pytest.raises(ConfigError, match="has no run 9"):
            await r.continue_run(f"{result.tree}/9", "x")


async def test_what_a_run_had_done_when_it_was_stopped_is_known_to_who_continues_it() -> None:
    """Else it would be done a second time."""
    said, [note, *_] = notes()

    @tool(tier="observe")
    async def hang() -> str:
        """Never comes back."""
        await asyncio.Event().wait()
        return ""

    @tool(tier="confirm")
    def sign() -> str:
        """Has to be asked about."""
        return "signed"

    class Twice:
        """Wants all three at once, and afterwards nothing."""

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            threads.append(list(request.thread))
            calls = Call("a", "note", {"text": "paid"}), Call("b", "hang", {}), Call("c", "sign", {})
            return Reply("over") if len(threads) > 1 else Reply("", calls)

    threads: list[list[Any]] = []
    profile = Profile("main", model=Twice(), tools=[note, hang, sign])
    async with retinue.open(wait_approvals=600, allow=["note"]) as r:
        run = await r.spawn(profile, "go")
        while not (r.control.approvals.pending() and bodies(await r.control.log.read(run.tree), ToolResult)):
            await asyncio.sleep(0)
        await run.cancel()
        stopped = await run.result()
        await (await r.continue_run(stopped, "go on", profiles=[profile])).result()
    [_, thread] = threads
    assert [turn.text for turn in thread if isinstance(turn, ToolTurn)] == ["noted", BROKEN_OFF, NOT_RUN]
    assert (stopped.status, said, thread[-1]) == ("cancelled", ["paid"], UserTurn("go on"))


@pytest.mark.finding("X1")
@pytest.mark.parametrize(("rules", "asked"), [({}, []), ({"ask": ["shell(echo 2)"]}, ["echo 2"])])
async def test_an_answer_in_the_log_does_not_cover_what_a_rule_of_now_asks_about(
    rules: dict[str, list[str]], asked: list[str]
) -> None:
    questions: list[str] = []

    async def always(question: Approval) -> Allow:
        questions.append(str(question.args["command"]))
        return Allow("tool")

    agents = {"main": [call("shell", command="echo 1"), call("shell", command="echo 2"), "done"]}
    crash = Crash(Profile("main", model=scripted(agents)), mode="ask", approver=always)
    whole = await crash.events()
    assert questions == ["echo 1"]
    questions.clear()
    first = next(at for at, event in enumerate(whole, 1) if isinstance(event.body, ToolResult))
    await crash.goes_on(whole[:first], **rules)
    assert questions == asked


@pytest.mark.parametrize("mode", ["yes", "ask"])
async def test_a_call_that_a_person_has_replaced_is_never_made(mode: str) -> None:
    """The process dies after a yes with other arguments, and a rule forbids these on resume: neither call is made."""
    said, tools = notes()

    async def edit(question: Approval) -> Allow:
        return Allow(args={"text": "edited"})

    crash = Crash(main({"main": [call("note", text="original"), "{{last_result}}"]}, tools=tools), mode="ask")
    crash.options["approver"] = edit
    whole = await crash.events()
    assert said == ["edited"]
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ApprovalDecided))
    said.clear()
    rules = {"allow": ["note(text=original)"], "deny": ["note(text=edited)"]}
    _, events = await crash.goes_on(whole[:place], mode=mode, approver=None, **rules)
    [result] = bodies(events, ToolResult)
    assert said == [] and not result.success
    assert "the rule note(text=edited) forbids it" in result.text
    assert [body.allowed for body in bodies(events, ApprovalDecided)] == [True, False]


@pytest.mark.parametrize("mode", ["yes", "ask"])
async def test_a_call_that_a_person_has_replaced_stays_replaced_after_two_crashes(mode: str) -> None:
    """The tool has changed since the yes with other arguments, so the second process asks about these again, and dies
    after its yes."""
    said, tools = notes()
    asked: list[dict[str, Any]] = []

    async def edit(question: Approval) -> Allow:
        return Allow(args={"text": "edited"})

    async def allow(question: Approval) -> Allow:
        asked.append(question.args)
        return Allow()

    def find_answer(events: list[Event]) -> int:
        return max(n for n, event in enumerate(events, 1) if isinstance(event.body, ApprovalDecided))

    crash = Crash(main({"main": [call("note", text="original"), "{{last_result}}"]}, tools=tools), mode="ask")
    crash.options["approver"] = edit
    whole = await crash.events()
    first = whole[: find_answer(whole)]
    answer = msgspec.structs.replace(first[-1].body, seal="of another tool")
    first[-1] = msgspec.structs.replace(first[-1], body=answer)
    _, again = await crash.goes_on(first, approver=allow)
    assert asked == [{"text": "edited"}]
    said.clear()
    await crash.goes_on(again[: find_answer(again)], mode=mode, approver=None)
    assert said == ["edited"]


async def test_a_call_begun_before_the_crash_is_reported_to_the_parent_once() -> None:
    @tool(repeatable=True)
    def look() -> str:
        """Looks around."""
        return "seen"

    async def allow(question: Approval) -> Allow:
        return Allow()

    child = Profile("child", "c", tools=[look])
    agents = {"main": [call("subagent_child", task="x"), "end"], "child": [call("look"), "done"]}
    crash = Crash(main(agents, tools=[child]), mode="ask", approver=allow)
    whole = await crash.events()
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ApprovalAsked))
    _, events = await crash.goes_on(whole[:place])
    assert [body.completed for body in bodies(events, ProgressReported, run=0)] == [False, True]
